"""The `auto` sizes: from device, memory and job, each with its reason."""

from __future__ import annotations

import pytest

from contbatch_cli.config import CacheConfig, SchedulerConfig
from contbatch_cli.core.job_order import Choice
from contbatch_cli.core.windowed_cache import window_span
from contbatch_cli.errors import UsageError
from contbatch_cli.sizing import (
    DeviceMemory,
    JobDemand,
    LayerWindows,
    Sizes,
    WindowShare,
    block_size_of,
    largest_step,
    most_blocks,
    resolve_sizes,
)

MANY = Choice("100000", "lots")


def sizes(
    scheduler: SchedulerConfig, rows: list[int], *, whole: bool = True, shares: bool = False, limit: Choice = MANY
) -> Sizes:
    return resolve_sizes(scheduler, 16, limit, "cpu", JobDemand(rows, whole, shares, 8192), is_limit_set=False)


def test_a_small_job_gets_a_seat_for_each_row_and_no_more_cache_than_it_can_use() -> None:
    found = sizes(SchedulerConfig(), [100, 17, 16])
    assert found.max_batch_size == 3
    assert found.num_blocks == 7 + 2 + 1
    assert found.reasons["cache.num_blocks"] == "all that the job can use"


def test_a_cache_for_the_seats_is_enough_where_nothing_is_shared_and_for_all_rows_where_it_is() -> None:
    rows = [32] * 1000
    seats = sizes(SchedulerConfig(max_batch_size=8), rows)
    assert seats.num_blocks == 8 * 2
    assert sizes(SchedulerConfig(max_batch_size=8), rows, shares=True).num_blocks == 1000 * 2


def test_unread_rows_may_be_as_long_as_the_context() -> None:
    assert sizes(SchedulerConfig(max_batch_size=2), [32] * 10, whole=False).num_blocks == 8192 // 16 + 2


def test_memory_bounds_the_cache_and_is_the_reason() -> None:
    found = sizes(SchedulerConfig(), [1000] * 60, limit=Choice("50", "2.00 GiB of 4.00 GiB free"))
    assert (found.num_blocks, found.reasons["cache.num_blocks"]) == (50, "2.00 GiB of 4.00 GiB free")


def test_a_budget_below_the_seats_lowers_them_and_says_so() -> None:
    found = sizes(SchedulerConfig(token_budget=4, max_batch_size=16), [10] * 20)
    assert found.token_budget == 4
    assert "lowers the seats from 16" in found.reasons["scheduler.token_budget"]


def test_most_blocks_by_fraction_size_and_number() -> None:
    memory = DeviceMemory("cpu", 1 << 30)
    assert most_blocks(CacheConfig(num_blocks=7), 1 << 20, memory).value == "7"
    assert most_blocks(CacheConfig(memory=0.25), 1 << 20, memory).value == "256"
    assert most_blocks(CacheConfig(memory="64MiB"), 1 << 20, memory).value == "64"
    assert most_blocks(CacheConfig(), 1 << 20, memory).value == "512"


def test_too_little_memory_is_said_with_numbers() -> None:
    with pytest.raises(UsageError, match="1,000,000 bytes hold no block|1,000,000 bytes.*hold no block.*1,048,576 bytes"):
        most_blocks(CacheConfig(memory="1MB"), 1 << 20, DeviceMemory("cpu", 1 << 30))


def test_block_size_is_the_backends_minimum_unless_set() -> None:
    assert block_size_of(CacheConfig()).value == "16"
    assert block_size_of(CacheConfig(), minimum=256).value == "256"
    assert block_size_of(CacheConfig(block_size=3), minimum=256).value == "3"


SOME, ALL = LayerWindows(100, frozenset({0, 2}), 4), LayerWindows(100, frozenset(range(4)), 4)


def windowed_sizes(windows: LayerWindows, rows: list[int], scheduler: SchedulerConfig, is_limit_set: bool = False) -> Sizes:
    return resolve_sizes(scheduler, 16, MANY, "cpu", JobDemand(rows, True, False, 8192), is_limit_set, windows)


def test_a_row_of_a_windowed_model_holds_no_more_than_window_and_budget() -> None:
    scheduler = SchedulerConfig(token_budget=64, max_batch_size=4)
    span = window_span(100, 64, 16)
    assert span == 12, "163 tokens lie in 12 blocks of 16 at most"
    assert windowed_sizes(ALL, [5000] * 9, scheduler).num_blocks == 4 * span
    assert windowed_sizes(ALL, [5000, 20], scheduler).num_blocks == span + 2
    assert windowed_sizes(ALL, [5000] * 9, scheduler).num_window_blocks == 0


def test_layers_with_a_window_have_a_pool_of_their_own_beside_the_others() -> None:
    scheduler = SchedulerConfig(token_budget=64, max_batch_size=4)
    found = windowed_sizes(SOME, [5000] * 9, scheduler)
    assert (found.num_blocks, found.num_window_blocks) == (4 * 313, 4 * 12)
    short = windowed_sizes(SOME, [32] * 9, scheduler)
    assert (short.num_blocks, short.num_window_blocks) == (8, 8)
    assert windowed_sizes(SOME, [32] * 9, scheduler, is_limit_set=True).num_window_blocks == 48


def test_memory_is_shared_between_the_pools() -> None:
    memory = DeviceMemory("cpu", 1 << 30)
    own = WindowShare(3 << 20, 100)
    assert most_blocks(CacheConfig(memory="100MiB"), 1 << 20, memory, own).value == "25"
    assert most_blocks(CacheConfig(memory="400MiB"), 1 << 20, memory, own).value == "100"
    assert most_blocks(CacheConfig(memory="500MiB"), 1 << 20, memory, own).value == "200"


@pytest.mark.parametrize("budget", ["auto", 4, 4000])
@pytest.mark.parametrize("seats", ["auto", 3, 700])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_job_has_a_larger_step_than_was_reckoned_with(kind: str, seats: int, budget: int) -> None:
    scheduler = SchedulerConfig(token_budget=budget, max_batch_size=seats)
    most_seats, most_tokens = largest_step(scheduler, kind)
    for rows in ([9], [9] * 50, [9] * 2000):
        found = resolve_sizes(scheduler, 16, MANY, kind, JobDemand(rows, True, False, 8192), False)
        assert min(found.max_batch_size, found.token_budget) <= most_seats and found.token_budget <= most_tokens
