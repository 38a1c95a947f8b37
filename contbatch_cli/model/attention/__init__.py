"""Attention backends: one file each, one signature, and the bridge by which transformers' models call them.

Shape legend: T tokens of the step, H query heads, K kv heads, D key head size, E value head size.

A model is built with `attn_implementation=ATTENTION_NAME`. Each step, the runner lets the backend turn the flat batch into
what its kernel wants (`prepare`) and calls the model within `attending(step)`; every attention layer then finds the step in a
context variable (keyword arguments of the model call would do for most classes, but StableLM's layers drop them). No mask
function is registered under our name: transformers then builds no mask at all, and masking is the backend's, from positions
and the layer's variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.errors import UsageError
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.kv_cache import KVCache, LayerCache


class AttentionVariant(NamedTuple):
    """What distinguishes one layer's attention from another's.

    Scores are `query @ key * scaling`, then `softcap * tanh(scores / softcap)` where there is a soft cap. A token sees itself
    and the `sliding_window - 1` tokens before it; all before it without a window. `sinks` [H] are logits of one extra place per
    head which takes its share of the softmax and gives no value.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """The one signature. A backend is a module: stateless functions under this protocol's names."""

    def prepare(self, flat: FlatBatch, device: torch.device) -> Any:
        """What `attend` needs to know of the step, computed once for all layers."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        plan: Any,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Write key [T, K, D] and value [T, K, E] into the layer's slots, then attend: query [T, H, D] to output [T, H, E].

        All writing comes before any reading, so that a row may read a block which another row fills in this very step.
        """
        ...


class Step(Protocol):
    """What the attention layers of a model call meet: it does each layer's attention."""

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """query [T, H, D], key [T, K, D] and value [T, K, E] to output [T, H, E]."""
        ...


class CachedStep(NamedTuple):
    """One iteration's step: the cache, and a backend with its own plan of the flat batch.

    `window_plan` is that for the layers which have a pool of blocks of their own, None where no layer has.
    """

    cache: KVCache
    backend: AttentionBackend
    plan: Any
    window_plan: Any = None

    def plan_of(self, layer_index: int) -> Any:
        return self.window_plan if layer_index in self.cache.window_layers else self.plan

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        return self.backend.attend(query, key, value, self.cache.layers[layer_index], self.plan_of(layer_index), variant)


_MODULES = {
    name: f"contbatch_cli.model.attention.{name}" for name in ("reference", "cpu", "cpu_native", "cuda", "deterministic")
}
ATTENTION_NAME = "contbatch"


def backend_named(name: str) -> AttentionBackend:
    """The backend of that name. Raises UsageError for an unknown one."""
    if name not in _MODULES:
        raise UsageError(f"model.attention: {name!r} is not one of auto, {', '.join(sorted(_MODULES))}")
    return import_module(_MODULES[name])  # type: ignore[return-value]


def resolve_backend(name: str, device: torch.device) -> tuple[str, str]:
    """A backend's name for `model.attention`, and the reason. Raises UsageError for an unknown one."""
    if name != "auto":
        backend_named(name)
        return name, "as configured"
    if device.type == "cuda" and find_spec("triton") is not None:
        return "cuda", "Triton kernels, or varlen_attn where a probe finds it right and faster"
    if device.type == "cpu" and cpu_kernels.library() is not None:
        return "cpu_native", "compiled kernels that read the cache in place"
    return "cpu", f"scaled_dot_product_attention by sequence, on {device.type}"


_current_step: ContextVar[Step] = ContextVar("contbatch_step")


def current_step() -> Step:
    """The step that the attention layers would use now: only within `attending`."""
    return _current_step.get()


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Within it, the attention layers of our models use `step`."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: query [1, H, T, D], key [1, K, T, D], value [1, K, T, E] to output [1, T, H, E]."""
    output = _current_step.get().attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        variant_of(query, kwargs),
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def variant_of(query: torch.Tensor, kwargs: dict[str, Any]) -> AttentionVariant:
    """The variant as transformers' layers pass it, by keyword."""
    scaling = kwargs.get("scaling")
    window = kwargs.get("sliding_window")
    return AttentionVariant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=window if window and window > 0 else None,
        softcap=kwargs.get("softcap") or None,
        sinks=kwargs.get("s_aux"),
    )
