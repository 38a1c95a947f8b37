"""What crosses the border between replicas and the process that dispatches, and the lines that are shown of it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

from contbatch_cli.cli.replica_lines import live_lines
from contbatch_cli.cluster.cluster_engine import ClusterEngine, Event, Joined, Lost, ReplicaState
from contbatch_cli.cluster.dispatcher import Dispatcher
from contbatch_cli.cluster.replica import IterationDigest, Replica, outlined_batch, packed_runs
from contbatch_cli.core.batch import BatchResult, Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, FinishReason, Request, RequestId
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.errors import EngineError
from tests.cluster.test_balance import Rows


class Recorded:
    """Gives each sequence a token and keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self.batches.append(batch)
        return BatchResult([SequenceResult((7,) if one.samples else ()) for one in batch.sequences])


def row(index: int, prompt: int = 20, tokens: int = 5) -> Request:
    return Request.from_prompt(
        RequestId(index, index % 2), list(range(index, index + prompt)), replace(GREEDY, max_tokens=tokens)
    )


def replica(runner: Recorded, seats: int = 4, forgotten: list[RequestId] | None = None) -> Replica:
    scheduler = StallFreeScheduler(KVCacheManager(64, 16, True), 32, seats, standard_stop_rule)
    return Replica(scheduler, runner, lambda: 0.0, (forgotten if forgotten is not None else []).append)


def test_digests_tell_the_iterations_that_were_run() -> None:
    runner, forgotten = Recorded(), list[RequestId]()
    made = replica(runner, forgotten=forgotten)
    requests = pickle.loads(pickle.dumps([row(index, 10 + index, 3 + index) for index in range(6)]))
    digests = pickle.loads(pickle.dumps(made.step(requests[:3], 1.0, False) + made.step(requests[3:], 1.0, False)))
    while more := made.step([], 1.0, False):
        digests += more
    assert len(digests) == len(runner.batches)
    for digest, batch in zip(digests, runner.batches, strict=True):
        outline, accepted = outlined_batch(digest)
        assert accepted == {}
        assert outline.num_tokens == batch.num_tokens
        assert [(one.request_id, one.start, one.end, one.is_decode, one.samples) for one in outline.sequences] == [
            (one.request_id, one.start, one.end, one.is_decode, one.samples) for one in batch.sequences
        ]
    outcomes = [outcome for digest in digests for outcome in digest.finished]
    assert sorted(outcome.request_id for outcome in outcomes) == sorted(row(index).request_id for index in range(6))
    assert sorted(forgotten) == sorted(outcome.request_id for outcome in outcomes)
    mine = row(4, 14, 7)
    next(outcome for outcome in outcomes if outcome.request_id == mine.request_id).fill_in(mine)
    assert (mine.output_ids, mine.prompt_ids) == ([7] * 7, list(range(4, 18)))
    assert mine.finish is not None and mine.finish.reason is FinishReason.LENGTH


def test_digests_tell_of_drafts() -> None:
    sequence = ScheduledSequence(RequestId(3, 1), (5, 6, 7), 10, (0,), 4, GREEDY, True, Logits.ALL, num_drafts=2)
    digest = IterationDigest(packed_runs([sequence], {RequestId(3, 1): 1}), 3, (), (), 1, 0, 1, 8, 32, 0.0, 0.1)
    outline, accepted = outlined_batch(pickle.loads(pickle.dumps(digest)))
    assert accepted == {RequestId(3, 1): 1} and outline.num_drafts == 2
    (run,) = outline.sequences
    assert (run.is_decode, run.num_drafts, run.num_known, run.end) == (True, 2, 11, 13)


def test_a_stretch_ends_where_a_seat_becomes_free_and_is_short_where_more_rows_wait() -> None:
    made = replica(Recorded())
    assert len(made.step([row(0, tokens=4), row(1, tokens=9)], 1.0, False)) == 4
    assert len(made.step([], 1.0, True)) == 1
    assert len(made.step([row(index, tokens=50) for index in range(2, 5)], 1.0, True)) > 1


class Doomed:
    """A pool whose only replica is lost as soon as it has joined."""

    num_starting = 1
    num_expected = 0

    def __init__(self) -> None:
        self._events: list[Event] = [Joined(0, 4), Lost(0, "Gone: its machine burned")]

    def step(self, replica: int, requests: Sequence[Request], limit_s: float, is_more: bool) -> None:
        """Nothing comes of it."""

    def wait(self) -> Sequence[Event]:
        self.num_starting = 0
        return [self._events.pop(0)]


def test_without_a_replica_the_run_fails_and_says_why() -> None:
    said: list[str] = []
    queue = JobQueue(Rows([row(index) for index in range(9)]), 100)
    engine = ClusterEngine(Doomed(), Dispatcher("input", 16, 3), queue, 3, said.append, lambda: 0.0)
    with pytest.raises(EngineError, match="no replica is left: Gone: its machine burned"):
        list(engine.run())
    assert said == ["replica 0 was lost: Gone: its machine burned; 4 rows to run again"]


def test_live_lines_name_each_replica() -> None:
    states = [ReplicaState(0, 4, 1, 3, 2, 10, 64, 1200, 5000), ReplicaState(1, 0, rows_done=7)]
    states[0].recent.extend([(1.0, 30), (1.5, 40), (2.0, 60)])
    assert live_lines(states) == [
        "replica 0: 1,200 rows done, 100 tokens/s, 3 running, 2 waiting, 10/64 blocks",
        "replica 1: lost, 7 rows done",
    ]
    assert live_lines([states[0]] * 10)[-1] == "and 2 more replicas"
