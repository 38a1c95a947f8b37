"""Paged attention over a flat batch in Triton: decodes and prefill runs in one call, past keys and values read in place.

The method is flash attention's online softmax (Dao et al. 2022) over a block table (Kwon et al. 2023), with flash-decoding's
split of the keys for small batches of decodes. Importing this file needs Triton; with TRITON_INTERPRET=1 set before Triton is
first imported it runs on a CPU.

Shape legend: T tokens of the step, S sequences, H query heads, K kv heads, D head size of queries and keys, E head size of values,
N blocks, B block size. Caches are [N, B, K, D] and [N, B, K, E].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from contbatch_cli.model.attention.tiles import SMALL_TILE_ROWS, num_kv_splits, tile_rows


@dataclass(frozen=True)
class PagedBatch:
    """One step's index tensors, int32, on the device.

    `query_starts` [S + 1], `context_lens` [S]; the block table of sequence i is `block_ids[table_starts[i]:table_starts[i + 1]]`.
    `small_tiles` and `large_tiles` are [n, 2]: sequence (-1: nothing to do) and first query of each tile (`tiles.plan_tiles`).
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    table_starts: torch.Tensor
    block_ids: torch.Tensor
    small_tiles: torch.Tensor
    large_tiles: torch.Tensor
    large_rows: int
    max_small_context: int


@triton.jit
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    kc_stride_n,
    kc_stride_b,
    kc_stride_h,
    vc_stride_n,
    vc_stride_b,
    vc_stride_h,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    PAD: tl.constexpr,
):
    """One program copies one token's K heads into its slot; a slot of -1 is padding and touches nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // B
        offset = slot % B
        i = tl.arange(0, PAD)
        head = i // D
        keys = tl.load(key + token * key_stride_t + head * key_stride_h + i % D, mask=i < K * D)
        tl.store(key_cache + block * kc_stride_n + offset * kc_stride_b + head * kc_stride_h + i % D, keys, mask=i < K * D)
        head = i // E
        values = tl.load(value + token * value_stride_t + head * value_stride_h + i % E, mask=i < K * E)
        tl.store(value_cache + block * vc_stride_n + offset * vc_stride_b + head * vc_stride_h + i % E, values, mask=i < K * E)


@triton.jit
def _finish(acc, peak, total, sinks, head, valid, HAS_SINKS: tl.constexpr):
    """The softmax's division. A sink is one more logit of the head, with no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        top = tl.maximum(peak, sink)
        weight = tl.exp(peak - top)
        acc = acc * weight[:, None]
        total = total * weight + tl.exp(sink - top)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial,
    partial_stats,
    tiles,
    query_starts,
    context_lens,
    table_starts,
    block_ids,
    sinks,
    scale,
    softcap,
    window,
    num_splits,
    q_stride_t,
    q_stride_h,
    kc_stride_n,
    kc_stride_b,
    kc_stride_h,
    vc_stride_n,
    vc_stride_b,
    vc_stride_h,
    out_stride_t,
    out_stride_h,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program: one tile, one kv head, one split of the keys. Row r is query `first + r // G`, head `kv_head * G + r % G`."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    table = block_ids + tl.load(table_starts + sequence)

    queries = ROWS // G
    r = tl.arange(0, ROWS)
    row = first + r // G
    head = kv_head * G + r % G
    valid = (r < queries * G) & (row < length)
    position = context - length + row
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, E_PAD)
    token = (start + row).to(tl.int64)
    q_at = query + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
    q = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Keys low to high of the tile; the programs of a split take equal shares of its key tiles.
    high = context - length + tl.minimum(first + queries, length)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, context - length + first - window + 1)
    first_tile = low // KEYS
    last_tile = tl.cdiv(high, KEYS)
    if SPLIT:
        share = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile = first_tile + split * share
        last_tile = tl.minimum(last_tile, first_tile + share)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, E_PAD], tl.float32)
    for key_tile in range(first_tile, last_tile):
        n = key_tile * KEYS + tl.arange(0, KEYS)
        live = (n >= low) & (n < high)
        block = tl.load(table + n // B, mask=live, other=0).to(tl.int64)
        k_at = key_cache + block * kc_stride_n + (n % B) * kc_stride_b + kv_head * kc_stride_h
        k = tl.load(k_at[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
        v_at = value_cache + block * vc_stride_n + (n % B) * vc_stride_b + kv_head * vc_stride_h
        v = tl.load(v_at[:, None] + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        keep = live[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            keep = keep & (n[None, :] > position[:, None] - window)
        scores = tl.where(keep, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has met no key yet: subtract 0, so that its weights are exp(-inf) = 0 and not NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - base[:, None])
        decay = tl.exp(peak - base)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = acc * decay[:, None] + tl.dot(weights, v, input_precision="ieee")
        peak = new_peak

    if SPLIT:
        # partial [n, K, splits, ROWS, E_PAD], partial_stats [n, K, splits, 2, ROWS]
        at = ((tile * K + kv_head) * num_splits + split).to(tl.int64)
        tl.store(partial + at * ROWS * E_PAD + r[:, None] * E_PAD + e[None, :], acc)
        tl.store(partial_stats + at * 2 * ROWS + r, peak)
        tl.store(partial_stats + at * 2 * ROWS + ROWS + r, total)
    else:
        result = _finish(acc, peak, total, sinks, head, valid, HAS_SINKS)
        at_out = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + e[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=valid[:, None] & (e < E)[None, :])


@triton.jit
def _combine_kernel(
    partial,
    partial_stats,
    out,
    tiles,
    query_starts,
    sinks,
    num_splits,
    out_stride_t,
    out_stride_h,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program adds up the splits of one tile and kv head, in order."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    r = tl.arange(0, ROWS)
    row = tl.load(tiles + 2 * tile + 1) + r // G
    head = kv_head * G + r % G
    valid = (r < (ROWS // G) * G) & (row < length)
    e = tl.arange(0, E_PAD)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, E_PAD], tl.float32)
    for split in range(0, num_splits):
        at = ((tile * K + kv_head) * num_splits + split).to(tl.int64)
        split_peak = tl.load(partial_stats + at * 2 * ROWS + r)
        split_total = tl.load(partial_stats + at * 2 * ROWS + ROWS + r)
        split_acc = tl.load(partial + at * ROWS * E_PAD + r[:, None] * E_PAD + e[None, :])
        new_peak = tl.maximum(peak, split_peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - base)
        weight = tl.exp(split_peak - base)
        total = total * decay + split_total * weight
        acc = acc * decay[:, None] + split_acc * weight[:, None]
        peak = new_peak
    result = _finish(acc, peak, total, sinks, head, valid, HAS_SINKS)
    at_out = out + (start + row).to(tl.int64)[:, None] * out_stride_t + head[:, None] * out_stride_h + e[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=valid[:, None] & (e < E)[None, :])


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes key [T, K, D] and value [T, K, E] into their slots of the caches; `slot_mapping` [T], -1 for padding."""
    assert key.stride(-1) == value.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == 1
    tokens, heads, size = key.shape
    value_size = value.shape[-1]
    _write_kernel[(tokens,)](
        key, value, key_cache, value_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        K=heads, D=size, E=value_size, B=key_cache.shape[1], PAD=triton.next_power_of_2(heads * max(size, value_size)),
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Causal attention of query [T, H, D] over each sequence's own cached keys and values, the step's included: [T, H, E].

    A query at position p sees positions max(0, p - window + 1) to p. `softcap` c turns a score s into c tanh(s / c); `sinks` [H] are
    extra logits without a value. `num_splits` overrides the choice of `tiles.num_kv_splits` for the small tiles.
    """
    assert query.stride(-1) == 1
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    heads = _Heads(query, key_cache, value_cache)
    options = _Options(scale, softcap, window, sinks)
    small = batch.small_tiles.shape[0]
    if num_splits is None:
        num_splits = num_kv_splits(small, heads.kv_heads, batch.max_small_context, _num_processors(query.device))
    small_rows = tile_rows(heads.group)
    if small:
        _launch(query, key_cache, value_cache, out, batch, batch.small_tiles, small_rows, num_splits, heads, options)
    if batch.large_tiles.shape[0]:
        _launch(query, key_cache, value_cache, out, batch, batch.large_tiles, batch.large_rows, 1, heads, options)
    return out


class _Heads:
    """The sizes that a kernel is compiled for."""

    def __init__(self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        self.kv_heads = key_cache.shape[2]
        self.group, rest = divmod(query.shape[1], self.kv_heads)
        assert rest == 0, f"{query.shape[1]} query heads are no multiple of {self.kv_heads} kv heads"
        self.size = query.shape[2]
        self.value_size = value_cache.shape[3]
        # A tensor core product needs at least 16 columns.
        self.padded_size = max(16, triton.next_power_of_2(self.size))
        self.padded_value_size = max(16, triton.next_power_of_2(self.value_size))
        self.block_size = key_cache.shape[1]
        # Keys to a tile: 16 KiB of keys, so that keys, values and the queries fit the shared memory of small cards too.
        width = max(self.padded_size, self.padded_value_size) * query.element_size()
        self.keys = min(64, max(16, 16384 // width))


@dataclass(frozen=True)
class _Options:
    scale: float
    softcap: float | None
    window: int | None
    sinks: torch.Tensor | None


def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    batch: PagedBatch,
    tiles: torch.Tensor,
    rows: int,
    num_splits: int,
    heads: _Heads,
    options: _Options,
) -> None:
    num_tiles = tiles.shape[0]
    split = num_splits > 1
    partial, stats = _workspace(query, num_tiles, rows, num_splits, heads) if split else (out, out)
    sinks = query if options.sinks is None else options.sinks
    _attention_kernel[(num_tiles, heads.kv_heads, num_splits)](
        query, key_cache, value_cache, out, partial, stats, tiles,
        batch.query_starts, batch.context_lens, batch.table_starts, batch.block_ids,
        sinks, options.scale, options.softcap or 0.0, options.window or 0, num_splits,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], out.stride(0), out.stride(1),
        K=heads.kv_heads, G=heads.group, D=heads.size, D_PAD=heads.padded_size, E=heads.value_size, E_PAD=heads.padded_value_size,
        B=heads.block_size, ROWS=rows, KEYS=heads.keys,
        HAS_SOFTCAP=bool(options.softcap), HAS_WINDOW=bool(options.window), HAS_SINKS=options.sinks is not None,
        SPLIT=split, UPCAST=is_interpreted() and query.dtype == torch.bfloat16,
    )  # fmt: skip
    if split:
        _combine_kernel[(num_tiles, heads.kv_heads)](
            partial, stats, out, tiles, batch.query_starts, sinks, num_splits, out.stride(0), out.stride(1),
            K=heads.kv_heads, G=heads.group, E=heads.value_size, E_PAD=heads.padded_value_size, ROWS=rows,
            HAS_SINKS=options.sinks is not None,
        )  # fmt: skip


def _workspace(
    query: torch.Tensor, num_tiles: int, rows: int, num_splits: int, heads: _Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """The splits' sums and softmax statistics, float32."""
    lead = (num_tiles, heads.kv_heads, num_splits)
    partial = torch.empty(*lead, rows, heads.padded_value_size, dtype=torch.float32, device=query.device)
    return partial, torch.empty(*lead, 2, rows, dtype=torch.float32, device=query.device)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_interpreted() -> bool:
    """Whether Triton runs the kernels as Python on a CPU. (Its bfloat16 products are wrong there; the kernels upcast for it.)"""
    return bool(knobs.runtime.interpret)


assert tile_rows(1) == SMALL_TILE_ROWS
