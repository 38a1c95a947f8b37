from __future__ import annotations

import json
from pathlib import Path

import pytest

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.request import GREEDY, Request, RequestId
from contbatch_cli.engine import IterationReport
from contbatch_cli.errors import UsageError
from contbatch_cli.trace import format_iteration, header_line, iteration_line, iteration_of, read_trace
from tests.fake_runs import FakeJob, reports

CONTRACT_LINE = (
    '{"iteration":12,"scheduled":[{"index":0,"id":"a","sample":0,"start":40,"num_tokens":1,"is_decode":true},'
    '{"index":2,"id":"c","sample":0,"start":0,"num_tokens":47,"is_decode":false}],"num_tokens":48,"token_budget":48,'
    '"num_running":2,"num_waiting":5,"blocks_used":9,"num_blocks":64,"preempted":[],"finished":[1],"start_s":0.81,"elapsed_s":0.052}'
)


def contract_report() -> IterationReport:
    sequences = (
        ScheduledSequence(RequestId(0), (7,), 40, (0, 1, 2), 40, GREEDY, True, Logits.LAST),
        ScheduledSequence(RequestId(2), (1,) * 47, 0, (3, 4, 5), 50, GREEDY, False, Logits.NONE),
    )
    finished = Request.from_prompt(RequestId(1), [1])
    return IterationReport(12, ScheduledBatch(sequences, 48), (finished,), (), 2, 5, 9, 64, 48, 0.81, 0.052)


def test_the_line_of_the_contract_is_written_with_its_keys_in_order() -> None:
    names = {0: "a", 2: "c"}
    wanted = json.loads(CONTRACT_LINE)
    got = json.loads(iteration_line(contract_report(), names.get))
    for run, samples in zip(got["scheduled"], [True, False], strict=True):
        assert run.pop("samples") is samples
    assert got == wanted
    assert list(got) == list(wanted)
    assert list(got["scheduled"][0]) == list(wanted["scheduled"][0])


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    names = {0: 'quo"te\n', 1: 7, 2: "c"}
    steps = list(reports(FakeJob.drawn(1, 20, preempt_every=5)))
    path.write_text(header_line({"a": 1}, {}, 20) + "".join(iteration_line(report, names.get) for report in steps), "utf-8")
    header, iterations = read_trace(path)
    assert header == {"version": 1, "config": {"a": 1}, "device": {}, "rows": 20}
    read = list(iterations)
    assert read == [iteration_of(report, names.get) for report in steps]
    assert "".join(map(format_iteration, read)) == path.read_text("utf-8").split("\n", 1)[1]


def test_later_samples_of_a_row_are_told_apart(tmp_path: Path) -> None:
    report = contract_report()
    finished = (Request.from_prompt(RequestId(1, 0), [1]), Request.from_prompt(RequestId(1, 2), [1]))
    report = IterationReport(0, report.batch, finished[:1], finished[1:], 2, 5, 9, 64, 48, 0.0, 0.1)
    path = tmp_path / "t.jsonl"
    path.write_text(header_line({}, {}, None) + iteration_line(report))
    assert next(read_trace(path)[1]).finished == (RequestId(1, 0), RequestId(1, 2))


def test_a_torn_last_line_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(header_line({}, {}, 1) + CONTRACT_LINE + "\n" + CONTRACT_LINE[:70])
    assert len(list(read_trace(path)[1])) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"index":0}\n', "no trace"),
        ('{"header":{"version":9}}\n', "version 9"),
        ("nonsense\n", "line 1"),
        (header_line({}, {}, 1) + '{"iteration":1}\n', "line 2"),
        (header_line({}, {}, 1) + "[]\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        list(read_trace(path)[1])


def test_an_absent_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "none")
