"""Attention on a GPU: the Triton kernels, or PyTorch's `varlen_attn` where a probe shows that it is right here, and faster.

Shape legend: T tokens of the step, S sequences, H query heads, K kv heads, D key head size, E value head size, W blocks of the
longest table.

`varlen_attn` reads a paged cache only in some combinations of PyTorch, GPU, block size, type and head size, and knows no soft cap
and no sinks. So nothing is assumed: for each layer shape one small call is made at the start, its output compared with the Triton
kernels', and both are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model.attention import AttentionVariant
from contbatch_cli.model.attention.tiles import plan_tiles
from contbatch_cli.model.attention.triton_paged import PagedBatch, paged_attention, write_kv
from contbatch_cli.model.kv_cache import LayerCache, LayerShape
from contbatch_cli.model.staging import to_device

PROBE_RUNS = ((96, 1), (33, 1), (0, 70), (40, 25))
"""(start, length) of the probe's sequences: two decodes, a fresh prompt, a later chunk."""

PROBE_REPEATS = 20
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class CudaPlan:
    """One step's index tensors on the device. The tiles depend on the query heads to a kv head, so they are made per ratio."""

    def __init__(self, flat: FlatBatch, device: torch.device) -> None:
        self.flat = flat
        self.device = device
        table_lens = [-(-length // flat.block_size) for length in flat.context_lens]
        blocks = [table[:count] for table, count in zip(flat.block_tables, table_lens, strict=True)]
        self.slots, self.query_starts, self.context_lens, self.table_starts, self.block_ids = to_device(
            [
                flat.slot_mapping,
                flat.query_starts,
                flat.context_lens,
                [0, *accumulate(table_lens)],
                list(chain.from_iterable(blocks)),
            ],
            torch.int32,
            device,
        )
        self.max_blocks = max(table_lens)
        self._paged: dict[int, PagedBatch] = {}
        self._table: torch.Tensor | None = None

    def paged(self, group: int) -> PagedBatch:
        """The step for kernels with `group` query heads to one kv head."""
        if group not in self._paged:
            tiles = plan_tiles(self.flat.query_starts, self.flat.context_lens, group)
            small, large = to_device(
                [list(chain.from_iterable(tiles.small)), list(chain.from_iterable(tiles.large))], torch.int32, self.device
            )
            self._paged[group] = PagedBatch(
                self.query_starts,
                self.context_lens,
                self.table_starts,
                self.block_ids,
                small.view(-1, 2),
                large.view(-1, 2),
                tiles.large_rows,
                tiles.max_small_context,
            )
        return self._paged[group]

    def table(self) -> torch.Tensor:
        """The block tables as one rectangle [S, W], made on the device; what stands behind a table's end is not to be read."""
        if self._table is None:
            columns = torch.arange(self.max_blocks, dtype=torch.int32, device=self.device)
            index = (self.table_starts[:-1, None] + columns).clamp_(max=self.block_ids.shape[0] - 1)
            self._table = self.block_ids[index.long()]
        return self._table


def prepare(flat: FlatBatch, device: torch.device) -> CudaPlan:
    return CudaPlan(flat, device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    plan: CudaPlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    write_kv(key, value, layer.keys, layer.values, plan.slots)
    if _is_plain(query, layer, variant) and _varlen_is_faster(
        _shape(query, layer), query.dtype, query.device, plan.flat.block_size
    ):
        return _varlen(query, layer, plan, variant)
    return _triton(query, layer, plan, variant)


def choice(shape: LayerShape, dtype: torch.dtype, device: torch.device, block_size: int) -> str:
    """Which kernel a plain layer of this shape runs on, for the run's header."""
    is_varlen = shape.key_size == shape.value_size and _varlen_is_faster(shape, dtype, device, block_size)
    return "varlen_attn" if is_varlen else "triton"


def _triton(query: torch.Tensor, layer: LayerCache, plan: CudaPlan, variant: AttentionVariant) -> torch.Tensor:
    return paged_attention(
        query,
        layer.keys,
        layer.values,
        plan.paged(query.shape[1] // layer.keys.shape[2]),
        scale=variant.scaling,
        softcap=variant.softcap,
        window=variant.sliding_window,
        sinks=variant.sinks,
    )


def _varlen(query: torch.Tensor, layer: LayerCache, plan: CudaPlan, variant: AttentionVariant) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    flat = plan.flat
    starts = flat.query_starts
    left = -1 if variant.sliding_window is None else variant.sliding_window - 1
    output = varlen_attn(
        query,
        layer.keys,
        layer.values,
        plan.query_starts,
        None,
        max(end - start for start, end in zip(starts, starts[1:], strict=False)),
        max(flat.context_lens),
        scale=variant.scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != layer.keys.shape[2],
        seqused_k=plan.context_lens,
        block_table=plan.table(),
    )
    assert isinstance(output, torch.Tensor)
    return output


def _shape(query: torch.Tensor, layer: LayerCache) -> LayerShape:
    return LayerShape(query.shape[1], layer.keys.shape[2], query.shape[2], layer.values.shape[3])


def _is_plain(query: torch.Tensor, layer: LayerCache, variant: AttentionVariant) -> bool:
    return query.is_cuda and variant.softcap is None and variant.sinks is None and query.shape[2] == layer.values.shape[3]


@cache
def _varlen_is_faster(shape: LayerShape, dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
    """Whether `varlen_attn` runs, agrees with the Triton kernels, with and without a window, and takes less time."""
    if device.type != "cuda":
        return False
    probe = Probe.make(shape, dtype, device, block_size)
    try:
        for window in (None, 17):
            variant = AttentionVariant(shape.key_size**-0.5, window)
            ours = _triton(probe.query, probe.layer, probe.plan, variant)
            theirs = _varlen(probe.query, probe.layer, probe.plan, variant)
            if not torch.allclose(ours.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]):
                return False
    except (ImportError, TypeError, RuntimeError, NotImplementedError):
        # Absent, of another signature, or refusing this block size, type or head size.
        return False
    plain = AttentionVariant(shape.key_size**-0.5)
    varlen_ms, triton_ms = (_time_ms(partial(call, probe.query, probe.layer, probe.plan, plain)) for call in (_varlen, _triton))
    return varlen_ms < triton_ms


class Probe(NamedTuple):
    """A drawn step whose cache is full of drawn keys and values."""

    query: torch.Tensor
    layer: LayerCache
    plan: CudaPlan

    @classmethod
    def make(cls, shape: LayerShape, dtype: torch.dtype, device: torch.device, block_size: int) -> Probe:
        flat = probe_batch(block_size)
        num_blocks = 1 + max(chain.from_iterable(flat.block_tables))
        generator = torch.Generator(device).manual_seed(0)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, dtype=torch.float32, device=device).to(dtype)

        layer = LayerCache(
            draw(num_blocks, block_size, shape.num_kv_heads, shape.key_size),
            draw(num_blocks, block_size, shape.num_kv_heads, shape.value_size),
        )
        return cls(draw(flat.num_tokens, shape.num_heads, shape.key_size), layer, CudaPlan(flat, device))


def probe_batch(block_size: int) -> FlatBatch:
    """The probe's step: PROBE_RUNS with interleaved block tables. Only its index lists matter."""
    counts = [-(-(start + length) // block_size) for start, length in PROBE_RUNS]
    tables = [tuple(range(i, i + len(PROBE_RUNS) * count, len(PROBE_RUNS))) for i, count in enumerate(counts)]
    positions = [list(range(start, start + length)) for start, length in PROBE_RUNS]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, run in zip(tables, positions, strict=True)
        for position in run
    ]
    return FlatBatch(
        input_ids=[0] * len(slots),
        position_ids=list(chain.from_iterable(positions)),
        slot_mapping=slots,
        query_starts=[0, *accumulate(length for _, length in PROBE_RUNS)],
        context_lens=[start + length for start, length in PROBE_RUNS],
        block_tables=tables,
        logit_rows=[],
        logit_starts=[0] * (len(PROBE_RUNS) + 1),
        sampling=[],
        sample_rows=[],
        block_size=block_size,
    )


def _time_ms(call: Callable[[], torch.Tensor]) -> float:
    """Milliseconds a call on the GPU, after one to warm up."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(PROBE_REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / PROBE_REPEATS
