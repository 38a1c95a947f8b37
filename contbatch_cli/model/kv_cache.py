"""The paged KV cache: the block tensors of every layer, and what a block costs.

Shape legend: N blocks, B block size in tokens, K kv heads, D key head size, E value head size. One layer:

    keys    [N, B, K, D]   |  block 0  |  block 1  |  ...  |      a token's slot is block_id * B + offset:
    values  [N, B, K, E]   | B tokens  | B tokens  |  ...  |      the same memory seen as [N * B, K, D or E]

A slot's contents mean nothing until a token's key and value are written to it: no backend reads a slot that its own row has
not written or shares. Tests fill the tensors with NaN to hold them to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from contbatch_cli.errors import UsageError
from contbatch_cli.units import counted


class LayerShape(NamedTuple):
    """One layer's attention: query heads, kv heads, and the head sizes of keys and of values."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int


class LayerCache(NamedTuple):
    """One layer's block tensors: keys [N, B, K, D] and values [N, B, K, E], contiguous."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys [T, K, D] and values [T, K, E] into `slots` [T], which are unique."""
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)


class WindowPool(NamedTuple):
    """The layers that have a pool of blocks of their own, since they read no further back than a window, and its size."""

    layers: frozenset[int] = frozenset()
    num_blocks: int = 0


class KVCache:
    """The blocks of all layers. Layers may differ in kv heads and head sizes, and in their pool; the block size is common."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        window_pool: WindowPool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window_layers, num_window_blocks = window_pool or WindowPool()
        counts = [num_window_blocks if i in self.window_layers else num_blocks for i in range(len(layers))]
        try:
            self.layers = [_allocate(layer, n, block_size, dtype, device) for layer, n in zip(layers, counts, strict=True)]
        except (RuntimeError, MemoryError) as error:
            raise _too_large(num_blocks, bytes_per_block(layers, block_size, dtype), device) from error

    def fill(self, value: float) -> None:
        """Set every slot to `value`."""
        for layer in self.layers:
            layer.keys.fill_(value)
            layer.values.fill_(value)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """What one block takes over all layers, keys and values."""
    per_token = sum(layer.num_kv_heads * (layer.key_size + layer.value_size) for layer in layers)
    return per_token * block_size * dtype.itemsize


def _too_large(num_blocks: int, block_bytes: int, device: torch.device) -> UsageError:
    size = f"{counted(num_blocks, 'block')} of {block_bytes:,} bytes"
    return UsageError(f"the KV cache, {size}, does not fit the memory of {device}: give cache.num_blocks or cache.memory less")


def _allocate(layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
    shape = (num_blocks, block_size, layer.num_kv_heads)
    return LayerCache(
        torch.empty(*shape, layer.key_size, dtype=dtype, device=device),
        torch.empty(*shape, layer.value_size, dtype=dtype, device=device),
    )
