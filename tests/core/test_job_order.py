"""The order of a job, its window, and duplicate rows."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from contbatch_cli.core.job_order import JobQueue, choose_order
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.engine import InferenceEngine, IterationReport
from tests.core.shadow import ShadowRunner, stop_rule


class ListSource:
    """Requests from a list; counts how many were read. A live one has only what `arrive` put there."""

    def __init__(self, requests: Iterable[Request], is_live: bool = False) -> None:
        self._requests: Iterator[Request] = iter(list(requests))
        self._next: Request | None = next(self._requests, None)
        self.is_live = is_live
        self.num_arrived = 0 if is_live else 10**9
        self.num_read = 0

    @property
    def is_exhausted(self) -> bool:
        return self._next is None

    def next_request(self, wait: bool) -> Request | None:
        if self._next is None or (self.num_read >= self.num_arrived and not wait):
            return None
        request, self._next = self._next, next(self._requests, None)
        self.num_read += 1
        return request


def make(row: int, prompt: list[int], **sampling: object) -> Request:
    return Request.from_prompt(RequestId(row), prompt, SamplingParams(**sampling))  # type: ignore[arg-type]


def run(requests: list[Request], order: str, kv: KVCacheManager, seats: int, window: int = 65536) -> list[IterationReport]:
    """All iterations of a job over a shadow runner."""
    queue = JobQueue(ListSource(requests), window)
    queue.set_order(order)
    scheduler = StallFreeScheduler(kv, 256, seats, stop_rule)
    runner = ShadowRunner(kv, {request.request_id: request for request in requests})
    return list(InferenceEngine(scheduler, runner, queue, lambda: 0.0).run())


def num_prompt_tokens_computed(reports: list[IterationReport]) -> int:
    return sum(
        max(min(sequence.end, sequence.num_prompt_tokens) - sequence.start, 0)
        for report in reports
        for sequence in report.batch.sequences
    )


def taken(queue: JobQueue) -> list[int]:
    rows = []
    while (request := queue.take(wait=True)) is not None:
        rows.append(request.request_id.row)
    return rows


def test_orders() -> None:
    rows = [([5, 1], 3), ([2, 2], 9), ([5], 9), ([2, 1], 1)]
    requests = [make(row, prompt, max_tokens=most) for row, (prompt, most) in enumerate(rows)]
    expected = {"input": [0, 1, 2, 3], "longest_first": [1, 2, 0, 3], "prefix": [3, 1, 2, 0]}
    for order, wanted in expected.items():
        queue = JobQueue(ListSource(requests), window=10)
        queue.set_order(order)
        assert taken(queue) == wanted


def test_each_row_is_taken_once_and_the_window_bounds_what_is_read_ahead() -> None:
    rng = random.Random(3)
    for order in ("input", "longest_first", "prefix"):
        requests = [make(row, [rng.randrange(3) for _ in range(5)], max_tokens=rng.randint(1, 50)) for row in range(300)]
        source = ListSource(requests)
        queue = JobQueue(source, window=16, merges_duplicates=False)
        queue.set_order(order)
        rows = []
        while (request := queue.take(wait=True)) is not None:
            rows.append(request.request_id.row)
            assert source.num_read - len(rows) <= (16 if order != "input" else 0)
        assert sorted(rows) == list(range(300))


def test_the_window_is_bounded_in_bytes_too() -> None:
    source = ListSource([make(row, [row] * 1000, max_tokens=1) for row in range(100)])
    queue = JobQueue(source, window=65536, window_bytes=100_000)
    assert 5 < len(queue.look_ahead()) < 20
    assert source.num_read < 20


def test_a_pipe_gives_what_is_there_and_is_waited_for_only_when_asked() -> None:
    source = ListSource([make(row, [row], max_tokens=1) for row in range(4)], is_live=True)
    queue = JobQueue(source, window=100)
    queue.set_order("longest_first")
    source.num_arrived = 2
    assert queue.take(wait=False) is not None and queue.take(wait=False) is not None
    assert queue.take(wait=False) is None
    assert queue.take(wait=True) is not None
    assert source.num_read == 3


def test_duplicates_run_once_and_follow() -> None:
    greedy = [make(row, [1, 2], max_tokens=4) for row in range(3)]
    seeded = [make(row, [1, 2], max_tokens=4, temperature=1.0, seed=7) for row in range(3, 5)]
    unseeded = [make(row, [1, 2], max_tokens=4, temperature=1.0, seed=row) for row in range(5, 7)]
    requests = [*greedy, *seeded, *unseeded]
    reports = run(requests, "input", KVCacheManager(100, 4), seats=8)
    ran = [request.request_id.row for report in reports for request in report.finished]
    followed = [request.request_id.row for report in reports for request in report.duplicates]
    assert sorted(ran) == [0, 3, 5, 6]
    assert sorted(followed) == [1, 2, 4]
    assert {tuple(request.output_ids) for request in requests} == {tuple(greedy[0].output_ids)}
    assert all(request.is_complete for request in requests)


def test_samples_of_one_row_are_duplicates_only_when_greedy() -> None:
    def samples(temperature: float) -> list[Request]:
        params = SamplingParams(max_tokens=2, temperature=temperature, seed=1)
        return [Request.from_prompt(RequestId(0, sample), [1, 2], params) for sample in range(3)]

    for temperature, num_run in ((0.0, 1), (1.0, 3)):
        queue = JobQueue(ListSource(samples(temperature)), window=10)
        assert len(taken(queue)) == num_run


def test_auto_chooses_by_what_the_rows_are() -> None:
    rng = random.Random(0)

    def rows(prefix: list[int], max_tokens: list[int]) -> list[Request]:
        return [
            make(row, [*prefix, *(rng.randrange(1000) for _ in range(30))], max_tokens=most)
            for row, most in enumerate(max_tokens)
        ]

    assert choose_order(rows(list(range(64)), [10] * 20), 16, 4).value == "prefix"
    assert choose_order(rows([], [10] * 19 + [500]), 16, 4).value == "longest_first"
    assert choose_order(rows([], [10] * 19 + [500]), 16, 64).value == "input"
    assert choose_order(rows([], [10] * 20), 16, 4).value == "input"


def grouped_rows(seed: int = 0) -> list[Request]:
    """40 groups of 5 rows that share 96 tokens, shuffled; each row has 8 tokens of its own and 4 of output."""
    rng = random.Random(seed)
    stems = [[group, *(rng.randrange(1000) for _ in range(95))] for group in range(40)]
    prompts = [[*stem, *(rng.randrange(1000) for _ in range(8))] for stem in stems for _ in range(5)]
    rng.shuffle(prompts)
    return [make(row, prompt, max_tokens=4, ignore_eos=True) for row, prompt in enumerate(prompts)]


def test_prefix_order_computes_each_prefix_about_once_with_a_tenth_of_the_cache() -> None:
    num_blocks = 200 * 108 // 16 // 10
    least = 40 * 96 + 200 * 8
    computed = {
        order: num_prompt_tokens_computed(run(grouped_rows(), order, KVCacheManager(num_blocks, 16), seats=16))
        for order in ("prefix", "input")
    }
    print(f"prompt tokens computed, of {least:,} needed at least: {computed}")
    assert computed["prefix"] <= 1.05 * least
    assert computed["input"] > 1.5 * least


@pytest.mark.parametrize("is_known", [True, False])
def test_longest_first_shortens_the_tail_where_lengths_are_known_and_costs_little_elsewhere(is_known: bool) -> None:
    def job() -> list[Request]:
        rng = random.Random(5)
        lengths = [rng.randint(5, 30) for _ in range(190)] + [rng.randint(250, 300) for _ in range(6)]
        return [
            make(row, [row, 1, 2], max_tokens=most if is_known else 300, ignore_eos=is_known, eos_token_ids=(7,))
            for row, most in enumerate(lengths)
        ]

    iterations = {order: len(run(job(), order, KVCacheManager(2000, 16), seats=16)) for order in ("input", "longest_first")}
    print(f"iterations, lengths {'known' if is_known else 'unknown'}: {iterations}")
    assert iterations["longest_first"] <= (0.75 if is_known else 1.02) * iterations["input"]
