"""How much cache the running requests will need at their worst moment, from what finished rows have taught.

The peak of a set of requests that all advance by one token a step lies just before one of them ends. Following Gong et al.,
"Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025): sort by the expected number of tokens still to come;
just before the i-th longest ends, the first i requests are still there, each with that many tokens more.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from contbatch_cli.core.request import Request

HISTORY = 512
QUANTILE = 0.4
UNKNOWN_GROWTH = 64
OVERCOMMIT = 1.02
"""How far over the cache a forecast may be. Chosen with `QUANTILE` on drawn jobs: never to preempt would leave seats empty."""


class OutputLengths:
    """The output lengths of the last `HISTORY` finished requests, as an estimate for the ones that run."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_output_tokens: int) -> None:
        """Learn from a request that ended by itself."""
        if len(self._recent) == HISTORY:
            oldest = self._recent.popleft()
            if oldest == num_output_tokens:
                self._recent.append(oldest)
                return
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)

    def remaining(self, request: Request) -> int:
        """Expected number of tokens still to come: certain when nothing but `max_tokens` can end the row."""
        sampling = request.sampling
        most = max(sampling.max_tokens - request.num_output_tokens, 1)
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            return most
        return self.expected(request.num_output_tokens, most)

    def expected(self, done: int, most: int) -> int:
        """Expected number of tokens still to come of a row that has `done`, at least 1, at most `most`.

        A quantile of the finished lengths above what the row has already; where none is above, as many again as it has.
        """
        first_above = bisect_right(self._sorted, done)
        num_above = len(self._sorted) - first_above
        if num_above == 0:
            return min(most, max(done, UNKNOWN_GROWTH))
        return min(most, self._sorted[first_above + int(num_above * QUANTILE)] - done)


class Demand(NamedTuple):
    """One request's claim: tokens expected still to come, and tokens whose blocks it gives back when it ends."""

    remaining: int
    own: int


def peak_tokens(demands: Iterable[Demand], slack: int) -> int:
    """The most tokens held at once, `slack` a request being added for the part of a block that is not filled."""
    peak = held = 0
    for count, demand in enumerate(sorted(demands, reverse=True), start=1):
        held += demand.own + slack
        peak = max(peak, held + count * demand.remaining)
    return peak
