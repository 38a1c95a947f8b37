"""Replicas in simulated time, for a rehearsal: the same dispatcher and engines, and no waiting."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from contbatch_cli.cluster.cluster_engine import Event, Joined, Stepped
from contbatch_cli.cluster.replica import Replica
from contbatch_cli.core.request import Request


class AdvancingClock(Protocol):
    """Seconds that pass when they are told to."""

    def __call__(self) -> float: ...

    def advance(self, seconds: float) -> None: ...


class SimulatedPool:
    """A stretch is run as soon as it is asked for, from the moment in simulated time when the replica would come to it.

    What it did is told in order of the moments at which it ended. `replicas` are pairs of a replica and its own clock.
    """

    def __init__(self, replicas: Sequence[tuple[Replica, AdvancingClock]]) -> None:
        self._replicas = replicas
        self._now_s = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Event]] = []
        self.num_starting = len(replicas)

    @property
    def num_expected(self) -> int:
        return self.num_starting

    def step(self, replica: int, requests: Sequence[Request], limit_s: float, is_more: bool) -> None:
        engine, clock = self._replicas[replica]
        clock.advance(max(self._now_s - clock(), 0.0))
        digests = engine.step(requests, limit_s, is_more)
        heapq.heappush(self._events, (clock(), next(self._order), Stepped(replica, digests)))

    def wait(self) -> Sequence[Event]:
        """The next event; time goes on to it. At first all replicas join."""
        if self.num_starting:
            self.num_starting = 0
            return [Joined(number, replica.seats) for number, (replica, _) in enumerate(self._replicas)]
        self._now_s, _, event = heapq.heappop(self._events)
        return [event]
