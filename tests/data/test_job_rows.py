"""Rows on their way through a job: read when they are needed, known until they are done."""

import threading
import time
from contextlib import contextmanager

import pytest

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.data.job_rows import JobRows, OutOfTime, RowReader
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.rows import Row, RowFault, TextPrompt
from contbatch_cli.errors import EngineError


def row(index, n=1):
    return Row(index, f"r{index}", index + 1, "rows.jsonl", TextPrompt("x"), {"n": n}, {}, "0" * 16)


def fault(index):
    return RowFault(index, None, index + 1, "rows.jsonl", "invalid_json", "bad", "0" * 16, {})


def prepare(one):
    samples = range(one.params["n"])
    return PreparedRow(one, tuple(Request.from_prompt(RequestId(one.index, sample), [1]) for sample in samples))


def job(rows, **reading):
    faults = []
    return JobRows(RowReader(iter(rows), **{"is_live": False, **reading}), prepare, faults.append), faults


def finished(request):
    request.finish = Finish(FinishReason.STOP)
    return request


class Pipe:
    """An iterator that waits until it is given something."""

    def __init__(self):
        self._condition = threading.Condition()
        self._items = []

    def give(self, *items):
        with self._condition:
            self._items += items
            self._condition.notify()

    def __iter__(self):
        return self

    def __next__(self):
        with self._condition:
            assert self._condition.wait_for(lambda: self._items, timeout=30)
            item = self._items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item


def test_rows_are_read_one_request_at_a_time():
    read = []
    rows, faults = job(read.append(index) or row(index) for index in range(100))
    assert [rows.next_request(wait=True).request_id.row for _ in range(3)] == [0, 1, 2]
    assert read == [0, 1, 2]
    assert not rows.is_read and rows.num_rows == 3


def test_faults_are_told_when_they_are_met_and_the_next_row_comes():
    rows, faults = job([row(0), fault(1), fault(2), row(3)])
    assert rows.next_request(wait=True).request_id.row == 0
    assert faults == []
    assert rows.next_request(wait=True).request_id.row == 3
    assert [one.index for one in faults] == [1, 2]
    assert rows.next_request(wait=True) is None and rows.is_exhausted
    assert (rows.num_rows, rows.num_requests) == (4, 2)


def test_a_row_is_done_with_its_last_sample():
    rows, _ = job([row(0, n=3)])
    samples = [rows.next_request(wait=True) for _ in range(3)]
    assert rows.finish(finished(samples[2])) is None
    assert rows.finish(finished(samples[0])) is None
    assert rows.name_of(0) == "r0"
    done = rows.finish(finished(samples[1]))
    assert [request.request_id.sample for request in done.requests] == [0, 1, 2]
    assert rows.name_of(0) == "r0", "the table still shows it"


def test_what_is_unfinished_is_what_runs_and_what_was_not_read():
    rows, faults = job([row(0), row(1), row(2), fault(3), row(4)])
    first, second = rows.next_request(wait=True), rows.next_request(wait=True)
    rows.finish(finished(second))
    assert [one.index for one in rows.unfinished()] == [first.request_id.row, 2, 4]
    assert [one.index for one in faults] == [3]
    assert rows.num_rows == 5
    assert list(rows.unfinished()) == []


def test_a_pipe_gives_what_is_there_and_is_waited_for_when_asked():
    pipe, entered = Pipe(), []

    @contextmanager
    def waiting():
        entered.append("wait")
        pipe.give(row(1))
        yield

    rows, _ = job(pipe, is_live=True, waiting=waiting)
    assert rows.next_request(wait=False) is None and not rows.is_exhausted
    pipe.give(row(0))
    deadline = time.monotonic() + 30
    while (request := rows.next_request(wait=False)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert request.request_id.row == 0 and entered == []
    assert rows.next_request(wait=True).request_id.row == 1 and entered == ["wait"]
    pipe.give(StopIteration())


def test_patience_ends():
    pipe = Pipe()
    rows, _ = job(pipe, is_live=True, patience=lambda: 0.01)
    with pytest.raises(OutOfTime):
        rows.next_request(wait=True)
    pipe.give(row(0), StopIteration())
    assert [one.index for one in rows.unfinished()] == [0], "what still comes without a pause belongs to the job"


def test_an_error_of_the_reader_comes_out_where_the_row_would():
    pipe = Pipe()
    rows, _ = job(pipe, is_live=True)
    pipe.give(row(0), EngineError("the pipe broke"))
    assert rows.next_request(wait=True).request_id.row == 0
    with pytest.raises(EngineError, match="the pipe broke"):
        rows.next_request(wait=True)
