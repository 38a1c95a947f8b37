"""The loop: schedule -> execute -> update, one iteration at a time. A generator; whoever consumes it sees every iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from contbatch_cli.core.batch import BatchResult, ScheduledBatch
from contbatch_cli.core.drafts import accepted_drafts
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.request import Request, RequestId
from contbatch_cli.core.scheduler import StallFreeScheduler


class Runner(Protocol):
    """Executes a plan. Holds nothing that a plan cannot rebuild."""

    def execute(self, batch: ScheduledBatch) -> BatchResult: ...


class Clock(Protocol):
    """Seconds since any fixed moment, monotonic."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Everything that a table, a trace or a metric ever sees of one iteration. Times in seconds since the run began.

    `finished` ran to their end in this iteration; `duplicates` are equal rows that took their results.
    """

    iteration: int
    batch: ScheduledBatch
    finished: tuple[Request, ...]
    duplicates: tuple[Request, ...]
    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    token_budget: int
    start_s: float
    elapsed_s: float
    replica: int | None = None
    """Which of several engines ran it; counts then are those of all of them together. None where there is one."""
    accepted_drafts: Mapping[RequestId, int] = field(default_factory=dict)
    """Of the requests that had drafts, how many of these became tokens."""


class Engine(Protocol):
    """What runs a job to its end, iteration by iteration."""

    def run(self) -> Iterator[IterationReport]: ...


class InferenceEngine:
    """Runs the requests of a queue to their ends. Stop by not asking for the next report."""

    def __init__(self, scheduler: StallFreeScheduler, runner: Runner, queue: JobQueue, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._queue = queue
        self._clock = clock

    def run(self) -> Iterator[IterationReport]:
        """One report an iteration, until the queue is at its end and every request has finished.

        Whatever the runner raises is raised here, after the scheduler has put the step's requests back.
        """
        began_s = self._clock()
        for iteration in count():
            self._top_up()
            if not self._scheduler.has_work():
                return
            yield self._iterate(iteration, began_s)

    def _top_up(self) -> None:
        """Offer the scheduler as many requests as it has seats free; wait for a row only when there is nothing else to do."""
        scheduler = self._scheduler
        for _ in range(scheduler.seats - len(scheduler.waiting) - len(scheduler.running)):
            request = self._queue.take(wait=not scheduler.has_work())
            if request is None:
                return
            scheduler.add_request(request)

    def _iterate(self, iteration: int, began_s: float) -> IterationReport:
        scheduler = self._scheduler
        start_s = self._clock() - began_s
        batch = scheduler.schedule_next_batch()
        num_running = len(scheduler.running)
        blocks_used = scheduler.kv.blocks_used
        result = self._execute(batch)
        finished = scheduler.update(batch, result)
        return IterationReport(
            iteration=iteration,
            batch=batch,
            finished=tuple(finished),
            duplicates=tuple(follower for request in finished for follower in self._queue.finish(request)),
            num_running=num_running,
            num_waiting=len(scheduler.waiting) + len(self._queue),
            blocks_used=blocks_used,
            num_blocks=scheduler.kv.num_blocks,
            token_budget=scheduler.token_budget,
            start_s=start_s,
            elapsed_s=self._clock() - began_s - start_s,
            accepted_drafts=accepted_drafts(batch, result, finished),
        )

    def _execute(self, batch: ScheduledBatch) -> BatchResult:
        try:
            return self._runner.execute(batch)
        except BaseException:
            self._scheduler.abort(batch)
            raise
