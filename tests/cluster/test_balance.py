"""Makespan against its lower bound, max(total / replicas, longest row), with the real dispatcher, engines and scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from contbatch_cli.cluster.cluster_engine import ClusterEngine
from contbatch_cli.cluster.dispatcher import Dispatcher
from contbatch_cli.cluster.replica import Replica
from contbatch_cli.cluster.simulated_pool import SimulatedPool
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, SequenceResult
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.simulate import SimulatedClock


class Rows:
    """A file of rows."""

    is_live = False

    def __init__(self, requests: list[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self.is_exhausted = False

    def next_request(self, wait: bool) -> Request | None:
        request = next(self._requests, None)
        self.is_exhausted = request is None
        return request


class SecondsRunner:
    """Every step takes `step_s` whatever is in it, and gives each sequence a token."""

    def __init__(self, clock: SimulatedClock, step_s: float) -> None:
        self._clock = clock
        self._step_s = step_s

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self._clock.advance(self._step_s)
        return BatchResult([SequenceResult((7,) if one.samples else ()) for one in batch.sequences])


def makespan(requests: list[Request], order: str, replicas: int, seats: int, slow: float = 1.0) -> float:
    """Seconds until the last row is done. The last replica is slower than the others by the factor `slow`."""
    made = []
    for number in range(replicas):
        clock = SimulatedClock()
        runner = SecondsRunner(clock, slow if number == replicas - 1 else 1.0)
        scheduler = StallFreeScheduler(KVCacheManager(4096, 16, True), 1024, seats, standard_stop_rule)
        made.append((Replica(scheduler, runner, clock), clock))
    queue = JobQueue(Rows(requests), 65536)
    queue.look_ahead()
    queue.set_order(order)
    pool = SimulatedPool(made)
    engine = ClusterEngine(pool, Dispatcher(order, 16, 3), queue, 3, pytest.fail, lambda: 0.0)
    done = [request.request_id.row for report in engine.run() for request in report.finished]
    assert sorted(done) == list(range(len(requests)))
    assert all(request.num_output_tokens == request.sampling.max_tokens for request in requests)
    return max(clock() for _, clock in made)


def heavy_tailed(seed: int, rows: int, prefixes: int = 1) -> list[Request]:
    """Output lengths from a Pareto distribution with a mean of 3 times the least, cut at 60 times; prompts by group."""
    rng = random.Random(seed)
    lengths = [min(int(10 * rng.paretovariate(1.5)), 600) for _ in range(rows)]
    return [
        Request.from_prompt(
            RequestId(index), [index % prefixes] * 32 + [rng.randrange(1000)], replace(GREEDY, max_tokens=length, seed=index)
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("order", ["longest_first", "prefix"])
@pytest.mark.parametrize("seats", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_200_heavy_tailed_rows_over_4_replicas_are_balanced(order: str, seats: int, seed: int) -> None:
    requests = heavy_tailed(seed, 200, prefixes=10)
    lengths = [request.sampling.max_tokens for request in requests]
    bound = max(sum(lengths) / (4 * seats), max(lengths))
    took = makespan(requests, order, 4, seats)
    print(f"{order}, {seats} seats: {took:.0f} s, bound {bound:.0f} s")
    assert bound <= took <= 1.1 * bound


def test_a_slow_replica_gets_fewer_rows() -> None:
    """Speeds 1, 1, 1 and 1/3: the bound is the total over 3 1/3."""
    requests = heavy_tailed(11, 400, prefixes=10)
    total = sum(request.sampling.max_tokens for request in requests)
    assert makespan(requests, "prefix", 4, 1, slow=3.0) <= 1.1 * max(total / (3 + 1 / 3), 600)


def test_one_replica_takes_as_long_as_one_engine() -> None:
    requests = heavy_tailed(3, 50)
    total = sum(request.sampling.max_tokens for request in requests)
    assert makespan(requests, "input", 1, 1) == total
