"""The oracle: attention row by row, slow and obvious, in float32. Every other backend must agree with it.

Shape legend: T tokens of the step, t tokens of one sequence, L its context, H query heads, K kv heads, D and E head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model.attention import AttentionVariant
from contbatch_cli.model.kv_cache import LayerCache


class ReferencePlan(NamedTuple):
    """Slots of the step's tokens [T], tokens of each sequence, and the slots [L] of each sequence's whole context."""

    slots: torch.Tensor
    query_lens: list[int]
    context_slots: list[torch.Tensor]


def prepare(flat: FlatBatch, device: torch.device) -> ReferencePlan:
    size = flat.block_size
    contexts = [
        [table[position // size] * size + position % size for position in range(length)]
        for table, length in zip(flat.block_tables, flat.context_lens, strict=True)
    ]
    return ReferencePlan(
        torch.tensor(flat.slot_mapping, dtype=torch.int64, device=device),
        [end - start for start, end in zip(flat.query_starts, flat.query_starts[1:], strict=False)],
        [torch.tensor(slots, dtype=torch.int64, device=device) for slots in contexts],
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    plan: ReferencePlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    layer.write(plan.slots, key, value)
    keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
    outputs = [
        attend_one(part, keys[slots], values[slots], variant)
        for part, slots in zip(query.split(plan.query_lens), plan.context_slots, strict=True)
    ]
    return torch.cat(outputs).to(query.dtype)


def attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
    """query [t, H, D], the last t positions of a context of keys [L, K, D] and values [L, K, E], to [t, H, E], float32."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", query.float(), keys) * variant.scaling
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~_visible(query.shape[0], keys.shape[0], variant, query.device), float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("htl,lhe->the", weights, values)


def _visible(num_queries: int, context_len: int, variant: AttentionVariant, device: torch.device) -> torch.Tensor:
    """Which keys [L] each query [t] sees, a boolean [t, L]."""
    key_positions = torch.arange(context_len, device=device)
    positions = key_positions[context_len - num_queries :].unsqueeze(1)
    visible = key_positions <= positions
    if variant.sliding_window is not None:
        visible = visible & (key_positions > positions - variant.sliding_window)
    return visible
