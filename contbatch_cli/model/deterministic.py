"""`engine.deterministic`: a row's logits are bitwise the same whatever the batch, budget, block size, preemption or prefix hits.

Shape legend: T tokens of the step, M rows of a tile, L logit rows, V vocabulary.

A float sum depends on its order. The compiled kernels (`model/cpu_kernels`) sum each row in an order that nothing beside it changes: a
model all of whose layers run as kernels needs no more than a trial (`rows_are_independent`).

Elsewhere libraries choose the order by the shape of a product and the length of an array. There the step's T tokens go through the
model in tiles of a few fixed numbers of rows, the last one padded, and the rows that need logits are padded to such a number as well.
Attention, the one operation whose shape must vary, is computed row by row (`attention/deterministic.py`). Tiles run in plan order, so a
row may read a block which an earlier row of the same step fills. (The method is the project's own; that batch-dependent kernels are
what makes inference vary is due to He et al., "Defeating Nondeterminism in LLM Inference", 2025.)

    step  | 300 tokens ................................. |      tiles  | 256 | 32 | 16 (12 and padding) |

What remains is whether a row's place within its tile, or its tile's size, can matter: how a library cuts an array for its vector
units and threads. That is not assumed but tried, on the whole model, before a run: a tile of BASE_ROWS equal rows must give equal
logits, whatever stands beside them, and a larger or smaller tile is used only if its rows come out the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import AttentionBackend, CachedStep, attending, current_step
from contbatch_cli.model.attention import deterministic as backend
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.loading import LoadedModel
from contbatch_cli.units import counted

BASE_ROWS = 32
"""The tile whose arithmetic is the model's: every other size has to agree with it."""

OTHER_ROWS = (16, 48, 64, 128, 256)
"""Sizes worth having: small ones waste less, large ones read the weights less often."""

TRIED_ROWS = (2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 256)
"""Sizes of steps in which rows of a model that runs as kernels are compared with a row alone."""

PROBE_TOKEN = 1

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class TiledOutput(NamedTuple):
    logits: torch.Tensor


class TiledModel(torch.nn.Module):
    """A model that takes steps of any size and runs them in tiles of `sizes` rows, ascending.

    Its attention must be the `deterministic` backend.
    """

    def __init__(self, model: torch.nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.sizes = tuple(sizes)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **kwargs: Any
    ) -> TiledOutput:
        """input_ids and position_ids [1, T], logits_to_keep [L] ascending: logits [1, L, V]. Called within `attending`."""
        step = current_step()
        assert isinstance(step, CachedStep)
        parts: list[torch.Tensor] = []
        for first, stop, rows in cut(input_ids.shape[1], self.sizes):
            kept = logits_to_keep[(logits_to_keep >= first) & (logits_to_keep < stop)] - first
            own = step.window_plan
            tile = step._replace(plan=step.plan.tile(first, stop), window_plan=own and own.tile(first, stop))
            with attending(tile):
                output = self.model(
                    input_ids=_padded(input_ids[:, first:stop], rows),
                    position_ids=_padded(position_ids[:, first:stop], rows),
                    logits_to_keep=_padded(kept[None], rows_for(len(kept), self.sizes))[0] if len(kept) else kept,
                    **kwargs,
                )
            parts.append(output.logits[:, : len(kept)])
        return TiledOutput(torch.cat(parts, dim=1))


class Tile(NamedTuple):
    """Tokens `first` to `stop` of a step, padded to `rows`."""

    first: int
    stop: int
    rows: int


def cut(num_tokens: int, sizes: Sequence[int]) -> list[Tile]:
    """The tiles of a step: the largest that its remaining tokens fill, then one padded."""
    tiles: list[Tile] = []
    first = 0
    while first < num_tokens:
        left = num_tokens - first
        rows = max((size for size in sizes if size <= left), default=sizes[0])
        tiles.append(Tile(first, first + min(rows, left), rows))
        first += rows
    return tiles


def rows_for(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count` rows."""
    return next(size for size in sizes if size >= count)


def _padded(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """ids [1, n] with zeros up to [1, rows]."""
    return torch.nn.functional.pad(ids, (0, rows - ids.shape[1]))


def make_deterministic(
    model: torch.nn.Module, layers: Sequence[LayerShape], dtype: torch.dtype, token_budget: int = max(OTHER_ROWS)
) -> tuple[TiledModel, str]:
    """The model in tiles, and a line for the header. Lowers torch's number of threads where only fewer keep rows independent.

    Takes one pass of each tile size up to `token_budget`, and five of BASE_ROWS. Raises UsageError for a model that cannot be run
    so, or a machine on which a row's place in a tile shows in its logits.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise UsageError(f"engine.deterministic: needs model.device: cpu; it has not been tried on {device.type}")
    refuse_unsuitable(model.config)
    wanted = torch.get_num_threads()
    for threads in thread_candidates(wanted):
        torch.set_num_threads(threads)
        differing = num_differing_rows(model, layers, dtype)
        if differing == 0:
            tiled = TiledModel(model, agreeing_sizes(model, layers, dtype, token_budget))
            sizes = ", ".join(map(str, tiled.sizes))
            instead = "" if threads == wanted else f" instead of {wanted}"
            return tiled, f"tiles of {sizes} rows, {counted(threads, 'thread')}{instead}"
    torch.set_num_threads(wanted)
    raise UsageError(
        f"engine.deterministic: {differing} of {BASE_ROWS} equal rows of a tile got different logits on this machine"
    )


def thread_candidates(wanted: int) -> list[int]:
    """`wanted`, then the smaller powers of two: by those, arrays are cut where vectors end."""
    powers = [1 << i for i in reversed(range(wanted.bit_length()))]
    return [wanted, *(power for power in powers if power < wanted)]


def refuse_unsuitable(config: Any) -> None:
    """Raises UsageError for models in which one token's arithmetic depends on other rows by design."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in _EXPERT_KEYS:
        if (getattr(text, key, None) or 0) > 1:
            raise UsageError(
                f"engine.deterministic: {config.model_type} routes tokens to {getattr(text, key)} experts, so the shape of "
                "their products depends on the batch"
            )


@torch.inference_mode()
def rows_are_independent(loaded: LoadedModel, token_budget: int) -> bool:
    """Whether equal rows get equal logits, bit for bit, in steps of many sizes up to the budget, at any place and beside any others.

    Of a model that runs as kernels, where it holds by the way they compute; this is the trial of what is around them.
    """
    model, layers, dtype, attention = loaded.model, loaded.layers, loaded.dtype, loaded.backend
    expected = _probe(model, layers, dtype, [PROBE_TOKEN], attention)[0]
    for rows in (size for size in TRIED_ROWS if size <= token_budget):
        if not bool((_probe(model, layers, dtype, [PROBE_TOKEN] * rows, attention) == expected).all()):
            return False
        mixed = [PROBE_TOKEN if i % 3 == 1 else 2 + i % 27 for i in range(rows)]
        if not bool((_probe(model, layers, dtype, mixed, attention)[1::3] == expected).all()):
            return False
    return True


@torch.inference_mode()
def num_differing_rows(model: torch.nn.Module, layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """How many rows of a tile of BASE_ROWS differ, in a tile of equal rows or with other rows beside them."""
    equal = _probe(model, layers, dtype, [PROBE_TOKEN] * BASE_ROWS)
    differing = int((equal != equal[0]).any(dim=-1).sum())
    for place in (0, BASE_ROWS // 2, BASE_ROWS - 1):
        mixed = [(PROBE_TOKEN + 7 * i) % 29 for i in range(BASE_ROWS)]
        mixed[place] = PROBE_TOKEN
        differing += int((_probe(model, layers, dtype, mixed)[place] != equal[0]).any())
    return differing


@torch.inference_mode()
def agreeing_sizes(
    model: torch.nn.Module, layers: Sequence[LayerShape], dtype: torch.dtype, token_budget: int
) -> tuple[int, ...]:
    """BASE_ROWS and the other sizes, of use under that budget, whose every row agrees with it bit for bit, ascending."""
    expected = _probe(model, layers, dtype, [PROBE_TOKEN] * BASE_ROWS)[0]
    sizes = [BASE_ROWS]
    for rows in OTHER_ROWS:
        if rows <= max(token_budget, BASE_ROWS) and bool(
            (_probe(model, layers, dtype, [PROBE_TOKEN] * rows) == expected).all()
        ):
            sizes.append(rows)
    return tuple(sorted(sizes))


def _probe(
    model: torch.nn.Module,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    token_ids: list[int],
    attention: AttentionBackend | None = None,
) -> torch.Tensor:
    """Logits [M, V] of M sequences of one token each, in one tile; or, with a backend of its own, in one step as it is."""
    rows = len(token_ids)
    device = torch.device("cpu")
    flat = FlatBatch(
        input_ids=token_ids,
        position_ids=[0] * rows,
        slot_mapping=list(range(rows)),
        query_starts=list(range(rows + 1)),
        context_lens=[1] * rows,
        block_tables=[(i,) for i in range(rows)],
        logit_rows=list(range(rows)),
        logit_starts=list(range(rows + 1)),
        sampling=[],
        sample_rows=[],
        block_size=1,
    )
    scratch = KVCache(layers, rows, 1, dtype, device)
    attends = attention or backend
    with attending(CachedStep(scratch, attends, attends.prepare(flat, device))):
        output = (model if attention else TiledModel(model, (rows,)))(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.zeros(1, rows, dtype=torch.int64, device=device),
            use_cache=False,
            logits_to_keep=torch.arange(rows, device=device),
        )
    logits: torch.Tensor = output.logits[0]
    return logits
