from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, FinishReason, Request, RequestId
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.cost_model import CostModel
from contbatch_cli.engine import InferenceEngine, IterationReport
from contbatch_cli.errors import UsageError
from contbatch_cli.metrics import Metrics
from contbatch_cli.simulate import KnownOutput, OutputScript, SimulatedClock, SimulatedRunner

COST = CostModel("test", False, ((1.0, 0.01), (64.0, 0.02)), ((1.0, 0.001),))


class ListSource:
    """Requests that stand in a list."""

    is_live = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def next_request(self, wait: bool) -> Request | None:
        return self._requests.pop(0) if self._requests else None

    @property
    def is_exhausted(self) -> bool:
        return not self._requests


def rehearse(
    prompts: list[list[int]], script: OutputScript, max_tokens: int = 20, num_blocks: int = 64
) -> list[IterationReport]:
    requests = [Request.from_prompt(RequestId(i), ids, replace(GREEDY, max_tokens=max_tokens)) for i, ids in enumerate(prompts)]
    clock = SimulatedClock()
    scheduler = StallFreeScheduler(KVCacheManager(num_blocks, 4), 32, 8, script.stop_rule)
    queue = JobQueue(ListSource(requests), 1000, merges_duplicates=False)
    queue.set_order("input")
    return list(InferenceEngine(scheduler, SimulatedRunner(script, COST, clock.advance), queue, clock).run())


def lengths(reports: list[IterationReport]) -> dict[int, int]:
    return {request.request_id.row: request.num_output_tokens for report in reports for request in report.finished}


PROMPTS = [[i] * (3 + i) for i in range(10)]


def test_lengths_are_the_scripts() -> None:
    assert set(lengths(rehearse(PROMPTS, OutputScript())).values()) == {20}
    known = {RequestId(i): KnownOutput(i + 1) for i in range(9)}
    script = OutputScript(None, known)
    assert lengths(rehearse(PROMPTS, script)) == {**{i: i + 1 for i in range(9)}, 9: 20}
    assert script.num_unknown == 1


def test_time_is_the_cost_models_and_nothing_elses() -> None:
    reports = rehearse(PROMPTS, OutputScript.parse("5"))
    for report in reports:
        assert report.elapsed_s == pytest.approx(COST.step_s(report.batch))
    assert reports[-1].start_s == pytest.approx(sum(report.elapsed_s for report in reports[:-1]))


def test_preemption_changes_no_length() -> None:
    known = {RequestId(row): KnownOutput(20 if row else 5) for row in range(8)}
    reports = rehearse([[row] * 8 for row in range(8)], OutputScript(None, known), 40, 14)
    assert any(report.batch.preempted for report in reports)
    assert lengths(reports) == {request_id.row: output.num_tokens for request_id, output in known.items()}


def test_known_tokens_are_found_by_the_prefix_cache_and_unknown_ones_are_not() -> None:
    output = tuple(range(100, 112))
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, *output]]

    def cached(script: OutputScript) -> int:
        metrics = Metrics()
        for report in rehearse(prompts[:1] + [[9] * 30] * 12 + prompts[1:], script, 12):
            metrics.observe(report)
        return metrics.snapshot().cached_tokens

    known = OutputScript(None, {RequestId(0): KnownOutput(12, output)})
    assert cached(known) >= cached(OutputScript()) + 8


def test_an_earlier_output_of_any_shape_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [
        {"index": 0, "finish_reason": "stop", "usage": {"completion_tokens": 3}, "token_ids": [5, 6], "error": None},
        {"index": 1, "completion_tokens": 4},
        {"index": 2, "finish_reason": "error", "usage": None, "error": {"code": "x"}},
        {"index": 3, "usage": {"completion_tokens": 5}, "choices": [{"token_ids": [1, 2, 3]}, {"token_ids": [1, 2]}]},
        {"index": 4, "response": {"body": {"choices": [{}], "usage": {"completion_tokens": 9}}}, "error": None},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert OutputScript.parse(f"@{path}").known == {
        RequestId(0): KnownOutput(3, (5, 6)),
        RequestId(1): KnownOutput(4),
        RequestId(3, 0): KnownOutput(3, (1, 2, 3)),
        RequestId(3, 1): KnownOutput(2, (1, 2)),
        RequestId(4): KnownOutput(9),
    }


@pytest.mark.parametrize("text", ["0", "-3", "0.9", "many", "", "nan", "inf", "@/nowhere/at/all"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--output-lengths"):
        OutputScript.parse(text)


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"index":0,"completion_tokens":1}\n{"completion_tokens":1}\n')
    with pytest.raises(UsageError, match="line 2"):
        OutputScript.from_file(path)


def test_limits_of_a_row_hold_over_the_script() -> None:
    script = OutputScript(5)
    assert script.length(RequestId(0), replace(GREEDY, max_tokens=3)) == 3
    assert all(9 <= script.length(RequestId(row), replace(GREEDY, min_tokens=9)) <= 256 for row in range(1, 50))
    assert all(script.length(RequestId(row), replace(GREEDY, ignore_eos=True)) == 256 for row in range(50, 100))


@pytest.mark.parametrize(("mean", "most"), [(60, 4096), (60, 256), (60, 80), (60, 61), (2.5, 1000), (1, 9), (255.9, 256)])
def test_drawn_lengths_differ_and_have_the_mean(mean: float, most: int) -> None:
    script, sampling = OutputScript(mean), replace(GREEDY, max_tokens=most)
    found = [script.length(RequestId(row, row % 2), sampling) for row in range(20_000)]
    assert min(found) >= 1 and max(found) <= most
    assert statistics.fmean(found) == pytest.approx(mean, rel=0.03)
    assert len(set(found)) > 20 or mean < 3 or mean > most - 2
    if mean * 10 < most:
        assert statistics.pstdev(found) == pytest.approx(math.sqrt(mean * (mean - 1)), rel=0.05), "geometric"


@pytest.mark.parametrize("most", [1, 2, 7, 60])
def test_a_mean_that_a_row_cannot_exceed_is_its_length(most: int) -> None:
    script = OutputScript(60)
    assert {script.length(RequestId(row), replace(GREEDY, max_tokens=most)) for row in range(99)} == {most}


def test_drawn_lengths_are_each_requests_own() -> None:
    """Whatever the order, the policy or the rehearsal."""
    script = OutputScript.parse("7")
    first, again = lengths(rehearse(PROMPTS, script)), lengths(rehearse(PROMPTS, script.again(), num_blocks=12))
    assert first == again and len(set(first.values())) > 3
    assert script.length(RequestId(3, 1), GREEDY) != script.length(RequestId(3), GREEDY)


def test_finish_reasons() -> None:
    reports = rehearse([[1, 2], [3, 4]], OutputScript(None, {RequestId(0): KnownOutput(4), RequestId(1): KnownOutput(20)}))
    reasons = {r.request_id.row: r.finish.reason for report in reports for r in report.finished if r.finish}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
