"""Attention backends: one file each, one signature, and the bridge by which transformers' models call them.

Shape legend: T tokens of the step, H query heads, K kv heads, D key head size, E value head size.

A backend is chosen by name when a model is built (`attn_implementation=register(name)`). Each step, the runner lets the backend turn
the flat batch into what its kernel wants (`prepare`) and passes that through the model call as the keyword argument
`contbatch_step`; transformers hands it on to every attention layer, so nothing is global. No mask function is registered under our
names: transformers then builds no mask at all, and masking is the backend's, from positions and the layer's variant.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.errors import UsageError
from contbatch_cli.model.kv_cache import KVCache, LayerCache, LayerShape


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


class Step(NamedTuple):
    """What travels through the model call: the cache and the backend's own plan of this step."""

    cache: KVCache
    plan: Any


_MODULES = {"reference": "contbatch_cli.model.attention.reference", "cpu": "contbatch_cli.model.attention.cpu"}
_PREFIX = "contbatch_"


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
    return "cpu", f"scaled_dot_product_attention by sequence, on {device.type}"


def register(name: str) -> str:
    """Make the backend callable by transformers; gives the name to pass as `attn_implementation`."""
    full_name = _PREFIX + name
    AttentionInterface.register(full_name, _bridge(backend_named(name)))
    return full_name


def _bridge(backend: AttentionBackend) -> Any:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        contbatch_step: Step,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' signature: query [1, H, T, D], key [1, K, T, D], value [1, K, T, E] to output [1, T, H, E]."""
        assert attention_mask is None, "a mask was built for an attention that takes none"
        output = backend.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            contbatch_step.cache.layers[layer_index(module)],
            contbatch_step.plan,
            variant_of(query, kwargs),
        )
        return output.unsqueeze(0), None

    return attention


def layer_index(module: torch.nn.Module) -> int:
    """Which layer an attention module is; transformers numbers them from 0."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


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


def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> LayerShape:
    """The layer's shape, from transformers' [1, heads, T, size] tensors."""
    return LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
