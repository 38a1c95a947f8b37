"""Attention by the compiled kernels, reading the paged cache in place; where they cannot serve, by the `cpu` backend.

Shape legend: T tokens of the step, S sequences, H query heads, K kv heads, D and E head sizes.

A row's arithmetic depends neither on the rows beside it nor on how its tokens were split into runs.
"""

from __future__ import annotations

from array import array
from ctypes import byref, c_int64
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.attention import AttentionVariant, cpu
from contbatch_cli.model.kv_cache import LayerCache


@dataclass(slots=True)
class NativePlan:
    """The step as the kernels read it; `arrays` owns what `step` points to. `fallback` is made when a layer first needs it."""

    step: cpu_kernels.Step
    arrays: tuple[array[int], ...]
    flat: FlatBatch
    device: torch.device
    fallback: cpu.CpuPlan | None = None


def prepare(flat: FlatBatch, device: torch.device) -> NativePlan:
    starts = array("i", accumulate(map(len, flat.block_tables), initial=0))
    unordered = array("i", bytes(4 * flat.num_sequences))
    arrays = (
        array("q", flat.slot_mapping),
        array("i", flat.query_starts),
        array("i", flat.context_lens),
        starts,
        array("i", chain.from_iterable(flat.block_tables)),
        unordered,
        unordered[:],
    )
    addresses = [values.buffer_info()[0] for values in arrays]
    step = cpu_kernels.Step(flat.num_tokens, flat.num_sequences, flat.block_size, 0, *addresses)
    library = cpu_kernels.library()
    if library is not None:
        library.order(byref(step), *addresses[-2:])
    return NativePlan(step, arrays, flat, device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    plan: NativePlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    library = cpu_kernels.library()
    if library is None or not all(map(_is_served, (query, key, value, layer.keys, layer.values))):
        if plan.fallback is None:
            plan.fallback = cpu.prepare(plan.flat, plan.device)
        return cpu.attend(query, key, value, layer, plan.fallback, variant)
    if variant.sinks is not None:
        variant = variant._replace(sinks=variant.sinks.detach().float().contiguous())
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2])
    done = library.attend(
        byref(cpu_kernels.AttentionShape(*shape_fields(query.shape[1], key.shape[1], key.shape[2], value.shape[2], variant))),
        byref(plan.step),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        (c_int64 * 6)(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError(f"attention of {query.shape[0]} tokens: no working memory")
    return out


def _is_served(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1


def shape_fields(
    heads: int, kv_heads: int, key_size: int, value_size: int, variant: AttentionVariant
) -> tuple[float | None, ...]:
    """The fields of `cpu_kernels.AttentionShape`. Sinks are pointed to, so the variant's owner keeps them."""
    sinks = variant.sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    window, softcap = variant.sliding_window or 0, variant.softcap or 0.0
    return heads, kv_heads, key_size, value_size, window, variant.scaling, softcap, None if sinks is None else sinks.data_ptr()
