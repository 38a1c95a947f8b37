"""Admission by expected output length: few tokens recomputed, few iterations lost, on jobs whose lengths are not known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from contbatch_cli.core.batch import BatchResult, SequenceResult
from contbatch_cli.core.forecast import Demand, OutputLengths, peak_tokens
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler

Row = tuple[int, int, int]
"""Prompt tokens, output tokens, max_tokens."""


def short(rng: random.Random) -> Row:
    return rng.randint(50, 150), rng.randint(10, 40), 64


def heavy_tailed(rng: random.Random) -> Row:
    return rng.randint(50, 150), min(1024, int(rng.paretovariate(1.1) * 20)), 1024


def overstated(rng: random.Random) -> Row:
    return rng.randint(50, 150), rng.randint(60, 140), 1000


class NoReservation(OutputLengths):
    def remaining(self, request: Request) -> int:
        return -(10**9)


class FullReservation(OutputLengths):
    def remaining(self, request: Request) -> int:
        return 10**9


def run(job: list[Row], lengths: OutputLengths) -> tuple[int, float]:
    """Iterations, and the part of the computed tokens that were recomputed, with a cache of an eighth of the job."""
    block_size = 16
    largest = max(-(-(prompt + most) // block_size) for prompt, _, most in job)
    kv = KVCacheManager(max(sum(prompt + output for prompt, output, _ in job) // 8 // block_size, largest), block_size)
    ends = {RequestId(row): output for row, (_, output, _) in enumerate(job)}

    def stop_rule(request: Request) -> Finish | None:
        return Finish(FinishReason.STOP) if request.num_output_tokens >= ends[request.request_id] else None

    scheduler = StallFreeScheduler(kv, 512, 256, stop_rule)
    scheduler.lengths = lengths
    requests = []
    for row, (prompt, _, most) in enumerate(job):
        params = SamplingParams(max_tokens=most, eos_token_ids=(0,))
        requests.append(Request.from_prompt(RequestId(row), [row + 1, *range(prompt - 1)], params))
        scheduler.add_request(requests[-1])
    iterations = num_computed = 0
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        results = [SequenceResult((9,)) if sequence.samples else SequenceResult() for sequence in batch.sequences]
        scheduler.update(batch, BatchResult(results))
        iterations += 1
        num_computed += batch.num_tokens
    return iterations, sum(request.num_recomputed_tokens for request in requests) / num_computed


@pytest.mark.parametrize("draw", [short, heavy_tailed, overstated])
def test_learned_reservation_is_near_the_better_extreme(draw: Callable[[random.Random], Row]) -> None:
    rng = random.Random(draw.__name__)
    job = [draw(rng) for _ in range(300)]
    iterations, recomputed = run(job, OutputLengths())
    best = min(run(job, NoReservation())[0], run(job, FullReservation())[0])
    print(
        f"{draw.__name__}: {iterations} iterations, {iterations / best:.3f} of the better extreme, {recomputed:.1%} recomputed"
    )
    assert recomputed <= 0.05
    assert iterations <= 1.10 * best


def test_the_peak_lies_before_one_of_the_ends() -> None:
    assert peak_tokens([Demand(10, 5)], 0) == 15
    assert peak_tokens([Demand(10, 5), Demand(2, 20)], 0) == max(15, 25 + 2 * 2)
    rng = random.Random(1)
    for _ in range(200):
        demands = [Demand(rng.randint(1, 30), rng.randint(0, 50)) for _ in range(rng.randint(1, 8))]
        by_step = [sum(own + step for remaining, own in demands if remaining >= step) for step in range(1, 31)]
        assert peak_tokens(demands, 0) == max(by_step)


def test_a_length_is_certain_where_only_max_tokens_ends_the_row_and_learned_elsewhere() -> None:
    lengths = OutputLengths()
    certain = Request.from_prompt(RequestId(0), [1], SamplingParams(max_tokens=100, ignore_eos=True))
    open_ended = Request.from_prompt(RequestId(1), [1], SamplingParams(max_tokens=1000))
    for length in range(20, 41):
        lengths.observe(length)
    assert lengths.remaining(certain) == 100
    assert 20 <= lengths.remaining(open_ended) <= 40
    open_ended.token_ids.extend([1] * 39)
    assert lengths.remaining(open_ended) == 1
    open_ended.token_ids.extend([1] * 111)
    assert lengths.remaining(open_ended) == 150
