"""Resolves the `auto` sizes from the device, its free memory, the model and the job: pure arithmetic, each value with its reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from contbatch_cli.config import CacheConfig, SchedulerConfig
from contbatch_cli.core.job_order import Choice
from contbatch_cli.core.windowed_cache import window_span
from contbatch_cli.errors import UsageError
from contbatch_cli.units import memory_bytes

BLOCK_SIZE = 16
SEATS = {"cpu": 64, "cuda": 512}
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
DRAFT_TOKENS = {"cpu": 16, "cuda": 0}
"""Up to so many tokens a step costs little more than one of a single token. On CUDA that has not been measured."""
CACHE_FRACTION = {"cpu": 0.5, "cuda": 0.9}
"""The part of the free memory that the cache may take: a CPU shares it with everything else, and activations need some."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Where the cache goes: `kind` is "cpu" or "cuda", `free_bytes` what is left once the weights are there.

    `cache_bytes` is what a step at its fullest leaves of them, once that was measured, and `cache_reason` the sum in words.
    """

    kind: str
    free_bytes: int
    cache_bytes: int | None = None
    cache_reason: str = ""


class JobDemand(NamedTuple):
    """What is known of the job: the most tokens each row of the window can hold, whether these are all rows, whether some share.

    Rows that are still unread are taken to be like these, but for one of `max_context` tokens.
    """

    row_tokens: Sequence[int]
    is_whole: bool
    shares_prefixes: bool
    max_context: int


class LayerWindows(NamedTuple):
    """The `layers` that see no further than `window` tokens, of `num_layers` in all.

    Where these are all layers, the cache is theirs; where some, they have a pool of blocks of their own beside it.
    """

    window: int
    layers: frozenset[int]
    num_layers: int

    @property
    def are_all(self) -> bool:
        return len(self.layers) == self.num_layers


class WindowShare(NamedTuple):
    """What a pool of its own for layers with a window takes: bytes a block, and the most blocks that are of use."""

    block_bytes: int
    most_blocks: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The resolved sizes; `reasons` by their config keys. `num_window_blocks` are those of a pool for layers with a window."""

    token_budget: int
    max_batch_size: int
    block_size: int
    num_blocks: int
    reasons: dict[str, str]
    num_window_blocks: int = 0
    draft_tokens: int = 0


def block_size_of(cache: CacheConfig, minimum: int = 1) -> Choice:
    """Tokens in a block; `minimum` is what the attention backend needs."""
    if cache.block_size != "auto":
        return Choice(str(cache.block_size), "as set")
    if minimum > BLOCK_SIZE:
        return Choice(str(minimum), "the attention backend needs it")
    return Choice(str(BLOCK_SIZE), "default")


def most_blocks(cache: CacheConfig, block_bytes: int, memory: DeviceMemory, own: WindowShare | None = None) -> Choice:
    """The most blocks that the config and the memory allow. Raises UsageError when that is none.

    With `own` some layers have a pool of their own, which has as many blocks up to those that are of use.
    """
    if cache.num_blocks != "auto":
        return Choice(str(cache.num_blocks), "as set")
    budget, reason = _cache_budget(cache, memory)
    both = block_bytes + (own.block_bytes if own is not None else 0)
    num_blocks = budget // both
    if own is not None and num_blocks > own.most_blocks:
        num_blocks = (budget - own.most_blocks * own.block_bytes) // block_bytes
    if num_blocks < 1:
        raise UsageError(
            f"cache.memory: {budget:,} bytes of {memory.free_bytes:,} free on {memory.kind} hold no block of the KV cache, "
            f"which takes {both:,} bytes"
        )
    return Choice(str(num_blocks), reason)


def _cache_budget(cache: CacheConfig, memory: DeviceMemory) -> tuple[int, str]:
    """Bytes that the cache may take, and why: as set, or a part of what is free, and no more than is left where that was measured."""
    wanted = memory_bytes(cache.memory if cache.memory is not None else CACHE_FRACTION[memory.kind], memory.free_bytes)
    if memory.cache_bytes is not None and (cache.memory is None or memory.cache_bytes < wanted):
        return memory.cache_bytes, memory.cache_reason
    return wanted, f"{wanted / 2**30:.2f} GiB of {memory.free_bytes / 2**30:.2f} GiB free"


def largest_step(scheduler: SchedulerConfig, kind: str) -> tuple[int, int]:
    """The most seats and the largest token budget that `resolve_sizes` may find, before anything is known of the job."""
    seats = SEATS[kind] if scheduler.max_batch_size == "auto" else scheduler.max_batch_size
    budget = max(TOKEN_BUDGET[kind], seats) if scheduler.token_budget == "auto" else scheduler.token_budget
    return min(seats, budget), budget


def resolve_sizes(
    scheduler: SchedulerConfig,
    block_size: int,
    limit: Choice,
    kind: str,
    job: JobDemand,
    is_limit_set: bool,
    windows: LayerWindows | None = None,
    holds_known_rows: bool = False,
) -> Sizes:
    """Sizes for a job whose cache may have at most `limit` blocks; with `is_limit_set` it has exactly that many.

    With `holds_known_rows` it has more if the largest row that is known needs them.
    """
    reasons: dict[str, str] = {}
    seats = _max_batch_size(scheduler, kind, job, reasons)
    budget = _token_budget(scheduler, kind, seats, reasons)
    span = window_span(windows.window, budget, block_size) if windows is not None else None
    at_most = span if windows is not None and windows.are_all else None
    needs = [min(-(-tokens // block_size), at_most or sys.maxsize) for tokens in job.row_tokens]
    num_blocks = int(limit.value)
    if is_limit_set or (wanted := _wanted_blocks(block_size, needs, min(seats, budget), job, at_most)) >= num_blocks:
        reasons["cache.num_blocks"] = limit.reason
    else:
        num_blocks, reasons["cache.num_blocks"] = wanted, "all that the job can use"
    if holds_known_rows:
        num_blocks = max(num_blocks, *needs, 1)
    own = min(num_blocks, min(seats, budget) * span) if span is not None and at_most is None else 0
    return Sizes(budget, seats, block_size, num_blocks, reasons, own, _draft_tokens(scheduler, kind, budget, reasons))


def _max_batch_size(scheduler: SchedulerConfig, kind: str, job: JobDemand, reasons: dict[str, str]) -> int:
    if scheduler.max_batch_size != "auto":
        reasons["scheduler.max_batch_size"] = "as set"
        return scheduler.max_batch_size
    num_rows = len(job.row_tokens)
    if job.is_whole and 0 < num_rows < SEATS[kind]:
        reasons["scheduler.max_batch_size"] = "all rows of the job"
        return num_rows
    reasons["scheduler.max_batch_size"] = f"default on {kind}"
    return SEATS[kind]


def _draft_tokens(scheduler: SchedulerConfig, kind: str, budget: int, reasons: dict[str, str]) -> int:
    is_set = scheduler.draft_tokens != "auto"
    reasons["scheduler.draft_tokens"] = "as set" if is_set else f"default on {kind}"
    return min(scheduler.draft_tokens if scheduler.draft_tokens != "auto" else DRAFT_TOKENS[kind], budget)


def _token_budget(scheduler: SchedulerConfig, kind: str, seats: int, reasons: dict[str, str]) -> int:
    if scheduler.token_budget != "auto":
        lowered = f"; lowers the seats from {seats}" if scheduler.token_budget < seats else ""
        reasons["scheduler.token_budget"] = f"as set{lowered}"
        return scheduler.token_budget
    if seats > TOKEN_BUDGET[kind]:
        reasons["scheduler.token_budget"] = "one token for each seat"
        return seats
    reasons["scheduler.token_budget"] = f"default on {kind}"
    return TOKEN_BUDGET[kind]


def _wanted_blocks(block_size: int, needs: Sequence[int], seats: int, job: JobDemand, at_most: int | None) -> int:
    """All that the job can use: blocks of its largest `seats` rows, or of all rows when some share.

    `needs` are the blocks of each row that is known; no row holds more than `at_most`.
    """
    if not job.is_whole:
        longest = -(-job.max_context // block_size)
        needs = [*needs, longest if at_most is None else min(longest, at_most)]
    return max(sum(needs) if job.shares_prefixes else sum(nlargest(seats, needs)), 1)
