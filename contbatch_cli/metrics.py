"""What a run reached, from its iterations alone: tokens, speed, latencies, use of budget and cache, time left.

Memory is flat in the number of rows: latencies go into histograms of a fixed size, and only requests in flight are remembered.
All times are seconds since the run began; all rows of a job count as having arrived then, so TTFT includes the wait for a seat.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from contbatch_cli.core.batch import ScheduledSequence
from contbatch_cli.core.forecast import OutputLengths
from contbatch_cli.core.request import FinishReason, Request, RequestId
from contbatch_cli.engine import IterationReport
from contbatch_cli.trace import TraceIteration, TraceRun

RECENT_WINDOW_S = 10.0
UNLIMITED = 1 << 30


class LatencyHistogram:
    """Durations in buckets whose bounds grow by 2 %: percentiles are within 1 % of the true ones from 1 us to 10^6 s.

    A percentile is the nearest-rank one, reported as the geometric middle of its bucket (off by at most sqrt(1.02) - 1) and
    kept between the least and the greatest duration seen, which are exact.
    """

    LEAST_S = 1e-6
    GREATEST_S = 1e6
    GROWTH = 1.02

    def __init__(self) -> None:
        self._log_growth = math.log(self.GROWTH)
        self._counts = [0] * (math.ceil(math.log(self.GREATEST_S / self.LEAST_S) / self._log_growth) + 1)
        self.count = 0
        self.total_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0
        self._last_s = math.nan
        self._last_bucket = 0

    def add(self, duration_s: float, count: int = 1) -> None:
        """Counts `count` durations of the same length."""
        if duration_s != self._last_s:  # the rows of a step mostly share one duration
            bucket = int(math.log(max(duration_s, self.LEAST_S) / self.LEAST_S) / self._log_growth)
            self._last_s, self._last_bucket = duration_s, min(bucket, len(self._counts) - 1)
            self.min_s = min(self.min_s, duration_s)
            self.max_s = max(self.max_s, duration_s)
        self._counts[self._last_bucket] += count
        self.count += count
        self.total_s += duration_s * count

    def percentile(self, percent: float) -> float | None:
        """The nearest-rank percentile in seconds; None while nothing was added."""
        if self.count == 0:
            return None
        rank = max(1, math.ceil(percent / 100 * self.count))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                middle = self.LEAST_S * math.exp((bucket + 0.5) * self._log_growth)
                return min(max(middle, self.min_s), self.max_s)
        return self.max_s

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count else None


class RequestMetrics(NamedTuple):
    """One finished request. None where it never got so far (`ttft_s` without a token, `itl_s` with fewer than two).

    `queue_s` is arrival to first run, `prefill_s` first run to first token, `ttft_s` their sum, `itl_s` the mean gap between
    tokens.
    """

    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float
    num_preemptions: int
    num_recomputed_tokens: int

    def as_record(self) -> dict[str, float | int | None]:
        """The record's `metrics` object; seconds to the microsecond."""
        return {name: _rounded(value) for name, value in self._asdict().items()}


def _rounded(value: float | int | None) -> float | int | None:
    return round(value, 6) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The state of a run at one moment. `budget_use` and `peak_blocks / num_blocks` are shares; percentiles in seconds."""

    good: int
    bad: int
    cancelled: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    duplicates: int
    iterations: int
    budget_use: float
    peak_blocks: int
    num_blocks: int
    peak_running: int
    elapsed_s: float
    output_tokens_per_s: float
    recent_tokens_per_s: float
    time_left_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None
    duplicate_tokens: int = 0
    """Prompt and output tokens of rows that took the result of an equal one."""
    rows: int = 0
    """Rows whose first sample has finished; `good`, `bad`, `cancelled` and `done` count every sample."""
    draft_tokens: int = 0
    accepted_drafts: int = 0

    @property
    def done(self) -> int:
        return self.good + self.bad + self.cancelled


class RowCounts(NamedTuple):
    """Rows by their records: those done, the bad ones among them, and all of the job where they are known."""

    done: int = 0
    bad: int = 0
    total: int | None = None


_Run = tuple[RequestId, int, int, int, int, "int | None"]
"""Request, start, end, tokens sampled, drafts, `max_tokens` where known. The end is that of the computed tokens which the request
kept: behind it there may have been drafts that were wrong."""


def _runs_of_batch(sequences: Sequence[ScheduledSequence], accepted: Mapping[RequestId, int]) -> list[_Run]:
    runs: list[_Run] = []
    for one in sequences:
        kept = accepted.get(one.request_id, 0) if one.num_drafts else 0
        end = one.start + len(one.tokens) - one.num_drafts + kept
        runs.append((one.request_id, one.start, end, one.samples + kept, one.num_drafts, one.sampling.max_tokens))
    return runs


def _run_of_trace(run: TraceRun) -> _Run:
    return run.request_id, run.start, run.end - run.num_drafts + run.num_accepted, run.num_sampled, run.num_drafts, None


@dataclass(slots=True)
class _InFlight:
    """A request that has run and is not finished. `computed` is the most of its tokens that were ever computed."""

    first_run_s: float
    computed: int
    max_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_outputs: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def metrics(self, end_s: float) -> RequestMetrics:
        first = self.first_token_s
        gaps = self.num_outputs - 1
        return RequestMetrics(
            queue_s=self.first_run_s,
            prefill_s=None if first is None else first - self.first_run_s,
            ttft_s=first,
            itl_s=(self.last_token_s - first) / gaps if first is not None and gaps > 0 else None,
            e2e_s=end_s,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
        )


class _RecentRate:
    """Tokens per second over the last `RECENT_WINDOW_S`; at most `_MAX_STEPS` steps are kept."""

    _MAX_STEPS = 1024

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int]] = deque()
        self._tokens = 0

    def add(self, start_s: float, end_s: float, num_tokens: int) -> None:
        self._steps.append((start_s, end_s, num_tokens))
        self._tokens += num_tokens
        while len(self._steps) > 1 and (self._steps[0][1] < end_s - RECENT_WINDOW_S or len(self._steps) > self._MAX_STEPS):
            self._tokens -= self._steps.popleft()[2]

    @property
    def tokens_per_s(self) -> float:
        if not self._steps:
            return 0.0
        span = self._steps[-1][1] - self._steps[0][0]
        return self._tokens / span if span > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean duration of those steps."""
        if not self._steps:
            return 0.0
        return (self._steps[-1][1] - self._steps[0][0]) / len(self._steps)


@dataclass(slots=True)
class _Totals:
    finishes: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    prompt_tokens: int = 0
    rows: int = 0
    output_tokens: int = 0
    finished_output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    duplicates: int = 0
    duplicate_tokens: int = 0
    draft_tokens: int = 0
    accepted_drafts: int = 0
    iterations: int = 0
    budget_tokens: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0
    peak_running: int = 0
    end_s: float = 0.0


class Metrics:
    """Accumulates a run. Feed every iteration once, in order, through `observe` (live) or `observe_trace` (replay).

    `total_requests`, when the caller knows it, gives the time left; it may be set or raised at any time. It counts requests, so
    a row with `n` samples counts `n` times. Rows that never reach the engine are not seen here: `rows` is for whoever writes
    the records to set, and for a view to show.
    """

    def __init__(self, total_requests: int | None = None) -> None:
        self.total_requests = total_requests
        self.rows = RowCounts()
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._recent = _RecentRate()
        self._totals = _Totals()
        self._lengths = OutputLengths()
        self.ttft = LatencyHistogram()
        self.itl = LatencyHistogram()

    def observe(self, report: IterationReport) -> dict[RequestId, RequestMetrics]:
        """Takes in one iteration; returns the metrics of the requests that finished in it and forgets them."""
        runs = _runs_of_batch(report.batch.sequences, report.accepted_drafts)
        self._observe(report, runs, report.batch.num_tokens, report.batch.preempted)
        end_s = report.start_s + report.elapsed_s
        self._totals.duplicates += len(report.duplicates)
        self._totals.duplicate_tokens += sum(len(request.token_ids) for request in report.duplicates)
        done = (*report.finished, *report.duplicates)
        return {request.request_id: self._finish_request(request, end_s) for request in done}

    def observe_trace(self, iteration: TraceIteration) -> dict[RequestId, RequestMetrics]:
        """The same for an iteration of a trace, which does not tell why a request finished: all count as good."""
        runs = [_run_of_trace(run) for run in iteration.scheduled]
        self._observe(iteration, runs, iteration.num_tokens, iteration.preempted)
        return {request_id: self._finish(request_id, FinishReason.STOP, iteration.end_s) for request_id in iteration.finished}

    def _observe(
        self,
        step: IterationReport | TraceIteration,
        runs: Sequence[_Run],
        num_tokens: int,
        preempted: Iterable[RequestId],
    ) -> None:
        totals = self._totals
        end_s = step.start_s + step.elapsed_s
        self._count_preempted(preempted)
        num_outputs = 0
        for request_id, start, end, num_sampled, num_drafts, max_tokens in runs:
            state = self._in_flight.get(request_id) or self._admit(request_id, start, max_tokens, step.start_s)
            if start < state.computed:
                self._count_recomputed(state, start, end)
            if end > state.computed:
                state.computed = end
            if num_sampled:
                num_outputs += num_sampled
                self._count_tokens(state, end, num_sampled, end_s)
            if num_drafts:
                totals.draft_tokens += num_drafts
                totals.accepted_drafts += num_sampled - 1
        totals.iterations += 1
        totals.output_tokens += num_outputs
        totals.computed_tokens += num_tokens
        totals.budget_tokens += step.token_budget
        totals.peak_blocks = max(totals.peak_blocks, step.blocks_used)
        totals.peak_running = max(totals.peak_running, len(runs))
        totals.num_blocks = step.num_blocks
        totals.end_s = max(totals.end_s, end_s)
        self._recent.add(step.start_s, end_s, num_outputs)

    def _admit(self, request_id: RequestId, start: int, max_tokens: int | None, start_s: float) -> _InFlight:
        """A first run that starts behind position 0 found the tokens before it in the prefix cache."""
        state = self._in_flight[request_id] = _InFlight(start_s, start, max_tokens)
        self._totals.cached_tokens += start
        return state

    def _count_preempted(self, preempted: Iterable[RequestId]) -> None:
        for request_id in preempted:
            self._totals.preemptions += 1
            if state := self._in_flight.get(request_id):
                state.num_preemptions += 1

    def _count_recomputed(self, state: _InFlight, start: int, end: int) -> None:
        again = min(end, state.computed) - start
        state.num_recomputed_tokens += again
        self._totals.recomputed_tokens += again

    def _count_tokens(self, state: _InFlight, end: int, num_sampled: int, end_s: float) -> None:
        """Tokens that come together share the time since the one before them."""
        if state.first_token_s is None:
            state.first_token_s = end_s
            self._totals.prompt_tokens += end
            self.ttft.add(end_s)
        else:
            self.itl.add((end_s - state.last_token_s) / num_sampled, num_sampled)
        state.last_token_s = end_s
        state.num_outputs += num_sampled

    def _finish_request(self, request: Request, end_s: float) -> RequestMetrics:
        """The request's own count of output tokens holds: a row that failed in its last step sampled nothing there.

        A duplicate, which never ran, adds no tokens.
        """
        state = self._in_flight.get(request.request_id)
        if state is not None:
            self._totals.output_tokens += request.num_output_tokens - state.num_outputs
            state.num_outputs = request.num_output_tokens
        reason = request.finish.reason if request.finish else FinishReason.STOP
        return self._finish(request.request_id, reason, end_s)

    def _finish(self, request_id: RequestId, reason: FinishReason, end_s: float) -> RequestMetrics:
        totals = self._totals
        totals.finishes[reason] += 1
        totals.rows += request_id.sample == 0
        state = self._in_flight.pop(request_id, None)
        if state is None:
            return RequestMetrics(None, None, None, None, end_s, 0, 0)
        totals.finished_output_tokens += state.num_outputs
        self._lengths.observe(state.num_outputs)
        if state.first_token_s is None:
            totals.prompt_tokens += state.computed
        return state.metrics(end_s)

    @property
    def num_finished(self) -> int:
        return sum(self._totals.finishes.values())

    @property
    def recent_tokens_per_s(self) -> float:
        """Output tokens per second over the last ten seconds."""
        return self._recent.tokens_per_s

    def time_left_s(self) -> float | None:
        """The work left at the recent speed, or the longest request's steps if that is more; None while unknown.

        Lengths are expected as the scheduler's admission expects them, from the requests that finished.
        """
        done = self.num_finished
        if self.total_requests is None:
            return None
        if done >= self.total_requests:
            return 0.0
        rate = self.recent_tokens_per_s
        if done == 0 or rate <= 0:
            return None
        in_flight = [self._expected(state) for state in self._in_flight.values()]
        unseen = max(self.total_requests - done - len(in_flight), 0)
        work_s = (sum(in_flight) + unseen * self._totals.finished_output_tokens / done) / rate
        return max(work_s, max(in_flight, default=0) * self._recent.step_s)

    def _expected(self, state: _InFlight) -> int:
        """Output tokens that a request still has to come, by what finished ones had."""
        most = UNLIMITED if state.max_tokens is None else state.max_tokens
        return self._lengths.expected(state.num_outputs, max(most - state.num_outputs, 1))

    def snapshot(self) -> MetricsSnapshot:
        """The state now."""
        totals = self._totals
        finishes = totals.finishes
        return MetricsSnapshot(
            good=finishes[FinishReason.STOP] + finishes[FinishReason.LENGTH],
            bad=finishes[FinishReason.ERROR],
            cancelled=finishes[FinishReason.CANCELLED],
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            cached_tokens=totals.cached_tokens,
            computed_tokens=totals.computed_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            preemptions=totals.preemptions,
            duplicates=totals.duplicates,
            iterations=totals.iterations,
            budget_use=totals.computed_tokens / totals.budget_tokens if totals.budget_tokens else 0.0,
            peak_blocks=totals.peak_blocks,
            num_blocks=totals.num_blocks,
            peak_running=totals.peak_running,
            elapsed_s=totals.end_s,
            output_tokens_per_s=totals.output_tokens / totals.end_s if totals.end_s > 0 else 0.0,
            recent_tokens_per_s=self.recent_tokens_per_s,
            time_left_s=self.time_left_s(),
            ttft_p50_s=self.ttft.percentile(50),
            ttft_p99_s=self.ttft.percentile(99),
            itl_p50_s=self.itl.percentile(50),
            itl_p99_s=self.itl.percentile(99),
            itl_max_s=self.itl.max_s if self.itl.count else None,
            duplicate_tokens=totals.duplicate_tokens,
            rows=totals.rows,
            draft_tokens=totals.draft_tokens,
            accepted_drafts=totals.accepted_drafts,
        )
