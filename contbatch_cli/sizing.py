"""Resolves the `auto` sizes from the device, its free memory, the model and the job: pure arithmetic, each value with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from contbatch_cli.config import CacheConfig, SchedulerConfig
from contbatch_cli.core.job_order import Choice
from contbatch_cli.errors import UsageError
from contbatch_cli.units import memory_bytes

BLOCK_SIZE = 16
SEATS = {"cpu": 64, "cuda": 512}
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
CACHE_FRACTION = {"cpu": 0.5, "cuda": 0.9}
"""The part of the free memory that the cache may take: a CPU shares it with everything else, and activations need some."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Where the cache goes: `kind` is "cpu" or "cuda", `free_bytes` what is left once the weights are there."""

    kind: str
    free_bytes: int


class JobDemand(NamedTuple):
    """What is known of the job: the most tokens each row of the window can hold, whether these are all rows, whether some share.

    Rows that are still unread are taken to be like these, but for one of `max_context` tokens.
    """

    row_tokens: Sequence[int]
    is_whole: bool
    shares_prefixes: bool
    max_context: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The resolved sizes; `reasons` by their config keys."""

    token_budget: int
    max_batch_size: int
    block_size: int
    num_blocks: int
    reasons: dict[str, str]


def block_size_of(cache: CacheConfig, minimum: int = 1) -> Choice:
    """Tokens in a block; `minimum` is what the attention backend needs."""
    if cache.block_size != "auto":
        return Choice(str(cache.block_size), "as set")
    if minimum > BLOCK_SIZE:
        return Choice(str(minimum), "the attention backend needs it")
    return Choice(str(BLOCK_SIZE), "default")


def most_blocks(cache: CacheConfig, block_bytes: int, memory: DeviceMemory) -> Choice:
    """The most blocks that the config and the memory allow. Raises UsageError when that is none."""
    if cache.num_blocks != "auto":
        return Choice(str(cache.num_blocks), "as set")
    budget = memory_bytes(cache.memory if cache.memory is not None else CACHE_FRACTION[memory.kind], memory.free_bytes)
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise UsageError(
            f"cache.memory: {budget:,} bytes of {memory.free_bytes:,} free on {memory.kind} hold no block of the KV cache, "
            f"which takes {block_bytes:,} bytes"
        )
    return Choice(str(num_blocks), f"{budget / 2**30:.2f} GiB of {memory.free_bytes / 2**30:.2f} GiB free")


def resolve_sizes(
    scheduler: SchedulerConfig, block_size: int, limit: Choice, kind: str, job: JobDemand, is_limit_set: bool
) -> Sizes:
    """Sizes for a job whose cache may have at most `limit` blocks; with `is_limit_set` it has exactly that many."""
    reasons: dict[str, str] = {}
    seats = _max_batch_size(scheduler, kind, job, reasons)
    budget = _token_budget(scheduler, kind, seats, reasons)
    num_blocks = _num_blocks(block_size, limit, min(seats, budget), job, is_limit_set, reasons)
    return Sizes(budget, seats, block_size, num_blocks, reasons)


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


def _num_blocks(
    block_size: int, limit: Choice, seats: int, job: JobDemand, is_limit_set: bool, reasons: dict[str, str]
) -> int:
    """The limit, or less where the job cannot use it: blocks of its largest `seats` rows, or of all rows when some share."""
    if is_limit_set:
        reasons["cache.num_blocks"] = limit.reason
        return int(limit.value)
    needs = [-(-tokens // block_size) for tokens in job.row_tokens]
    if not job.is_whole:
        needs.append(-(-job.max_context // block_size))
    wanted = max(sum(needs) if job.shares_prefixes else sum(nlargest(seats, needs)), 1)
    if wanted >= int(limit.value):
        reasons["cache.num_blocks"] = limit.reason
        return int(limit.value)
    reasons["cache.num_blocks"] = "all that the job can use"
    return wanted
