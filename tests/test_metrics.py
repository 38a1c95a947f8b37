from __future__ import annotations

import math
import random
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.metrics import LatencyHistogram, Metrics
from contbatch_cli.trace import iteration_of
from tests.fake_runs import FakeJob, reports


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200), st.sampled_from([0.5, 25, 50, 90, 99, 100]))
def test_percentiles_are_within_one_percent_of_the_nearest_rank(durations: list[float], percent: float) -> None:
    histogram = LatencyHistogram()
    for duration in durations:
        histogram.add(duration)
    exact = sorted(durations)[max(1, math.ceil(percent / 100 * len(durations))) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.01)


def test_histogram_takes_zero_and_huge_durations() -> None:
    histogram = LatencyHistogram()
    histogram.add(0.0)
    histogram.add(1e9)
    assert histogram.percentile(1) == pytest.approx(0, abs=2e-6)
    assert histogram.percentile(100) is not None
    assert LatencyHistogram().percentile(50) is None


def jobs() -> list[FakeJob]:
    return [
        FakeJob.drawn(1, 40),
        FakeJob.drawn(2, 40, seats=1, token_budget=3),
        FakeJob.drawn(3, 30, preempt_every=5),
        FakeJob.drawn(4, 30, error_every=4),
        FakeJob.drawn(5, 30, token_budget=7, preempt_every=4),
    ]


@pytest.mark.parametrize("job", jobs(), ids=["plain", "one_seat", "preempted", "errors", "preempted_small_budget"])
def test_metrics_agree_with_token_times_kept_in_full(job: FakeJob) -> None:
    token_times: dict[RequestId, list[float]] = {}
    first_run: dict[RequestId, float] = {}
    finished = {}
    metrics = Metrics()
    bad = 0
    for report in reports(job):
        failed = {r.request_id for r in report.finished if r.finish and r.finish.reason == "error"}
        bad += len(failed)
        for sequence in report.batch.sequences:
            first_run.setdefault(sequence.request_id, report.start_s)
            if sequence.samples and sequence.request_id not in failed:
                token_times.setdefault(sequence.request_id, []).append(report.start_s + report.elapsed_s)
        finished.update(metrics.observe(report))
    snapshot = metrics.snapshot()
    assert len(finished) == len(job.prompts) == snapshot.done
    assert snapshot.bad == bad
    assert snapshot.output_tokens == sum(map(len, token_times.values()))
    assert snapshot.prompt_tokens == sum(job.prompts)
    for request_id, times in token_times.items():
        got = finished[request_id]
        assert got.queue_s == first_run[request_id]
        assert got.ttft_s == times[0]
        assert got.queue_s + got.prefill_s == pytest.approx(times[0])
        if len(times) > 1:
            assert got.itl_s == pytest.approx((times[-1] - times[0]) / (len(times) - 1))
    gaps = sorted(b - a for times in token_times.values() for a, b in zip(times, times[1:], strict=False))
    if gaps:
        assert snapshot.itl_p50_s == pytest.approx(gaps[math.ceil(0.5 * len(gaps)) - 1], rel=0.01)
        assert snapshot.itl_p99_s == pytest.approx(gaps[math.ceil(0.99 * len(gaps)) - 1], rel=0.01)
        assert snapshot.itl_max_s == gaps[-1]


def test_recomputed_tokens_are_those_computed_twice() -> None:
    job = FakeJob.drawn(3, 30, preempt_every=5)
    metrics = Metrics()
    times_computed: dict[tuple[RequestId, int], int] = {}
    by_request = {}
    for report in reports(job):
        for sequence in report.batch.sequences:
            for position in range(sequence.start, sequence.end):
                key = (sequence.request_id, position)
                times_computed[key] = times_computed.get(key, 0) + 1
        by_request.update(metrics.observe(report))
    again = sum(count - 1 for count in times_computed.values())
    assert again > 0
    assert metrics.snapshot().recomputed_tokens == again == sum(m.num_recomputed_tokens for m in by_request.values())
    assert metrics.snapshot().preemptions == sum(m.num_preemptions for m in by_request.values()) > 0


def test_a_trace_gives_the_same_metrics_as_the_run() -> None:
    live, replayed = Metrics(), Metrics()
    for report in reports(FakeJob.drawn(6, 40, preempt_every=6)):
        live.observe(report)
        replayed.observe_trace(iteration_of(report))
    got, wanted = asdict(replayed.snapshot()), asdict(live.snapshot())
    assert got.pop("time_left_s") is wanted.pop("time_left_s") is None
    assert got == pytest.approx(wanted, rel=0.021)


def test_time_left_needs_the_total_and_comes_close() -> None:
    assert Metrics().time_left_s() is None
    job = FakeJob([10] * 200, [20] * 200)
    steps = list(reports(job))
    end = steps[-1].start_s + steps[-1].elapsed_s
    metrics = Metrics(total_requests=200)
    for report in steps[: len(steps) // 2]:
        metrics.observe(report)
    assert metrics.time_left_s() == pytest.approx(end / 2, rel=0.1)
    for report in steps[len(steps) // 2 :]:
        metrics.observe(report)
    assert metrics.time_left_s() == 0.0


def test_memory_is_flat_in_the_number_of_rows() -> None:
    rng = random.Random(0)
    metrics = Metrics()
    sizes = []
    for report in reports(FakeJob([3] * 3000, [rng.randint(1, 5) for _ in range(3000)], seats=8, token_budget=64)):
        metrics.observe(report)
        sizes.append(len(metrics._in_flight) + len(metrics._recent._steps) + sys.getsizeof(metrics.itl._counts) // 1000)
    assert max(sizes) < 1100
    assert not metrics._in_flight


def test_a_duplicate_is_done_but_adds_no_tokens() -> None:
    metrics = Metrics(total_requests=4)
    steps = list(reports(FakeJob([5, 6], [3, 4])))
    twins = [Request.from_prompt(RequestId(7), [1] * 5), Request.from_prompt(RequestId(8), [1] * 5)]
    for twin in twins:
        twin.token_ids += [1, 2, 3]
        twin.finish = Finish(FinishReason.LENGTH)
    steps[-1] = replace(steps[-1], duplicates=tuple(twins))
    for report in steps:
        done = metrics.observe(report)
    assert set(done) >= {RequestId(7), RequestId(8)}
    snapshot = metrics.snapshot()
    assert (snapshot.done, snapshot.duplicates, snapshot.output_tokens, snapshot.prompt_tokens) == (4, 2, 7, 11)
