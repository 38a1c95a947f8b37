"""A schedule as a picture needs it: one lane a request, and the make-up of each iteration. Built in one walk."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from contbatch_cli.cli.figures import row_name
from contbatch_cli.core.request import RequestId
from contbatch_cli.trace import TraceIteration, TraceRun

_GAP_S = 2e-6
"""Times are rounded to the microsecond, so a smaller gap between two iterations is none."""


class State(IntEnum):
    """What a request does. Stalled: it holds its cache and gets no token; preempted: it lost its cache and waits again."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    STALLED = 3
    PREEMPTED = 4


STATE_NAMES = ("waiting", "prefill", "decode", "stalled", "preempted")


class Segment(NamedTuple):
    """A stretch of one state; `num_tokens` were computed in it."""

    state: State
    start_s: float
    end_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class Lane:
    """One request's segments in order of time, without gaps from 0 on. Adjoining decodes are one; each prefill run is one."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    preempted_s: float | None = None

    @property
    def end_s(self) -> float:
        return self.segments[-1].end_s if self.segments else 0.0


class Step(NamedTuple):
    """One iteration."""

    start_s: float
    end_s: float
    decode_tokens: int
    prefill_tokens: int
    blocks_used: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class ScheduleChart:
    """Everything that is drawn of one schedule; lanes in order of their first run. Of several replicas each has one lane."""

    title: str
    lanes: dict[RequestId | int, Lane] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    token_budget: int = 0
    num_blocks: int = 0

    @property
    def end_s(self) -> float:
        return self.steps[-1].end_s if self.steps else 0.0

    def add(self, iteration: TraceIteration) -> None:
        """Takes in one iteration; to be called in order."""
        if iteration.replica is not None:
            self._run_replica(iteration.replica, iteration)
        else:
            for request_id in iteration.preempted:
                self._preempt(request_id, iteration.start_s)
            for run in iteration.scheduled:
                self._run(run, iteration.start_s, iteration.end_s)
        decode_tokens = iteration.num_decodes + iteration.num_drafts
        self.token_budget = max(self.token_budget, iteration.token_budget)
        self.num_blocks = max(self.num_blocks, iteration.num_blocks)
        step = Step(
            iteration.start_s,
            iteration.end_s,
            decode_tokens,
            iteration.num_tokens - decode_tokens,
            iteration.blocks_used,
            iteration.num_running,
            iteration.num_waiting,
        )
        insort(self.steps, step, key=lambda one: one.end_s)

    def _run_replica(self, replica: int, iteration: TraceIteration) -> None:
        """A replica computes prompts, or only decodes; between its iterations it waits for rows."""
        lane = self.lanes.setdefault(replica, Lane(f"replica {replica}"))
        if iteration.start_s - lane.end_s > _GAP_S:
            lane.segments.append(Segment(State.WAITING, lane.end_s, iteration.start_s))
        state = State.PREFILL if iteration.prefills else State.DECODE
        last = lane.segments[-1] if lane.segments else None
        if last is not None and last.state is state:
            joined = last._replace(end_s=iteration.end_s, num_tokens=last.num_tokens + iteration.num_tokens)
            lane.segments[-1] = joined
        else:
            lane.segments.append(Segment(state, iteration.start_s, iteration.end_s, iteration.num_tokens))

    def _preempt(self, request_id: RequestId, now_s: float) -> None:
        lane = self.lanes.get(request_id)
        if lane is not None:
            lane.preempted_s = now_s

    def _run(self, run: TraceRun, start_s: float, end_s: float) -> None:
        lane = self.lanes.get(run.request_id)
        if lane is None:
            lane = self.lanes[run.request_id] = Lane(row_name(run.name, run.request_id.row, run.request_id.sample))
        _fill_gap(lane, start_s)
        last = lane.segments[-1] if lane.segments else None
        if run.is_decode and last is not None and last.state is State.DECODE:
            lane.segments[-1] = last._replace(end_s=end_s, num_tokens=last.num_tokens + run.num_tokens)
        else:
            lane.segments.append(Segment(State.DECODE if run.is_decode else State.PREFILL, start_s, end_s, run.num_tokens))


def _fill_gap(lane: Lane, start_s: float) -> None:
    """What the request did between its last run and the one that starts now."""
    began_s, preempted_s = lane.end_s, lane.preempted_s
    lane.preempted_s = None
    if not lane.segments:
        if start_s > 0:
            lane.segments.append(Segment(State.WAITING, 0.0, start_s))
        return
    if preempted_s is not None:
        if preempted_s - began_s > _GAP_S:
            lane.segments.append(Segment(State.STALLED, began_s, preempted_s))
        lane.segments.append(Segment(State.PREEMPTED, lane.end_s, start_s))
    elif start_s - began_s > _GAP_S:
        lane.segments.append(Segment(State.STALLED, began_s, start_s))
