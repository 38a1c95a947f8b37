"""`engine.deterministic`: a row's logits are bitwise the same whatever the batch, budget, block size, preemption or prefix hits.

Shape legend: T tokens of the step, M rows of a tile, L logit rows, V vocabulary.

A float sum depends on its order, and libraries choose that order by the shape of a product and the length of an array. So the
step's T tokens go through the model in tiles of exactly M rows, the last one padded, and the rows that need logits are padded to M
as well: every operation always has the same shape, hence the same code path. Attention, the one operation whose shape must vary,
is computed row by row (`attention/deterministic.py`). Tiles run in plan order, so a row may read a block which an earlier row
of the same step fills. (The method is the project's own; that batch-dependent kernels are what makes inference vary is due to
He et al., "Defeating Nondeterminism in LLM Inference", 2025.)

What remains is whether a row's place within its tile can matter: how a library cuts the tile for its vector units and threads. That is
not assumed but tried, on the whole model, before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import CachedStep, attending, current_step
from contbatch_cli.model.attention import deterministic as backend
from contbatch_cli.model.kv_cache import KVCache, LayerShape

TILE_ROWS = 32
"""Rows of a tile: part of the arithmetic, so a constant. Fewer waste less in small batches, more are faster in large ones."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class TiledOutput(NamedTuple):
    logits: torch.Tensor


class TiledModel(torch.nn.Module):
    """A model that takes steps of any size and runs them in tiles. Its attention must be the `deterministic` backend."""

    def __init__(self, model: torch.nn.Module, rows: int = TILE_ROWS) -> None:
        super().__init__()
        self.model = model
        self.rows = rows

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **kwargs: Any
    ) -> TiledOutput:
        """input_ids and position_ids [1, T], logits_to_keep [L] ascending: logits [1, L, V]. Called within `attending`."""
        num_tokens = input_ids.shape[1]
        step = current_step()
        assert isinstance(step, CachedStep)
        parts: list[torch.Tensor] = []
        for first in range(0, num_tokens, self.rows):
            stop = min(first + self.rows, num_tokens)
            kept = logits_to_keep[(logits_to_keep >= first) & (logits_to_keep < stop)] - first
            own = step.window_plan
            tile = step._replace(plan=step.plan.tile(first, stop), window_plan=own and own.tile(first, stop))
            with attending(tile):
                output = self.model(
                    input_ids=_padded(input_ids[:, first:stop], self.rows),
                    position_ids=_padded(position_ids[:, first:stop], self.rows),
                    logits_to_keep=_padded(kept.unsqueeze(0), self.rows)[0] if len(kept) else kept,
                    **kwargs,
                )
            parts.append(output.logits[:, : len(kept)])
        return TiledOutput(torch.cat(parts, dim=1))


def _padded(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """ids [1, n] with zeros up to [1, rows]."""
    return torch.nn.functional.pad(ids, (0, rows - ids.shape[1]))


def make_deterministic(
    model: torch.nn.Module, layers: Sequence[LayerShape], dtype: torch.dtype, rows: int = TILE_ROWS
) -> tuple[TiledModel, str]:
    """The model in tiles, and a line for the header. Lowers torch's number of threads where only fewer keep rows independent.

    Raises UsageError for a model that cannot be run so, or a machine on which a row's place in a tile shows in its logits.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise UsageError(f"engine.deterministic: needs model.device: cpu; it has not been tried on {device.type}")
    refuse_unsuitable(model.config)
    tiled = TiledModel(model, rows)
    wanted = torch.get_num_threads()
    for threads in thread_candidates(wanted):
        torch.set_num_threads(threads)
        differing = num_differing_rows(tiled, layers, dtype)
        if differing == 0:
            return tiled, f"tiles of {rows} rows, {threads} threads{'' if threads == wanted else f' instead of {wanted}'}"
    torch.set_num_threads(wanted)
    raise UsageError(f"engine.deterministic: {differing} of {rows} equal rows of a tile got different logits on this machine")


def thread_candidates(wanted: int) -> list[int]:
    """`wanted`, then the smaller powers of two: by those, arrays are cut where vectors end."""
    powers = [1 << i for i in reversed(range(wanted.bit_length()))]
    return [wanted, *(power for power in powers if power < wanted)]


def refuse_unsuitable(config: Any) -> None:
    """Raises UsageError for models in which one token's arithmetic depends on other rows by design."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in _EXPERT_KEYS:
        if (getattr(text, key, None) or 0) > 1:
            raise UsageError(
                f"engine.deterministic: {config.model_type} routes tokens to {getattr(text, key)} experts, so the shape of "
                "their products depends on the batch"
            )


@torch.inference_mode()
def num_differing_rows(tiled: TiledModel, layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """How many rows of a tile differ, in a tile of equal rows or with other rows beside them."""
    rows = tiled.rows
    scratch = KVCache(layers, rows, 1, dtype, torch.device("cpu"))
    token = 1
    equal = _probe(tiled, scratch, [token] * rows)
    differing = int((equal != equal[0]).any(dim=-1).sum())
    for place in (0, rows // 2, rows - 1):
        mixed = [7 * i % 29 for i in range(rows)]
        mixed[place] = token
        differing += int((_probe(tiled, scratch, mixed)[place] != equal[0]).any())
    return differing


def _probe(tiled: TiledModel, scratch: KVCache, token_ids: list[int]) -> torch.Tensor:
    """Logits [M, V] of M sequences of one token each."""
    rows = len(token_ids)
    device = torch.device("cpu")
    flat = FlatBatch(
        input_ids=token_ids,
        position_ids=[0] * rows,
        slot_mapping=list(range(rows)),
        query_starts=list(range(rows + 1)),
        context_lens=[1] * rows,
        block_tables=[(i,) for i in range(rows)],
        logit_rows=list(range(rows)),
        logit_starts=list(range(rows + 1)),
        sampling=[],
        sample_rows=[],
        block_size=1,
    )
    with attending(CachedStep(scratch, backend, backend.prepare(flat, device))):
        output = tiled(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.zeros(1, rows, dtype=torch.int64, device=device),
            use_cache=False,
            logits_to_keep=torch.arange(rows, device=device),
        )
    logits: torch.Tensor = output.logits[0]
    return logits
