"""How one attention call over a flat batch is cut into pieces of GPU work: pure integers, no torch.

A tile is a few consecutive queries of one run. Short runs (decodes) and long runs (prefill) get tiles of their own size, since a
decode fills one row of a large tile. Where a step has too few tiles to fill the device, each tile's keys are split over several
programs and combined afterwards (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMALL_TILE_ROWS = 16
"""Rows (queries x query heads of one kv head) of the small tile: the least that a tensor core product takes."""

LARGE_TILE_ROWS = 64
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 32


class Tile(NamedTuple):
    """Queries `first` and following of the run of sequence `sequence`; as many as the tile's rows hold or the run has left."""

    sequence: int
    first: int


class TilePlan(NamedTuple):
    """The tiles of one step: `small` of SMALL_TILE_ROWS rows, `large` of `large_rows`; `max_context` is the small tiles' longest."""

    small: list[Tile]
    large: list[Tile]
    large_rows: int
    max_small_context: int


def plan_tiles(query_starts: Sequence[int], context_lens: Sequence[int], group: int) -> TilePlan:
    """Cuts the runs of a flat batch into tiles; `group` is the number of query heads to one kv head."""
    small_queries = max(1, SMALL_TILE_ROWS // group)
    large_rows = max(LARGE_TILE_ROWS, tile_rows(group))
    large_queries = large_rows // group
    small: list[Tile] = []
    large: list[Tile] = []
    longest = 0
    for sequence, context in enumerate(context_lens):
        length = query_starts[sequence + 1] - query_starts[sequence]
        if length <= small_queries:
            small.append(Tile(sequence, 0))
            longest = max(longest, context)
        else:
            large.extend(Tile(sequence, first) for first in range(0, length, large_queries))
    return TilePlan(small, large, large_rows, longest)


def tile_rows(group: int) -> int:
    """The rows of the smallest tile that holds one query of a kv head: a power of two, at least SMALL_TILE_ROWS."""
    return max(SMALL_TILE_ROWS, 1 << (group - 1).bit_length())


def num_kv_splits(num_tiles: int, num_kv_heads: int, max_context: int, num_processors: int) -> int:
    """Over how many programs each tile's keys are split: 1 when the tiles alone give each multiprocessor a program.

    Never so many that a split has fewer than MIN_KEYS_PER_SPLIT keys of the longest context.
    """
    programs = num_tiles * num_kv_heads
    if programs == 0:
        return 1
    wanted = num_processors // programs
    return max(1, min(wanted, max_context // MIN_KEYS_PER_SPLIT, MAX_SPLITS))
