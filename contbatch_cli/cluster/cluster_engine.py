"""The engine of a job that replicas share: to whoever consumes its reports it is an InferenceEngine.

One loop: rows to the dispatcher, rows to the replicas that have room, and what comes back into reports. Two stretches of work
are in flight for each replica, so that one is there to begin when the other ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, Protocol

from contbatch_cli.cluster.dispatcher import Dispatcher
from contbatch_cli.cluster.replica import IterationDigest, lost_outcome, outlined_batch
from contbatch_cli.core.batch import ScheduledBatch
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.request import Request
from contbatch_cli.engine import Clock, IterationReport
from contbatch_cli.errors import EngineError
from contbatch_cli.units import counted

STRETCH_S = 0.1
"""How long a replica runs before it reports."""
IN_FLIGHT = 2
RECENT_ITERATIONS = 200
NOTHING = ScheduledBatch((), 0)


class Joined(NamedTuple):
    """A replica is ready for rows."""

    replica: int
    seats: int


class Stepped(NamedTuple):
    """A replica ran a stretch; reports of one replica come in the order in which they were asked for."""

    replica: int
    digests: Sequence[IterationDigest]


class Lost(NamedTuple):
    """A replica is gone, whether it had joined or not; another may join in its place."""

    replica: int
    reason: str


Event = Joined | Stepped | Lost


class ReplicaPool(Protocol):
    """The replicas, wherever they are."""

    @property
    def num_starting(self) -> int:
        """How many replicas may still join."""
        ...

    @property
    def num_expected(self) -> int:
        """For how many of them rows are to be kept."""
        ...

    def step(self, replica: int, requests: Sequence[Request], limit_s: float, is_more: bool) -> None:
        """Ask a replica for a stretch, as `Replica.step`; returns at once."""
        ...

    def wait(self) -> Sequence[Event]:
        """What happened since; waits a while for something to happen."""
        ...


@dataclass(slots=True)
class ReplicaState:
    """What the latest reports of a replica say. `output_tokens` and `rows_done` count from the run's beginning.

    A row counts with its first sample: its others may run elsewhere.
    """

    replica: int
    seats: int
    num_in_flight: int = 0
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    num_blocks: int = 0
    rows_done: int = 0
    output_tokens: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_ITERATIONS))
    """When its last iterations ended, and how many tokens each gave."""

    @property
    def recent_tokens_per_s(self) -> float:
        span_s = self.recent[-1][0] - self.recent[0][0] if self.recent else 0.0
        return sum(tokens for _, tokens in list(self.recent)[1:]) / span_s if span_s > 0 else 0.0

    @property
    def is_lost(self) -> bool:
        return self.seats == 0


class ClusterEngine:
    """Runs the requests of a queue to their ends on the replicas of a pool. Stop by not asking for the next report.

    `say` takes messages for people. `max_attempts` is the dispatcher's.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        queue: JobQueue,
        max_attempts: int,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._queue = queue
        self._max_attempts = max_attempts
        self._say = say
        self._clock = clock
        self._began_s = 0.0
        self._iterations = count()
        self._last_reason = "none has started"
        self.replicas: dict[int, ReplicaState] = {}

    def run(self) -> Iterator[IterationReport]:
        """Reports as they come in, until the queue is at its end and every request has finished.

        Raises EngineError when no replica is left.
        """
        self._began_s = self._clock()
        while True:
            self._take_rows()
            if not self._dispatcher.num_undispatched and not self._dispatcher.num_sent and self._is_at_end():
                return
            if not self._dispatcher.replicas and not self._pool.num_starting:
                raise EngineError(f"no replica is left: {self._last_reason}")
            self._submit()
            for event in self._pool.wait():
                yield from self._take(event)

    # Rows out

    def _take_rows(self) -> None:
        for _ in range(self._dispatcher.num_wanted):
            request = self._queue.take(wait=False)
            if request is None:
                return
            self._dispatcher.add(request)

    def _is_at_end(self) -> bool:
        """With nothing at hand and nothing running: whether no row is to come. Waits for a row where rows come in time."""
        request = self._queue.take(wait=True)
        if request is not None:
            self._dispatcher.add(request)
        return request is None

    def _submit(self) -> None:
        """Rows to the replicas that can be asked for a stretch, then a stretch of each that has rows to run."""
        dispatcher = self._dispatcher
        dispatcher.num_starting = self._pool.num_expected
        ready = [replica for replica in dispatcher.replicas if self.replicas[replica].num_in_flight < IN_FLIGHT]
        rows = {replica: requests for replica, requests in dispatcher.assign(ready)}
        is_more = dispatcher.num_undispatched > 0
        for replica in ready:
            if dispatcher.num_sent_to(replica):
                self._ask(replica, rows.get(replica, []), is_more)

    def _ask(self, replica: int, requests: list[Request], is_more: bool) -> None:
        """A stretch with new rows, and empty ones behind it as far as they may be in flight."""
        state = self.replicas[replica]
        while state.num_in_flight < IN_FLIGHT:
            self._pool.step(replica, requests, STRETCH_S, is_more)
            state.num_in_flight += 1
            requests = []

    # Reports in

    def _take(self, event: Event) -> Iterator[IterationReport]:
        if isinstance(event, Joined):
            self._set_state(event.replica, event.seats)
            self._dispatcher.join(event.replica, event.seats)
        elif isinstance(event, Lost):
            yield from self._lose(event)
        elif event.replica in self._dispatcher.replicas:
            self.replicas[event.replica].num_in_flight -= 1
            for digest in event.digests:
                yield self._report(event.replica, digest)

    def _report(self, replica: int, digest: IterationDigest) -> IterationReport:
        """A digest as a report: its own batch and times; what runs, waits and is cached, of all replicas together."""
        state = self.replicas[replica]
        state.num_running, state.num_waiting = digest.num_running, digest.num_waiting
        state.blocks_used, state.num_blocks = digest.blocks_used, digest.num_blocks
        batch, accepted = outlined_batch(digest)
        num_tokens = sum(sequence.samples for sequence in batch.sequences) + sum(accepted.values())
        state.output_tokens += num_tokens
        state.recent.append((digest.start_s + digest.elapsed_s, num_tokens))
        finished = []
        for outcome in digest.finished:
            request = self._dispatcher.finish(replica, outcome.request_id)
            if request is not None:
                outcome.fill_in(request)
                finished.append(request)
        state.rows_done += sum(request.request_id.sample == 0 for request in finished)
        start_s = digest.start_s - self._began_s
        report = self._summed_report(replica, batch, finished, digest.token_budget, start_s, digest.elapsed_s)
        return replace(report, accepted_drafts=accepted)

    def _lose(self, event: Lost) -> Iterator[IterationReport]:
        self._last_reason = event.reason
        replica = event.replica
        if replica not in self._dispatcher.replicas:
            self._say(f"replica {replica} could not start: {event.reason}")
            return
        num_sent = self._dispatcher.num_sent_to(replica)
        given_up = self._dispatcher.leave(replica)
        self._set_state(replica, 0)
        fate = f", {len(given_up)} given up" if given_up else ""
        self._say(f"replica {replica} was lost: {event.reason}; {counted(num_sent - len(given_up), 'row')} to run again{fate}")
        for request in given_up:
            lost_outcome(request, self._max_attempts).fill_in(request)
        if given_up:
            yield self._summed_report(replica, NOTHING, given_up, 0, self._clock() - self._began_s, 0.0)

    def _set_state(self, replica: int, seats: int) -> None:
        """A replica begins anew, or is gone with no seats; what it has done stays counted."""
        before = self.replicas.get(replica, ReplicaState(replica, 0))
        self.replicas[replica] = ReplicaState(replica, seats, rows_done=before.rows_done, output_tokens=before.output_tokens)

    def _summed_report(
        self, replica: int, batch: ScheduledBatch, finished: list[Request], token_budget: int, start_s: float, elapsed_s: float
    ) -> IterationReport:
        states = self.replicas.values()
        waiting = sum(state.num_waiting for state in states) + self._dispatcher.num_undispatched + len(self._queue)
        return IterationReport(
            iteration=next(self._iterations),
            batch=batch,
            finished=tuple(finished),
            duplicates=tuple(follower for request in finished for follower in self._queue.finish(request)),
            num_running=sum(state.num_running for state in states),
            num_waiting=waiting,
            blocks_used=sum(state.blocks_used for state in states),
            num_blocks=sum(state.num_blocks for state in states),
            token_budget=token_budget,
            start_s=start_s,
            elapsed_s=elapsed_s,
            replica=replica,
        )
