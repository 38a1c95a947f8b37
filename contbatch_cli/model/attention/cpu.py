"""Attention by `scaled_dot_product_attention`, one sequence at a time, over the cache as it lies.

Shape legend: T tokens of the step, t tokens of one sequence, L the keys it reads, H query heads, K kv heads, G = H / K query
heads a kv head, D and E head sizes, N blocks, B block size.

What makes it fast:
- a context whose blocks are consecutive is read in place, as a strided view; any other is gathered, block by block;
- a decode gives its G query heads to one kv head as if they were G query positions: no key is repeated and no mask is needed,
  since a window is only a later first key;
- a longer run gives the G heads one key by a stride of 0.

A row's arithmetic depends on its own run alone, never on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model.attention import AttentionVariant
from contbatch_cli.model.kv_cache import LayerCache

QUERY_TILE = 256
"""Query positions of a masked call: the mask is QUERY_TILE x L and no key beyond the tile's last position is read."""


class Span(NamedTuple):
    """One sequence's part of the step: `num_queries` tokens that end a context of `context_len`.

    Its blocks follow each other from `first_block` in the cache, or are listed in `blocks` (int64), the other being None.
    """

    num_queries: int
    context_len: int
    first_block: int | None
    blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Slots of the step's tokens [T], the spans, and the masks made so far in this step, which layers share."""

    slots: torch.Tensor
    query_lens: list[int]
    spans: list[Span]
    block_size: int
    masks: dict[tuple[int, int, int, int | None], torch.Tensor] = field(default_factory=dict)


def prepare(flat: FlatBatch, device: torch.device) -> CpuPlan:
    query_lens = [end - start for start, end in zip(flat.query_starts, flat.query_starts[1:], strict=False)]
    tables = [
        table[: -(-length // flat.block_size)] for table, length in zip(flat.block_tables, flat.context_lens, strict=True)
    ]
    firsts = [table[0] if _is_consecutive(table) else None for table in tables]
    scattered = [table for table, first in zip(tables, firsts, strict=True) if first is None]
    listed = torch.tensor([block for table in scattered for block in table], dtype=torch.int64, device=device)
    blocks = iter(listed.split([len(table) for table in scattered]))
    return CpuPlan(
        torch.tensor(flat.slot_mapping, dtype=torch.int64, device=device),
        query_lens,
        [
            Span(num_queries, length, first, next(blocks) if first is None else None)
            for num_queries, length, first in zip(query_lens, flat.context_lens, firsts, strict=True)
        ],
        flat.block_size,
    )


def _is_consecutive(table: tuple[int, ...]) -> bool:
    first = table[0]
    return table[-1] - first == len(table) - 1 and table == tuple(range(first, first + len(table)))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    plan: CpuPlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    layer.write(plan.slots, key, value)
    num_tokens, num_heads, size = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    plain = variant.softcap is None and variant.sinks is None
    decode = _decode if plain else _decode_explicit
    outputs = [
        decode(part, layer, span, variant) if span.num_queries == 1 else _run(part, layer, span, plan, variant)
        for part, span in zip(grouped.split(plan.query_lens), plan.spans, strict=True)
    ]
    return torch.cat(outputs).view(num_tokens, num_heads, value.shape[-1])


def _decode(part: torch.Tensor, layer: LayerCache, span: Span, variant: AttentionVariant) -> torch.Tensor:
    """One token: part [1, K, G, D] to [1, K, G, E]."""
    first = _first_key(span.context_len - 1, variant)
    keys = _context(layer.keys, span, first, span.context_len)
    values = _context(layer.values, span, first, span.context_len)
    return scaled_dot_product_attention(part, keys, values, scale=variant.scaling)


def _decode_explicit(part: torch.Tensor, layer: LayerCache, span: Span, variant: AttentionVariant) -> torch.Tensor:
    """The same with a soft cap or sinks."""
    first = _first_key(span.context_len - 1, variant)
    keys = _context(layer.keys, span, first, span.context_len)
    values = _context(layer.values, span, first, span.context_len)
    sinks = None if variant.sinks is None else variant.sinks.view(1, part.shape[1], part.shape[2], 1)
    return _explicit(part, keys, values, None, variant, sinks)


def _run(part: torch.Tensor, layer: LayerCache, span: Span, plan: CpuPlan, variant: AttentionVariant) -> torch.Tensor:
    """A run of several tokens: part [t, K, G, D] to [t, K, G, E]."""
    start = span.context_len - span.num_queries
    first = _first_key(start, variant)
    keys = _context(layer.keys, span, first, span.context_len)[0].unsqueeze(1)
    values = _context(layer.values, span, first, span.context_len)[0].unsqueeze(1)
    queries = part.permute(1, 2, 0, 3)
    window = variant.sliding_window
    if start == 0 and variant.softcap is None and variant.sinks is None and (window is None or window >= span.num_queries):
        return _call(queries, keys, values, variant, None).permute(2, 0, 1, 3)
    tiles = [
        _tile(queries, keys, values, (start, first, offset), plan, variant) for offset in range(0, span.num_queries, QUERY_TILE)
    ]
    return torch.cat(tiles, dim=2).permute(2, 0, 1, 3)


def _tile(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    place: tuple[int, int, int],
    plan: CpuPlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    """QUERY_TILE of a run's positions: queries [K, G, t, D], keys [K, 1, L, D]; place: run's start, first key, tile's
    offset."""
    start, first, offset = place
    tile = queries[:, :, offset : offset + QUERY_TILE]
    low = _first_key(start + offset, variant)
    high = start + offset + tile.shape[2]
    mask = _mask(plan, start + offset, tile, low, variant.sliding_window)
    keys, values = keys[:, :, low - first : high - first], values[:, :, low - first : high - first]
    if variant.softcap is None and variant.sinks is None:
        return _call(tile, keys, values, variant, mask)
    sinks = None if variant.sinks is None else variant.sinks.view(tile.shape[0], tile.shape[1], 1, 1)
    return _explicit(tile, keys, values, mask, variant, sinks)


def _call(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: AttentionVariant, mask: torch.Tensor | None
) -> torch.Tensor:
    """queries [K, G, t, D] over keys [K, 1, L, D]: causal from position 0, or by the mask."""
    group = queries.shape[1]
    keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
    return scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, scale=variant.scaling)


def _explicit(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    variant: AttentionVariant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for what the fused call lacks: soft cap and sinks. The softmax is float32."""
    scores = (torch.matmul(queries, keys.transpose(-1, -2)) * variant.scaling).float()
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)
    sinks = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def _first_key(position: int, variant: AttentionVariant) -> int:
    """The first position that the token at `position` sees."""
    return 0 if variant.sliding_window is None else max(0, position + 1 - variant.sliding_window)


def _context(cached: torch.Tensor, span: Span, first: int, end: int) -> torch.Tensor:
    """Positions `first` to `end` of one sequence as [1, K, end - first, size], from block tensors [N, B, K, size]."""
    _, block_size, num_kv_heads, size = cached.shape
    token_stride = num_kv_heads * size
    shape, strides = (1, num_kv_heads, end - first, size), (token_stride, size, token_stride, 1)
    if span.blocks is None:
        assert span.first_block is not None
        return cached.as_strided(shape, strides, (span.first_block * block_size + first) * token_stride)
    first_block = first // block_size
    gathered = cached.index_select(0, span.blocks[first_block : -(-end // block_size)])
    return gathered.as_strided(shape, strides, (first - first_block * block_size) * token_stride)


def _mask(plan: CpuPlan, position: int, tile: torch.Tensor, low: int, window: int | None) -> torch.Tensor:
    """What to add to the scores of a tile whose first query stands at `position`, over the keys from `low`: [t, L]."""
    num_queries = tile.shape[2]
    place = (position, num_queries, low, window)
    mask = plan.masks.get(place)
    if mask is None:
        queries = torch.arange(position, position + num_queries, device=tile.device).unsqueeze(1)
        keys = torch.arange(low, position + num_queries, device=tile.device)
        hidden = keys > queries
        if window is not None:
            hidden = hidden | (keys <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=tile.dtype, device=tile.device).masked_fill_(hidden, float("-inf"))
        plan.masks[place] = mask
    return mask
