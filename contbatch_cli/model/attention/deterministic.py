"""Attention whose every row is computed alone: bit for bit the same in a batch of one and of a thousand, on a CPU.

Shape legend: T rows of the tile, t tokens of it, L keys that a row sees, H query heads, K kv heads, G = H / K, D and E head sizes.

A token's attention is always one call of the shape [K, G] x L, where L depends on its position alone, whether it is a decode or one of
a long prompt. So nothing that the scheduler decides, neither chunks nor neighbours nor blocks, can change the order of a sum. The
price is one call a prompt token in place of one a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model.attention import AttentionVariant
from contbatch_cli.model.kv_cache import LayerCache

ALIGNMENT_BYTES = 64
"""Where a matrix starts, modulo this, may change how a product is computed."""


class Run(NamedTuple):
    """Consecutive tokens of one sequence: positions `start` to `end`, and the slots [end] of the whole context.

    `first_slot` is where the context begins when its slots follow each other, else None.
    """

    start: int
    end: int
    slots: torch.Tensor
    first_slot: int | None


@dataclass(frozen=True, slots=True)
class DeterministicPlan:
    """The step's tokens, or some of them: slots [t] to write to, and the runs in order."""

    slots: torch.Tensor
    runs: list[Run]

    def tile(self, first: int, stop: int) -> DeterministicPlan:
        """The flat tokens `first` to `stop` alone."""
        runs: list[Run] = []
        offset = 0
        for run in self.runs:
            low, high = max(first - offset, 0), min(stop - offset, run.end - run.start)
            if low < high:
                runs.append(Run(run.start + low, run.start + high, run.slots[: run.start + high], run.first_slot))
            offset += run.end - run.start
        return DeterministicPlan(self.slots[first:stop], runs)


def prepare(flat: FlatBatch, device: torch.device) -> DeterministicPlan:
    size = flat.block_size
    runs: list[Run] = []
    for i, (table, length) in enumerate(zip(flat.block_tables, flat.context_lens, strict=True)):
        blocks = torch.tensor(table[: -(-length // size)], dtype=torch.int64, device=device)
        slots = (blocks.unsqueeze(1) * size + torch.arange(size, device=device)).flatten()[:length]
        start = length - (flat.query_starts[i + 1] - flat.query_starts[i])
        consecutive = bool((blocks.diff() == 1).all())
        runs.append(Run(start, length, slots, int(blocks[0]) * size if consecutive else None))
    return DeterministicPlan(torch.tensor(flat.slot_mapping, dtype=torch.int64, device=device), runs)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    plan: DeterministicPlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    """As every backend, but the tensors may have more rows than the plan has tokens: those are padding and come out as 0."""
    num_tokens = plan.slots.shape[0]
    layer.write(plan.slots, key[:num_tokens], value[:num_tokens])
    rows, num_heads, _ = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    output = query.new_zeros(rows, num_heads, value.shape[-1])
    row = 0
    for run in plan.runs:
        first = _first_key(run.start, variant)
        keys, values = _context(layer.keys, run, first), _context(layer.values, run, first)
        for position in range(run.start, run.end):
            seen = slice(_first_key(position, variant) - first, position + 1 - first)
            result = _row(grouped[row : row + 1], _settled(keys[:, :, seen]), _settled(values[:, :, seen]), variant)
            output[row] = result.reshape(num_heads, -1)
            row += 1
    return output


def _row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
    """query [1, K, G, D] over all of keys [1, K, L, D]: [1, K, G, E]. The G heads of a kv head stand as G query positions."""
    if variant.softcap is None and variant.sinks is None:
        return scaled_dot_product_attention(query, keys, values, scale=variant.scaling)
    scores = (torch.matmul(query, keys.transpose(-1, -2)) * variant.scaling).float()
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if variant.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)
    sinks = variant.sinks.float().view(1, query.shape[1], query.shape[2], 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def _first_key(position: int, variant: AttentionVariant) -> int:
    """The first position that the token at `position` sees."""
    return 0 if variant.sliding_window is None else max(0, position + 1 - variant.sliding_window)


def _context(cached: torch.Tensor, run: Run, first: int) -> torch.Tensor:
    """Positions `first` to the run's end as [1, K, L, size]: in place where the slots follow each other, else gathered."""
    flat = cached.flatten(0, 1)
    if run.first_slot is None:
        context = flat.index_select(0, run.slots[first:])
    else:
        context = flat[run.first_slot + first : run.first_slot + run.end]
    return context.transpose(0, 1).unsqueeze(0)


def _settled(context: torch.Tensor) -> torch.Tensor:
    """The same values where their place in the cache cannot matter: each head's rows start at a multiple of ALIGNMENT_BYTES.

    Heads of such a size are so already, wherever their block is; others are copied.
    """
    if context.shape[-1] * context.element_size() % ALIGNMENT_BYTES == 0:
        return context
    return context.contiguous()
