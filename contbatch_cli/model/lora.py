"""LoRA adapters by row: rows of several adapters, and of none, in one flat batch over one base model.

Shape legend: T tokens of the step, n those of one adapter's rows, r rank, I and O the sizes of a linear's input and output.

An adapted linear gives y = W x + scale * B (A x) (Hu et al., "LoRA", 2021), each adapter with its own A [r, I] and B [O, r]. The base
product W x is computed for all T tokens at once; then, for each adapter of the step, its tokens' x are taken out, go through A and B,
and are added to their places. A hook on the linear does this, so the model and its weights stay as they are. Which tokens are
whose is planned once a step and reaches the hooks as attention's step does, by a context variable.

Checkpoints are read in the format that PEFT writes (adapter_config.json, adapter_model.safetensors); what they may ask for beyond
plain LoRA on linears is refused by name before any weights are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from contbatch_cli.core.batch import ScheduledSequence
from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.errors import EngineError, UsageError
from contbatch_cli.model.staging import to_device

_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_HONOURED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
_WITHOUT_EFFECT = frozenset(
    {
        # About training, about where the checkpoint is from, or said once more by the names of its tensors.
        *(
            "task_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
            "runtime_config",
        ),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
        *(
            "eva_config",
            "loftq_config",
            "corda_config",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "qalora_group_size",
        ),
    }
)
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights alone; the others start from a changed base."""


class LoraConfig(NamedTuple):
    """What an adapter_config.json says of ranks and scales; the patterns are regular expressions for the end of a module's name."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rank stabilisation."""
        rank = self.rank_of(module)
        alpha = float(_of_pattern(self.alphas, module, self.alpha))
        return alpha / rank**0.5 if self.is_rank_stabilised else alpha / rank


class LoraPart(NamedTuple):
    """One adapter's change of one linear: `down` [r, I], `up` [O, r]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class RowGroup(NamedTuple):
    """The flat rows of one adapter: consecutive ones as a slice, others as indices [n]."""

    adapter: str
    rows: slice | torch.Tensor


class AdapterPlan(NamedTuple):
    """One step's rows by adapter: among its T tokens, and among the rows that go through the output embedding."""

    num_tokens: int
    tokens: list[RowGroup]
    logit_rows: list[RowGroup]


_current_plan: ContextVar[AdapterPlan | None] = ContextVar("contbatch_adapters", default=None)


@contextmanager
def adapting(plan: AdapterPlan | None) -> Iterator[None]:
    """Within it, calls of the model apply the plan's adapters."""
    token = _current_plan.set(plan)
    try:
        yield
    finally:
        _current_plan.reset(token)


class Adapters:
    """The adapters of a model, on its device. Made once; from then on the model's adapted linears look for a plan."""

    def __init__(self, model: nn.Module, checkpoints: Mapping[str, AdapterCheckpoint], dtype: torch.dtype) -> None:
        """`dtype` is that of the arithmetic. Raises UsageError for an adapter that does not fit the model."""
        parts: dict[str, dict[str, LoraPart]] = {}
        for name, checkpoint in checkpoints.items():
            for module, part in checkpoint.parts().items():
                parts.setdefault(module, {})[name] = _fitted(model, name, module, part, dtype)
        self.names = frozenset(checkpoints)
        output = model.get_output_embeddings()  # type: ignore[operator]
        for name, by_adapter in parts.items():
            linear = model.get_submodule(name)
            linear.register_forward_hook(_AdaptedLinear(name, by_adapter, linear is output))

    def plan(self, sequences: Sequence[ScheduledSequence], flat: FlatBatch, device: torch.device) -> AdapterPlan | None:
        """Which rows of the step are whose; None when no sequence names an adapter."""
        owners = [sequence.adapter for sequence in sequences]
        used = sorted({owner for owner in owners if owner is not None})
        if not used:
            return None
        assert self.names.issuperset(used), f"a plan names adapters {used}, there are {sorted(self.names)}"
        tokens = _groups(used, owners, flat.query_starts, device)
        return AdapterPlan(flat.num_tokens, tokens, _groups(used, owners, flat.logit_starts, device))


def _groups(used: Sequence[str], owners: Sequence[str | None], starts: Sequence[int], device: torch.device) -> list[RowGroup]:
    """Each adapter's rows, sequence i having the rows `starts[i]` to `starts[i + 1]`."""
    runs: dict[str, list[range]] = {name: [] for name in used}
    for i, owner in enumerate(owners):
        if owner is not None and starts[i] < starts[i + 1]:
            own = runs[owner]
            if own and own[-1].stop == starts[i]:
                own[-1] = range(own[-1].start, starts[i + 1])
            else:
                own.append(range(starts[i], starts[i + 1]))
    whole = [RowGroup(name, slice(own[0].start, own[0].stop)) for name, own in runs.items() if len(own) == 1]
    scattered = [(name, list(chain.from_iterable(own))) for name, own in runs.items() if len(own) > 1]
    indices = to_device([rows for _, rows in scattered], torch.int64, device) if scattered else []
    return whole + [RowGroup(name, index) for (name, _), index in zip(scattered, indices, strict=True)]


class _AdaptedLinear:
    """The forward hook of one linear: adds what the step's adapters change to the output, in place."""

    def __init__(self, name: str, parts: Mapping[str, LoraPart], is_output: bool) -> None:
        self._name = name
        self._parts = parts
        self._is_output = is_output

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        plan = _current_plan.get()
        if plan is None:
            return
        inputs, outputs = args[0].flatten(0, -2), output.view(-1, output.shape[-1])
        if not self._is_output and inputs.shape[0] != plan.num_tokens:
            raise EngineError(
                f"adapter: {self._name} was called for {inputs.shape[0]} tokens of a step of {plan.num_tokens}, "
                "so its rows cannot be told apart"
            )
        for adapter, rows in plan.logit_rows if self._is_output else plan.tokens:
            part = self._parts.get(adapter)
            if part is None:
                continue
            change = nn.functional.linear(nn.functional.linear(inputs[rows], part.down) * part.scale, part.up)
            if isinstance(rows, slice):
                outputs[rows] += change
            else:
                outputs.index_add_(0, rows, change)


class AdapterCheckpoint(NamedTuple):
    """An adapter's directory, its config read and found to be honoured."""

    name: str
    path: Path
    config: LoraConfig

    def parts(self) -> dict[str, LoraPart]:
        """By the name of the linear, as the weights are stored. Raises UsageError for tensors that are not plain LoRA's."""
        file = self.path / "adapter_model.safetensors"
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"model.adapters.{self.name}: {file} cannot be read: {error}") from error
        sides: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = _WEIGHT.fullmatch(key)
            if match is None:
                raise self._refusal(f"it holds {key}, and only low-rank changes of linears are supported")
            sides.setdefault(match["module"], {})[match["side"]] = tensor
        return {module: self._part(module, pair) for module, pair in sides.items()}

    def _part(self, module: str, pair: Mapping[str, torch.Tensor]) -> LoraPart:
        if set(pair) != {"A", "B"}:
            raise self._refusal(f"it holds only lora_{next(iter(pair))} of {module}")
        rank, found = self.config.rank_of(module), (pair["A"].shape[0], pair["B"].shape[-1])
        if found != (rank, rank):
            raise self._refusal(f"{module} has rank {found[0]} in A and {found[1]} in B, adapter_config.json says {rank}")
        return LoraPart(pair["A"], pair["B"], self.config.scale_of(module))

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"model.adapters.{self.name}: {self.path} cannot be applied: {reason}")


def read_checkpoint(name: str, path: Path) -> AdapterCheckpoint:
    """The adapter in a directory; no weights are read. Raises UsageError for one that is not there or asks for more than LoRA."""
    file = path / "adapter_config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"model.adapters.{name}: {path} holds no adapter_config.json, so it is no checkpoint of PEFT's"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"model.adapters.{name}: {file} cannot be read: {error}") from error
    reason = _reason_to_refuse(values) if isinstance(values, dict) else "it is not a JSON object"
    if not reason and not (path / "adapter_model.safetensors").is_file():
        others = sorted(other.name for other in path.glob("adapter_model.*"))
        reason = f"adapter_model.safetensors is missing{f' ({others[0]} is there; save it as safetensors)' if others else ''}"
    if reason:
        raise UsageError(f"model.adapters.{name}: {file} cannot be honoured: {reason}")
    return AdapterCheckpoint(
        name,
        path,
        LoraConfig(
            rank=int(values["r"]),
            alpha=float(values.get("lora_alpha") or values["r"]),
            is_rank_stabilised=bool(values.get("use_rslora")),
            ranks=values.get("rank_pattern") or {},
            alphas=values.get("alpha_pattern") or {},
        ),
    )


def _reason_to_refuse(values: Mapping[str, Any]) -> str | None:
    """Why an adapter_config.json cannot be honoured: a key that is set and not known here might change anything."""
    if values.get("peft_type") != "LORA":
        return f"peft_type is {values.get('peft_type')!r}, only LORA is supported"
    if not isinstance(values.get("r"), int) or values["r"] < 1:
        return f"r is {values.get('r')!r}, not a rank"
    if values.get("bias", "none") != "none":
        return f"bias is {values['bias']!r}, only 'none' is supported"
    if values.get("init_lora_weights") not in _PLAIN_STARTS:
        return f"init_lora_weights is {values['init_lora_weights']!r}, which changes the base model's weights"
    unknown = sorted(key for key, value in values.items() if value and key not in _HONOURED | _WITHOUT_EFFECT)
    return f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} set, which is not supported" if unknown else None


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, from a dot or the beginning on."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?(?:{pattern})$", module)), default)


def _fitted(model: nn.Module, adapter: str, name: str, part: LoraPart, dtype: torch.dtype) -> LoraPart:
    """The part on the model's device, in `dtype`. Raises UsageError when the model has no such linear."""

    def refusal(reason: str) -> UsageError:
        return UsageError(f"model.adapters.{adapter} does not fit {type(model).__name__}: {reason}")

    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise refusal(f"there is no {name}; was it trained for another model?") from error
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise refusal(f"{name} is a {type(module).__name__}, not a linear")
    if ".experts." in name:
        raise refusal(f"{name} is an expert's, which does not see all tokens")
    sizes = (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
    if (part.down.shape[1], part.up.shape[0]) != sizes:
        raise refusal(f"{name} takes {sizes[0]} to {sizes[1]}, the adapter's {part.down.shape[1]} to {part.up.shape[0]}")
    device = module.weight.device
    assert isinstance(device, torch.device)
    return part._replace(down=part.down.to(device, dtype), up=part.up.to(device, dtype))
