"""What a step costs, in seconds: fitted to measured steps, or estimated from the model's shape and the device's figures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from contbatch_cli.core.batch import ScheduledBatch, ScheduledSequence
from contbatch_cli.errors import UsageError
from contbatch_cli.units import counted

Curve = tuple[tuple[float, float], ...]
"""Points (x, seconds), x ascending."""

VERSION = 2
"""Of a stored cost model: counts up with its fields, and when the engine's steps take another time than those measured before."""

_FIT_ROUNDS = 4000


class StepShape(NamedTuple):
    """The quantities that a step's time depends on.

    `num_samples` counts the tokens that go through the LM head and the sampler. `decode_context` is the number of cached tokens
    that runs of one token read, `prefill_pairs` the number of query-key pairs of the longer runs, whose attention is arithmetic
    rather than reading. A decode with drafts reads its context once and then has their pairs. `shared_context` is that part of
    `decode_context` which lies in blocks that another decode of the step reads too: a common prefix, counted for all but one of them.
    """

    num_tokens: int
    num_runs: int
    num_samples: int
    decode_context: int
    prefill_pairs: int
    shared_context: int = 0


def shape_of(batch: ScheduledBatch) -> StepShape:
    """One walk over the plan."""
    num_samples = decode_context = prefill_pairs = 0
    decodes: dict[int, list[ScheduledSequence]] = {}
    for sequence in batch.sequences:
        num_samples += sequence.samples + sequence.num_drafts
        length = len(sequence.tokens)
        if length == 1 or sequence.num_drafts:
            decodes.setdefault(sequence.block_ids[0], []).append(sequence)
        if length == 1:
            decode_context += sequence.start + 1
        elif sequence.num_drafts:
            decode_context += sequence.end
            prefill_pairs += sequence.num_drafts * sequence.end
        else:
            prefill_pairs += length * sequence.start + length * (length + 1) // 2
    shared_context = sum(_shared_tokens(group) for group in decodes.values() if len(group) > 1)
    return StepShape(batch.num_tokens, len(batch.sequences), num_samples, decode_context, prefill_pairs, shared_context)


def _shared_tokens(sequences: Sequence[ScheduledSequence]) -> int:
    """Tokens in the blocks with which all tables begin, for all sequences but one. The tables cover the contexts, so that tells how
    many tokens a block has."""
    first, last = min(sequences, key=_table), max(sequences, key=_table)
    pairs = zip(first.block_ids, last.block_ids, strict=False)
    num_blocks = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.block_ids), len(last.block_ids)))
    context, table = max((one.end - one.block_start, len(one.block_ids)) for one in (first, last))
    return num_blocks * context // table * (len(sequences) - 1)


def _table(sequence: ScheduledSequence) -> tuple[int, ...]:
    return sequence.block_ids


class MeasuredStep(NamedTuple):
    """A step's shape and the seconds that it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """step = token_curve(tokens) + sample_curve(sampled rows) + runs, context and pairs at a price each.

    `token_curve` holds the launch overhead and all layers' matrix products, whose speed depends on how many tokens share them
    (at few tokens the weights are read for little work); `sample_curve` the LM head and the sampler. Between points both are
    straight lines, behind the last point they go on as they were. `source` says where the figures come from.
    """

    source: str
    is_estimate: bool
    token_curve: Curve
    sample_curve: Curve
    run_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_pair_s: float = 0.0
    shared_context_s: float = 0.0
    """Of a token of a prefix that another decode has read already."""

    def step_s(self, batch: ScheduledBatch) -> float:
        """The seconds that executing this plan takes."""
        return self.shape_s(shape_of(batch))

    def shape_s(self, shape: StepShape) -> float:
        seconds = interpolate(self.token_curve, shape.num_tokens)
        if shape.num_samples:
            seconds += interpolate(self.sample_curve, shape.num_samples)
        own_context = shape.decode_context - shape.shared_context
        context = own_context * self.decode_context_s + shape.shared_context * self.shared_context_s
        return seconds + shape.num_runs * self.run_s + context + shape.prefill_pairs * self.prefill_pair_s

    def as_dict(self) -> dict[str, Any]:
        """For a file; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CostModel:
        """Raises UsageError for what is no stored cost model."""
        try:
            return cls(
                source=str(fields["source"]),
                is_estimate=bool(fields["is_estimate"]),
                token_curve=tuple((float(x), float(y)) for x, y in fields["token_curve"]),
                sample_curve=tuple((float(x), float(y)) for x, y in fields["sample_curve"]),
                run_s=float(fields["run_s"]),
                decode_context_s=float(fields["decode_context_s"]),
                prefill_pair_s=float(fields["prefill_pair_s"]),
                shared_context_s=float(fields["shared_context_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"no stored cost model: {error!r}; run contbatch calibrate again") from error


def interpolate(curve: Curve, x: float) -> float:
    """The curve's value at x, at least 0."""
    return max(sum(weight * curve[knot][1] for knot, weight in _hat_weights([point[0] for point in curve], x)), 0.0)


def _hat_weights(knots: Sequence[float], x: float) -> list[tuple[int, float]]:
    """Which knots' values make up a piecewise linear curve at x, and how much of each; constant before the first knot."""
    if len(knots) == 1 or x <= knots[0]:
        return [(0, 1.0)]
    right = min(bisect_right(knots, x), len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    return [(right - 1, 1 - share), (right, share)]


def fit_cost_model(
    steps: Sequence[MeasuredStep], token_knots: Sequence[int], sample_knots: Sequence[int], source: str
) -> CostModel:
    """The non-negative least-squares fit of relative errors, by coordinate descent.

    The steps must vary tokens, samples, contexts and pairs apart from one another; 50 to 100 of them are enough.
    """
    rows = [_features(step.shape, token_knots, sample_knots) for step in steps]
    weighted = [[value / step.seconds for value in row] for row, step in zip(rows, steps, strict=True)]
    found = nonnegative_least_squares(weighted, [1.0] * len(steps))
    num_tokens, num_samples = len(token_knots), len(sample_knots)
    samples = found[num_tokens : num_tokens + num_samples]
    run_s, decode_context_s, shared_context_s, prefill_pair_s = found[num_tokens + num_samples :]
    return CostModel(
        source=source,
        is_estimate=False,
        token_curve=tuple(zip(map(float, token_knots), found, strict=False)),
        sample_curve=tuple(zip(map(float, sample_knots), samples, strict=True)),
        run_s=run_s,
        decode_context_s=decode_context_s,
        prefill_pair_s=prefill_pair_s,
        shared_context_s=shared_context_s,
    )


def _features(shape: StepShape, token_knots: Sequence[int], sample_knots: Sequence[int]) -> list[float]:
    row = [0.0] * (len(token_knots) + len(sample_knots))
    for knot, weight in _hat_weights(token_knots, shape.num_tokens):
        row[knot] += weight
    if shape.num_samples:
        for knot, weight in _hat_weights(sample_knots, shape.num_samples):
            row[len(token_knots) + knot] += weight
    own_context = shape.decode_context - shape.shared_context
    return [*row, shape.num_runs, own_context, shape.shared_context, shape.prefill_pairs]


def nonnegative_least_squares(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """min |Ax - b| with x >= 0. Columns are scaled first; each round minimises over one coordinate after the other."""
    num = len(matrix[0])
    scales = [max((sum(row[j] ** 2 for row in matrix)) ** 0.5, 1e-300) for j in range(num)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in matrix]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(num)] for i in range(num)]
    aims = [sum(row[j] * b for row, b in zip(scaled, target, strict=True)) for j in range(num)]
    x = [0.0] * num
    for _ in range(_FIT_ROUNDS):
        moved = 0.0
        for j in range(num):
            if gram[j][j] == 0.0:
                continue
            residual = aims[j] - sum(g * value for g, value in zip(gram[j], x, strict=True))
            new = max(0.0, x[j] + residual / gram[j][j])
            moved = max(moved, abs(new - x[j]))
            x[j] = new
        if moved < 1e-12:
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]


class ModelShape(NamedTuple):
    """What a roofline needs of a model: parameters without the embedding, those used for one token, and the cache's width.

    `kv_values` is the number of keys and values that one token keeps over all layers.
    """

    layer_parameters: int
    active_parameters: int
    lm_head_parameters: int
    kv_values: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face `config.json`; matrix products only, biases and norms are left out."""
        config = {**config, **(config.get("text_config") or {})}
        hidden = _first(config, "hidden_size", "n_embd", "d_model")
        layers = _first(config, "num_hidden_layers", "n_layer")
        heads = _first(config, "num_attention_heads", "n_head")
        kv_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or hidden // heads
        is_gated = "intermediate_size" in config
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
        chosen = (config.get("num_experts_per_tok") or 1) if experts > 1 else 1
        attention = 2 * hidden * head_size * (heads + kv_heads)
        expert = (3 if is_gated else 2) * hidden * inner
        return cls(
            layer_parameters=layers * (attention + experts * expert),
            active_parameters=layers * (attention + chosen * expert),
            lm_head_parameters=hidden * _first(config, "vocab_size"),
            kv_values=2 * layers * kv_heads * head_size,
            num_layers=layers,
            attention_width=heads * head_size,
        )


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise UsageError(f"the model's config has no {' or '.join(names)}: its step time cannot be estimated")


class DeviceFigures(NamedTuple):
    """What of a device an estimate goes by: reachable arithmetic and memory speed, and the fixed cost of a layer's kernels.

    `shared_price` is what a token of a common prefix costs each further decode, as a part of what it costs the first.
    """

    name: str
    flops: float
    bytes_per_s: float
    layer_overhead_s: float
    shared_price: float


_CPU_CORE_FLOPS = 60e9
_CPU_BYTES_PER_S = 16e9
_KNOWN_GPUS: dict[str, tuple[float, float]] = {
    "H200": (600e12, 4.0e12),
    "H100": (600e12, 2.8e12),
    "A100": (220e12, 1.6e12),
    "L40": (220e12, 0.7e12),
    "L4": (80e12, 0.25e12),
    "A10": (80e12, 0.5e12),
    "T4": (40e12, 0.25e12),
    "4090": (130e12, 0.85e12),
    "3090": (60e12, 0.8e12),
}
"""Reachable 16-bit products and memory speed: about two thirds and four fifths of the makers' figures."""


def device_figures(device: str, num_cores: int = 1) -> DeviceFigures:
    """The figures of a device by its name (`cpu`, `NVIDIA H200`); an unknown accelerator is taken for an A100."""
    if device.startswith("cpu"):
        return DeviceFigures(counted(num_cores, "CPU core"), _CPU_CORE_FLOPS * num_cores, _CPU_BYTES_PER_S, 1e-4, 0.2)
    for name, (flops, bytes_per_s) in _KNOWN_GPUS.items():
        if name in device:
            return DeviceFigures(name, flops, bytes_per_s, 6e-5, 1.0)
    return DeviceFigures(f"{device}, taken for an A100", *_KNOWN_GPUS["A100"], 6e-5, 1.0)


ESTIMATE_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def roofline(shape: ModelShape, device: DeviceFigures, bytes_per_value: int, bytes_per_weight: int) -> CostModel:
    """Each product takes the longer of its arithmetic and the reading of its weights; attention likewise for what it reads."""

    def product_s(parameters: int, active: int, rows: int) -> float:
        return max(2 * active * rows / device.flops, parameters * bytes_per_weight / device.bytes_per_s)

    context_s = shape.kv_values * bytes_per_value / device.bytes_per_s
    overhead_s = shape.num_layers * device.layer_overhead_s
    layers = (shape.layer_parameters, shape.active_parameters)
    head = (shape.lm_head_parameters, shape.lm_head_parameters)
    return CostModel(
        source=f"an estimate from the model's shape and the figures of {device.name}",
        is_estimate=True,
        token_curve=tuple((float(rows), overhead_s + product_s(*layers, rows)) for rows in ESTIMATE_KNOTS),
        sample_curve=tuple((float(rows), product_s(*head, rows)) for rows in ESTIMATE_KNOTS),
        decode_context_s=context_s,
        prefill_pair_s=4 * shape.num_layers * shape.attention_width / device.flops,
        shared_context_s=context_s * device.shared_price,
    )
