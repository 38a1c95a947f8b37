"""Which rows go to which replica: pure bookkeeping, the same in a run on Ray and in a rehearsal.

Rows go out a few at a time, as a replica has room for them, so nothing is decided earlier than it must be. In a job ordered by
prefix a replica is planned a run of neighbours, which share one, and is given it bit by bit; what it was not given yet may be
taken over by a replica that has run out of work (work stealing: Blumofe and Leiserson, 1999). Runs shrink with the work that
is left (guided self-scheduling: Polychronopoulos and Kuck, 1987) and rows far longer than the mean start first (LPT: Graham, 1969).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from contbatch_cli.core.job_order import common_prefix
from contbatch_cli.core.request import Request, RequestId

RUNS_PER_REPLICA = 2
"""Into how many runs for each replica the rows at hand are cut."""
SHELF_ROWS = 4096
SHELF_ROWS_PER_SEAT = 8
"""How many rows are held for choosing from, at least, in a job ordered by prefix."""
SPARE_SEATS_SHARE = 4
"""A replica holds one row in so many more than it has seats, so that a seat that becomes free is taken at once."""
TOKENS_PER_STEP = 16
"""So many prompt tokens are as much work as one generated token: a prompt is computed in large pieces."""
HEAVY_TIMES_MEAN = 2
HEAVY_SHARE = 20
"""A row is heavy when it is twice as long as the mean and more than a twentieth of a seat's share of the work."""


class Assignment(NamedTuple):
    """Rows for a replica, in the order in which it should start them."""

    replica: int
    requests: list[Request]


@dataclass(slots=True)
class _Lane:
    """What one replica has: `sent` rows that are not finished, and a run of rows `planned` for it."""

    seats: int
    sent: dict[RequestId, Request] = field(default_factory=dict)
    planned: deque[Request] = field(default_factory=deque)
    sent_work: int = 0
    suspect: RequestId | None = None

    @property
    def load(self) -> float:
        return self.sent_work / self.seats

    def send(self, request: Request) -> None:
        self.sent[request.request_id] = request
        self.sent_work += work_of(request)


def work_of(request: Request) -> int:
    """The expected work of a row, in prompt tokens."""
    return TOKENS_PER_STEP * request.sampling.max_tokens + request.num_prompt_tokens


class Dispatcher:
    """Holds the rows at hand, gives them out to replicas, and knows who has which.

    `order` is the job order: rows must be added in it. A row that was lost with its replica `max_attempts` times is given up.
    On its last attempt a row shares its replica with no other such row, so that one that kills what runs it takes no others
    along.
    """

    def __init__(self, order: str, block_size: int, max_attempts: int) -> None:
        self._has_runs = order == "prefix"
        self._block_size = block_size
        self._max_attempts = max_attempts
        self._lanes: dict[int, _Lane] = {}
        self._shelf: deque[Request] = deque()
        self._shelf_work = 0
        self._heavy: list[tuple[int, int, Request]] = []
        self._retries: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        self._attempts: dict[RequestId, int] = {}
        self._arrivals = count()
        self._is_sorted_out = True
        self.num_starting = 0
        """Replicas that are expected to join; part of the rows is kept for them."""

    # What can be asked

    @property
    def num_undispatched(self) -> int:
        """Rows at hand that no replica was given."""
        planned = sum(len(lane.planned) for lane in self._lanes.values())
        return len(self._shelf) + len(self._heavy) + len(self._retries) + len(self._suspects) + planned

    @property
    def num_sent(self) -> int:
        """Rows that replicas have."""
        return sum(len(lane.sent) for lane in self._lanes.values())

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self._lanes)

    def num_sent_to(self, replica: int) -> int:
        return len(self._lanes[replica].sent)

    @property
    def num_wanted(self) -> int:
        """How many more rows should be at hand: none until an eighth of them has gone out."""
        capacity = sum(lane.seats + lane.seats // SPARE_SEATS_SHARE for lane in self._lanes.values())
        if self._has_runs and capacity:
            capacity = max(SHELF_ROWS, SHELF_ROWS_PER_SEAT * capacity)
        at_hand = self.num_undispatched
        return capacity - at_hand if at_hand <= capacity * 7 // 8 else 0

    # What moves it on

    def join(self, replica: int, seats: int) -> None:
        """A replica is ready; it runs at most `seats` rows at once."""
        assert replica not in self._lanes, f"replica {replica} has joined already"
        self._lanes[replica] = _Lane(seats)

    def leave(self, replica: int) -> list[Request]:
        """A replica is lost. What it was given runs elsewhere, but for the rows that are returned: they are given up."""
        lane = self._lanes.pop(replica)
        for request in reversed(lane.planned):
            self._shelf.appendleft(request)
            self._shelf_work += work_of(request)
        return [request for request in lane.sent.values() if not self._try_again(request)]

    def add(self, request: Request) -> None:
        """A row is at hand."""
        self._shelf.append(request)
        self._shelf_work += work_of(request)
        self._is_sorted_out = False

    def finish(self, replica: int, request_id: RequestId) -> Request | None:
        """A replica's row is done; None for one that it does not have (any more)."""
        lane = self._lanes.get(replica)
        request = lane.sent.pop(request_id, None) if lane is not None else None
        if lane is None or request is None:
            return None
        lane.sent_work -= work_of(request)
        self._attempts.pop(request_id, None)
        if lane.suspect == request_id:
            lane.suspect = None
        return request

    def assign(self, ready: Iterable[int]) -> list[Assignment]:
        """Rows for the replicas among `ready` that have room, the one with the least work first at each row."""
        if self._has_runs and not self._is_sorted_out:
            self._sort_out_heavy()
        assigned: dict[int, list[Request]] = {}
        heap = [(self._lanes[replica].load, replica) for replica in ready]
        heapq.heapify(heap)
        left = self.num_undispatched
        while heap and left:
            _, replica = heapq.heappop(heap)
            lane = self._lanes[replica]
            request = self._next_for(lane) if len(lane.sent) < self._most_sent(lane, left) else None
            if request is not None:
                left -= 1
                lane.send(request)
                assigned.setdefault(replica, []).append(request)
                heapq.heappush(heap, (lane.load, replica))
        return [Assignment(replica, requests) for replica, requests in assigned.items()]

    def _most_sent(self, lane: _Lane, left: int) -> int:
        """How many rows a replica may hold: its seats and some to spare, fewer toward the end and while others still start."""
        num_lanes = len(self._lanes)
        most = lane.seats + min(lane.seats // SPARE_SEATS_SHARE, left // (2 * num_lanes))
        if not self.num_starting:
            return most
        return min(most, -(-(left + self.num_sent) // (num_lanes + self.num_starting)))

    def _next_for(self, lane: _Lane) -> Request | None:
        """The next row for a replica; None when there is none that it may have."""
        if self._suspects and lane.suspect is None:
            request = self._suspects.popleft()
            lane.suspect = request.request_id
            return request
        if self._retries:
            return self._retries.popleft()
        if self._heavy:
            return heapq.heappop(self._heavy)[2]
        if not self._has_runs:
            return self._from_shelf() if self._shelf else None
        if not lane.planned:
            lane.planned.extend(self._cut_run() if self._shelf else self._steal())
        return lane.planned.popleft() if lane.planned else None

    def _try_again(self, request: Request) -> bool:
        """Count a lost attempt; False when it was the last."""
        attempts = self._attempts.get(request.request_id, 0) + 1
        if attempts >= self._max_attempts:
            self._attempts.pop(request.request_id, None)
            return False
        self._attempts[request.request_id] = attempts
        (self._suspects if attempts == self._max_attempts - 1 else self._retries).append(request)
        return True

    # Runs

    def _from_shelf(self) -> Request:
        request = self._shelf.popleft()
        self._shelf_work -= work_of(request)
        return request

    def _sort_out_heavy(self) -> None:
        """Take the rows that are far longer than the mean out of their runs: they go first, the longest of them before all."""
        self._is_sorted_out = True
        num_seats = sum(lane.seats for lane in self._lanes.values())
        if not self._shelf or not num_seats:
            return
        mean = self._shelf_work / len(self._shelf)
        limit = max(HEAVY_TIMES_MEAN * mean, self._shelf_work / (num_seats * HEAVY_SHARE))
        heavy = [request for request in self._shelf if work_of(request) > limit]
        if heavy:
            self._shelf = deque(request for request in self._shelf if work_of(request) <= limit)
        for request in heavy:
            self._shelf_work -= work_of(request)
            heapq.heappush(self._heavy, (-work_of(request), next(self._arrivals), request))

    def _cut_run(self) -> list[Request]:
        """The next run, cut where its neighbours share least; the longest rows first."""
        target = self._shelf_work / ((len(self._lanes) + self.num_starting) * RUNS_PER_REPLICA)
        run: list[Request] = []
        work = 0
        earliest = 1
        while self._shelf and (not run or work < target):
            if work < target / 2:
                earliest = len(run) + 1
            request = self._from_shelf()
            work += work_of(request)
            run.append(request)
        cut = self._weakest_link(run, earliest) if self._shelf else len(run)
        for request in reversed(run[cut:]):
            self._shelf.appendleft(request)
            self._shelf_work += work_of(request)
        return sorted(run[:cut], key=work_of, reverse=True)

    def _weakest_link(self, run: list[Request], earliest: int) -> int:
        """The position from `earliest` on at which the next row shares the fewest blocks with the one before; the last such."""
        following = [*run[1:], self._shelf[0]]
        links = [
            (common_prefix(run[cut - 1].token_ids, following[cut - 1].token_ids) // self._block_size, -cut)
            for cut in range(earliest, len(run) + 1)
        ]
        return -min(links)[1]

    def _steal(self) -> list[Request]:
        """The later half, in the order of prefixes, of what is planned for the replica that has most planned."""
        victim = max((lane.planned for lane in self._lanes.values()), key=lambda planned: sum(map(work_of, planned)))
        half = sum(map(work_of, victim)) / 2
        stolen: list[Request] = []
        work = 0
        for request in sorted(victim, key=lambda request: request.token_ids, reverse=True):
            if stolen and work + work_of(request) > half:
                break
            stolen.append(request)
            work += work_of(request)
        taken = {request.request_id for request in stolen}
        kept = [request for request in victim if request.request_id not in taken]
        victim.clear()
        victim.extend(kept)
        return sorted(stolen, key=work_of, reverse=True)

    def check(self) -> None:
        """Assert every invariant of the class. For tests."""
        assert self._shelf_work == sum(map(work_of, self._shelf))
        for lane in self._lanes.values():
            assert lane.sent_work == sum(map(work_of, lane.sent.values()))
            assert lane.suspect is None or lane.suspect in lane.sent
            assert len(lane.sent) <= lane.seats + lane.seats // SPARE_SEATS_SHARE
        rows = [request.request_id for lane in self._lanes.values() for request in (*lane.sent.values(), *lane.planned)]
        rows += [request.request_id for request in (*self._shelf, *self._retries, *self._suspects)]
        rows += [entry[2].request_id for entry in self._heavy]
        assert len(rows) == len(set(rows)), "a row is in two places"
