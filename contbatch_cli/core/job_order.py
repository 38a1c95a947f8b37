"""The order of a whole job: a file is known in advance, so rows need not run in the order they stand in.

All of it happens inside one look-ahead window, the rows that were read and have not been started; reading goes on as rows leave,
so that a job of any length streams. Duplicate rows whose text is determined run once; the others follow the one that runs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from itertools import compress, count
from operator import ne
from typing import NamedTuple, Protocol

from contbatch_cli.core.request import Request, RequestId

WINDOW_BYTES = 256 * 2**20
BYTES_PER_REQUEST = 1024
BYTES_PER_TOKEN = 8
MIN_SHARED_FRACTION = 0.05
MIN_SPREAD = 2.0


class RequestSource(Protocol):
    """Where requests come from. `is_live`: a pipe, whose rows arrive when they arrive."""

    @property
    def is_live(self) -> bool: ...

    def next_request(self, wait: bool) -> Request | None:
        """The next request; None at the end, or, without `wait`, when none is there yet."""
        ...

    @property
    def is_exhausted(self) -> bool: ...


class Order(Protocol):
    """Holds the requests of the window; gives them out in its order."""

    def push(self, request: Request) -> None: ...
    def pop(self) -> Request: ...
    def __len__(self) -> int: ...


class InputOrder:
    """First in, first out."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._requests.append(request)

    def pop(self) -> Request:
        return self._requests.popleft()

    def __len__(self) -> int:
        return len(self._requests)


class LongestFirst:
    """Most expected work first, so that the last rows to run are short and the batch stays full to the end (LPT: Graham, 1969).

    Expected work is the number of steps a row holds its seat, `max_tokens`; rows of equal work keep their order.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._arrivals = count()

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (-request.sampling.max_tokens, next(self._arrivals), request))

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


class PrefixOrder:
    """Rows in lexicographic order of their tokens: a walk over the tree of prefixes, depth first.

    Rows that share a prefix run one after the other, so each prefix is computed once even by a cache that holds little more
    than one branch. New rows are sorted in as they arrive; the walk goes on from where it is and starts over at the end.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[str, list[int], int, Request]] = []
        self._next = 0
        self._arrivals = count()

    def push(self, request: Request) -> None:
        entry = (request.adapter or "", request.token_ids, next(self._arrivals), request)
        position = bisect_left(self._sorted, entry)
        self._sorted.insert(position, entry)
        self._next += position < self._next

    def pop(self) -> Request:
        if self._next >= len(self._sorted):
            self._next = 0
        return self._sorted.pop(self._next)[3]

    def __len__(self) -> int:
        return len(self._sorted)


ORDERS: dict[str, type[InputOrder] | type[LongestFirst] | type[PrefixOrder]] = {
    "input": InputOrder,
    "longest_first": LongestFirst,
    "prefix": PrefixOrder,
}


class Choice(NamedTuple):
    """A chosen value and the reason that the run's header gives."""

    value: str
    reason: str


def shared_fraction(requests: list[Request], block_size: int) -> float:
    """The part of the prompt tokens that stands, in full blocks, at the start of another prompt too."""
    previous: list[int] = []
    shared = total = 0
    for tokens in sorted(request.token_ids for request in requests):
        total += len(tokens)
        shared += common_prefix(previous, tokens) // block_size * block_size
        previous = tokens
    return shared / total if total else 0.0


def common_prefix(one: list[int], two: list[int]) -> int:
    """The number of tokens that two lists share at their start."""
    return next(compress(count(), map(ne, one, two)), min(len(one), len(two)))


def choose_order(requests: list[Request], block_size: int, seats: int) -> Choice:
    """What `job_order: auto` means for the rows of the first window."""
    shared = shared_fraction(requests, block_size)
    if shared >= MIN_SHARED_FRACTION:
        return Choice("prefix", f"{shared:.0%} of the prompt tokens are shared prefixes")
    lengths = [request.sampling.max_tokens for request in requests]
    longest, mean = max(lengths, default=0), sum(lengths) / max(len(lengths), 1)
    if len(requests) > seats and longest >= MIN_SPREAD * mean:
        return Choice("longest_first", f"the longest output ({longest} tokens) is {longest / mean:.1f} times the mean")
    return Choice("input", "nothing is gained by another order: prefixes differ and lengths are alike")


class JobQueue:
    """The rows that wait to be started, at most a window of them, in the order in which they should start.

    `window` is in rows; `window_bytes` bounds what they hold, whichever is less. `merges_duplicates` runs equal rows once.
    """

    def __init__(
        self,
        source: RequestSource,
        window: int,
        window_bytes: int = WINDOW_BYTES,
        merges_duplicates: bool = True,
    ) -> None:
        self._source = source
        self._window = window
        self._window_bytes = window_bytes
        self._merges_duplicates = merges_duplicates
        self._order: Order = InputOrder()
        self._looks_ahead = True
        self._bytes = 0
        self._leaders: dict[Hashable, Request] = {}
        self._followers: dict[RequestId, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has been read to its end."""
        return self._source.is_exhausted

    def look_ahead(self) -> list[Request]:
        """Read a window of rows, to choose the order and the sizes by; the rows that wait, in input order."""
        assert isinstance(self._order, InputOrder), "the order was chosen already"
        self._fill()
        return list(self._order._requests)

    def set_order(self, name: str) -> None:
        """Choose the order. `input` reads no further ahead than the next row."""
        waiting = self._order
        self._order = ORDERS[name]()
        self._looks_ahead = name != "input"
        while len(waiting):
            self._order.push(waiting.pop())

    def take(self, wait: bool) -> Request | None:
        """The next request to start; None at the end, or, without `wait`, when a pipe has none yet."""
        order = self._order
        if self._looks_ahead:
            self._fill()
        if not len(order) and not self._read(wait or not self._source.is_live):
            return None
        request = order.pop()
        self._bytes -= _size(request)
        return request

    def finish(self, leader: Request) -> list[Request]:
        """The requests that share a finished one's result, with that result filled in."""
        self._leaders.pop(duplicate_key(leader), None)
        followers = self._followers.pop(leader.request_id, [])
        for request in followers:
            _copy_result(leader, request)
        return followers

    def _fill(self) -> None:
        while len(self._order) < self._window and self._bytes < self._window_bytes and self._read(not self._source.is_live):
            pass

    def _read(self, wait: bool) -> bool:
        """Take one request that has to run into the window; False when there is none."""
        while (request := self._source.next_request(wait)) is not None:
            if not self._follows(request):
                self._order.push(request)
                self._bytes += _size(request)
                return True
        return False

    def _follows(self, request: Request) -> bool:
        """Whether an equal request, waiting or running, gives this one its result too."""
        if not self._merges_duplicates:
            return False
        leader = self._leaders.setdefault(duplicate_key(request), request)
        if leader is request:
            return False
        self._followers.setdefault(leader.request_id, []).append(request)
        return True


def duplicate_key(request: Request) -> Hashable:
    """Equal for requests that must give the same text: seeds of unseeded rows differ, and greedy rows have none."""
    sampling = request.sampling
    is_greedy = sampling.temperature == 0.0
    sample = 0 if is_greedy else request.request_id.sample
    return (tuple(request.token_ids[: request.num_prompt_tokens]), sampling, sample, request.adapter)


def _size(request: Request) -> int:
    return BYTES_PER_REQUEST + BYTES_PER_TOKEN * request.num_prompt_tokens


def _copy_result(leader: Request, request: Request) -> None:
    request.token_ids = list(leader.token_ids)
    request.finish = leader.finish
    request.logprobs = leader.logprobs
    request.prompt_logprobs = leader.prompt_logprobs
