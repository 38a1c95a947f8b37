"""The rows of a job on their way through it: read and prepared as they are needed, known by index until they are done."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from contbatch_cli.core.request import Request
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.rows import Row, RowFault

READ_AHEAD = 4096
"""Rows of a pipe that are read before they are asked for."""

PIPE_REST_S = 1.0
"""How long a pipe may be silent before the rest of it is no longer waited for, once the run is over."""

NAMES_KEPT = 4096
"""Names of ended rows that are remembered, for the table that shows the last iterations."""

ReadRow = Row | RowFault
RowId = str | int | None
Waiting = Callable[[], AbstractContextManager[None]]
Patience = Callable[[], "float | None"]


class OutOfTime(Exception):
    """A row was waited for as long as `patience` allows."""


def forever() -> None:
    """The patience without a limit."""


class RowReader:
    """Rows one at a time. A live one reads in a thread, so that the engine does not wait for a slow pipe.

    An exception of the iterator is raised by the call that comes to it. `waiting` is entered for a wait that may be long, and
    `patience` gives the most seconds that it may take, None for any number; OutOfTime is raised after them.
    """

    def __init__(
        self, rows: Iterator[ReadRow], is_live: bool, waiting: Waiting = nullcontext, patience: Patience = forever
    ) -> None:
        self.is_live = is_live
        self.is_exhausted = False
        self._rows = rows
        self._waiting = waiting
        self._patience = patience
        self._queue: queue.Queue[ReadRow | BaseException | None] = queue.Queue(READ_AHEAD)
        if is_live:
            threading.Thread(target=self._read_all, name="row-reader", daemon=True).start()

    def next_row(self, wait: bool) -> ReadRow | None:
        """The next row; None at the end, or, without `wait`, when a pipe has none yet."""
        row = self._take(wait) if self.is_live else next(self._rows, None)
        self.is_exhausted = self.is_exhausted or (row is None and (wait or not self.is_live))
        return row

    def rest(self) -> Iterator[ReadRow]:
        """All rows to the end; of a pipe those that come without a pause of more than `PIPE_REST_S`."""
        self._patience = lambda: PIPE_REST_S
        try:
            while (row := self.next_row(wait=True)) is not None:
                yield row
        except OutOfTime:
            return

    def _take(self, wait: bool) -> ReadRow | None:
        if self.is_exhausted:
            return None
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            if not wait:
                return None
            item = self._waited_for()
        if isinstance(item, BaseException):
            raise item
        self.is_exhausted = item is None
        return item

    def _waited_for(self) -> ReadRow | BaseException | None:
        with self._waiting():
            seconds = self._patience()
            try:
                return self._queue.get(timeout=None if seconds is None else max(seconds, 0.0))
            except queue.Empty:
                raise OutOfTime from None

    def _read_all(self) -> None:
        try:
            for row in self._rows:
                self._queue.put(row)
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)


class JobRows:
    """The source of a job's requests, and the memory of the rows they came from.

    `prepare` makes a row's requests or its fault; faults go to `on_fault` when they are met.
    """

    def __init__(
        self,
        reader: RowReader,
        prepare: Callable[[Row], PreparedRow | RowFault],
        on_fault: Callable[[RowFault], None],
    ) -> None:
        self._reader = reader
        self._prepare = prepare
        self._on_fault = on_fault
        self._samples: deque[Request] = deque()
        self._open: dict[int, PreparedRow] = {}
        self._names: OrderedDict[int, RowId] = OrderedDict()
        self.num_rows = 0
        self.num_requests = 0

    @property
    def is_live(self) -> bool:
        return self._reader.is_live

    @property
    def is_exhausted(self) -> bool:
        return self._reader.is_exhausted and not self._samples

    @property
    def is_read(self) -> bool:
        """Whether the inputs were read to the end, so that `num_rows` and `num_requests` are the job's."""
        return self._reader.is_exhausted

    def name_of(self, index: int) -> RowId:
        """The user's name for a row that runs, or has ended lately."""
        return self._open[index].row.id if index in self._open else self._names.get(index)

    def next_request(self, wait: bool) -> Request | None:
        """The next sample of the next good row."""
        while not self._samples:
            row = self._reader.next_row(wait)
            if row is None:
                return None
            self._take(row)
        return self._samples.popleft()

    def _take(self, row: ReadRow) -> None:
        self.num_rows += 1
        prepared = self._prepare(row) if isinstance(row, Row) else row
        if isinstance(prepared, RowFault):
            self._on_fault(prepared)
            return
        self.num_requests += len(prepared.requests)
        self._open[row.index] = prepared
        self._samples.extend(prepared.requests)

    def finish(self, request: Request) -> PreparedRow | None:
        """Take a finished request back; its row when it was the last of it.

        Of samples that end in one step the first to be taken back gives the row.
        """
        index = request.request_id.row
        done = self._open.get(index)
        if done is None or (len(done.requests) > 1 and any(sample.finish is None for sample in done.requests)):
            return None
        self._names[index] = done.row.id
        if len(self._names) > NAMES_KEPT:
            self._names.popitem(last=False)
        return self._open.pop(index)

    def unfinished(self) -> Iterator[Row]:
        """The rows that were begun and have no record, then all that were not read yet (see `RowReader.rest`). Ends the job."""
        for row in sorted(self._open):
            yield self._open[row].row
        self._open.clear()
        self._samples.clear()
        for unread in self._reader.rest():
            self.num_rows += 1
            if isinstance(unread, Row):
                yield unread
            else:
                self._on_fault(unread)
