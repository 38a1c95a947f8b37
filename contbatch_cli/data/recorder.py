"""Turns what ends into records, one for each row, and counts them by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from contbatch_cli.core.request import FinishReason, Request
from contbatch_cli.core.stop import REPETITION_WINDOW, is_runaway
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.records import Completion, RecordOptions, cancelled_record, fault_record, row_record
from contbatch_cli.data.rows import Row, RowFault

Write = Callable[[int, bytes], None]


def _ran_away(request: Request) -> bool:
    return request.num_output_tokens >= REPETITION_WINDOW and is_runaway(request.output_ids)


class Recorder:
    """Writes each row's record with `write(index, line)`; `complete` gives a finished request's text."""

    def __init__(self, options: RecordOptions, write: Write, complete: Callable[[Request, Row], Completion]) -> None:
        self._options = options
        self._write = write
        self._complete = complete
        self.num_good = 0
        self.num_bad = 0
        self.num_cancelled = 0
        self.num_runaway = 0

    def fault(self, fault: RowFault) -> None:
        """The record of a row that cannot run."""
        self.num_bad += 1
        self._write(fault.index, fault_record(fault, self._options))

    def done(self, done: PreparedRow, metrics: Mapping[str, Any] | None = None) -> None:
        """The record of a row whose samples have all ended, well or not."""
        row, requests = done
        completions = [self._complete(request, row) for request in requests]
        if done.reason is FinishReason.ERROR:
            self.num_bad += 1
        else:
            self.num_good += 1
            self.num_runaway += any(map(_ran_away, requests))
        self._write(row.index, row_record(row, completions, self._options, metrics))

    def cancelled(self, row: Row, message: str) -> None:
        """The record of a row that a limit of the user's stopped."""
        self.num_cancelled += 1
        self._write(row.index, cancelled_record(row, message, self._options))
