"""Linear layers whose weight was laid out once for the processor, the original weight being given up.

Shape legend: M rows, K input features, N output features.

Three kinds, the first that works here: the compiled kernels (float32, with weights of 8 bits if asked for), oneDNN's packed weights
through torch's private operators (tried on a small weight first, since they may change), and plain `torch.nn.Linear`. Linears that
read the same input (query, key and value; gate and up) become one product: the first to be called computes all, the others hand out
their slices of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import byref
from functools import lru_cache

import torch
from torch import nn

from contbatch_cli.model import cpu_kernels

logger = logging.getLogger(__name__)

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' decoders keep linears of one input."""


class NativeLinear(nn.Module):
    """x [..., K] to [..., N] by the compiled kernels; a row's result does not depend on the rows beside it."""

    def __init__(
        self, library: cpu_kernels.Library, weight: torch.Tensor, bias: torch.Tensor | None, is_int8: bool = False
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._library = library
        (self.packed,) = library.pack(weight, is_int8=is_int8)
        self._bias = None if bias is None else library.whole_panels(bias)
        self._linear = self.packed.linear(cpu_kernels.STORE, self._bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        assert x.dtype == torch.float32
        out = torch.empty(*x.shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        if not rows:  # A step that only computes a piece of a prompt asks for no logits; the kernels divide by the rows.
            return out
        threads = torch.get_num_threads()
        if not self._library.linear(byref(self._linear), x.data_ptr(), rows, out.data_ptr(), None, threads):
            raise MemoryError(f"a product of {rows} rows: no working memory")
        return out


class PackedEmbedding(nn.Module):
    """Ids [...] to [..., K] from the packed weight of the LM head that the embedding is tied to, so that there is one copy."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.num_embeddings = head.out_features
        self._head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._head.packed.rows(ids)


class ShortEmbedding(nn.Module):
    """Ids [...] to [..., K] in `dtype` from a weight [N, K] that is kept in a shorter type, which holds it exactly."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = weight.shape[0]
        self._weight = weight.detach().clone()
        self._dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self._weight).to(self._dtype)


class OneDnnLinear(nn.Module):
    """x [..., K] to [..., N] with oneDNN's packed weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class _Siblings:
    """The common product of several linears, kept from the first one's call to the last one's."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self._linear = linear
        self._sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input or self._parts[index] is None:
            self._input, self._parts = x, list(self._linear(x).split(self._sizes, dim=-1))
        part, self._parts[index] = self._parts[index], None
        assert part is not None
        if not any(other is not None for other in self._parts):
            self._input = None
        return part


class SiblingLinear(nn.Module):
    """One of several linears of one input: its slice of their common product."""

    def __init__(self, siblings: _Siblings, index: int) -> None:
        super().__init__()
        self._siblings = siblings
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._siblings.part(self._index, x)


def packed(weight: torch.Tensor, bias: torch.Tensor | None, is_int8: bool = False) -> nn.Module | None:
    """A packed linear of these weights; None where no packing works here. 8 bits need the compiled kernels."""
    if weight.device.type != "cpu":
        return None
    library = cpu_kernels.library() if weight.dtype == torch.float32 else None
    if library is not None:
        return NativeLinear(library, weight, bias, is_int8)
    if not is_int8 and _onednn_works(weight.dtype):
        return OneDnnLinear(weight, bias)
    return None


@lru_cache(maxsize=8)
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether torch's private operators exist here and agree with `linear`."""
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(5, 32).to(dtype)
    try:
        with torch.inference_mode():
            output = OneDnnLinear(weight, None)(x)
            agrees = torch.allclose(
                output, nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2 if dtype.itemsize < 4 else 1e-4
            )
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        logger.info("packed oneDNN weights: %s; going on with plain linear layers", str(error).splitlines()[0])
        return False
    return agrees


def pack_linears(module: nn.Module, is_int8: bool = False) -> int:
    """Replace all plain linears below `module` by packed ones, siblings together; gives how many weights were packed."""
    count = 0
    for child in list(module.modules()):
        for names in SIBLINGS:
            count += _pack_siblings(child, names, is_int8)
        for name, linear in list(child.named_children()):
            if type(linear) is nn.Linear:
                replacement = packed(linear.weight, linear.bias, is_int8)
                if replacement is not None:
                    _take_hooks(replacement, linear)
                    setattr(child, name, replacement)
                    count += 1
    return count


def _pack_siblings(parent: nn.Module, names: Sequence[str], is_int8: bool) -> int:
    linears = [getattr(parent, name, None) for name in names]
    if not all(type(linear) is nn.Linear for linear in linears):
        return 0
    fused = packed(*concatenated([linear for linear in linears if isinstance(linear, nn.Linear)]), is_int8)
    if fused is None:
        return 0
    siblings = _Siblings(fused, [linear.out_features for linear in linears if isinstance(linear, nn.Linear)])
    for index, name in enumerate(names):
        sibling = SiblingLinear(siblings, index)
        _take_hooks(sibling, getattr(parent, name))
        setattr(parent, name, sibling)
    return 1


def _take_hooks(replacement: nn.Module, linear: nn.Module) -> None:
    """Who listens to the linear (an adapter) listens to its replacement."""
    for hook in linear._forward_hooks.values():
        replacement.register_forward_hook(hook)


def concatenated(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of linears of one input as one; a missing bias counts as zeros where another has one."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears
    ]
    return weight, torch.cat(biases)
