"""Writing records: one unbuffered append each, so that a record is on its way to the disk before the next row goes on.

    record -> write(2) to a descriptor opened for appending -> at most once a second fsync

A write that fails leaves no half record behind in a regular file. Under `--order input` a record whose turn has not come waits
in OUTPUT.pending, written in the same way; only its place and length are remembered.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from contbatch_cli.data.output_file import OutputFile, pending_path
from contbatch_cli.data.row_table import RowTable
from contbatch_cli.errors import ContbatchError, EngineError, ExitStatus

SYNC_INTERVAL_S = 1.0
_READ_BYTES = 65536
_PENDING_KEPT_BYTES = 16 * 1024 * 1024
Clock = Callable[[], float]
Order = Literal["completion", "input"]


class ReaderGone(ContbatchError):
    """The reader of the output went away (a closed pipe): the run ends quietly."""

    exit_status = ExitStatus.SIGPIPE


class RecordWriter(Protocol):
    """Takes the record of each row, once. Raises EngineError when it cannot be kept, ReaderGone when nobody reads it."""

    def write(self, index: int, record: bytes) -> None: ...

    def close(self) -> None: ...


class AppendFile:
    """Appends whole records to a descriptor: all of a record or, in a regular file, nothing of it."""

    def __init__(self, descriptor: int, name: str, clock: Clock) -> None:
        self.descriptor = descriptor
        self._name = name
        self._clock = clock
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._synced_at = clock()
        self._is_dirty = False

    def append(self, record: bytes) -> None:
        """Raises EngineError, the file cut back to its last whole record, or ReaderGone."""
        written = 0
        try:
            while written < len(record):
                written += self._write_some(record[written:] if written else record)
        except BaseException as error:
            self._cut_back(written)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone(f"{self._name}: its reader went away") from error
            if isinstance(error, OSError):
                raise self._failure(error) from error
            raise
        self._is_dirty = True
        if self._clock() - self._synced_at >= SYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Waits until all that was written is on the disk; nothing to wait for where the output is no file."""
        if self._is_regular and self._is_dirty:
            try:
                os.fsync(self.descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
                    raise self._failure(error) from error
            self._is_dirty = False
        self._synced_at = self._clock()

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self.descriptor, data)
        except BlockingIOError:  # a pipe that its other end made non-blocking, and full
            select.select([], [self.descriptor], [])
            return 0

    def _cut_back(self, written: int) -> None:
        """Takes back the part of a record that was written: the position stands behind it."""
        if self._is_regular and written:
            end = os.lseek(self.descriptor, 0, os.SEEK_CUR) - written
            os.ftruncate(self.descriptor, end)
            os.lseek(self.descriptor, end, os.SEEK_SET)

    def _failure(self, error: OSError) -> EngineError:
        how = "--resume goes on" if self._is_regular else "only a file (-o FILE) can be gone on with"
        return EngineError(f"{self._name}: {error.strerror}; the records in it are whole, {how}")


class Appender(Protocol):
    """Where whole records go."""

    def append(self, record: bytes) -> None: ...

    def sync(self) -> None: ...


class CompletionOrderWriter:
    """Records in the order in which they come."""

    def __init__(self, file: Appender) -> None:
        self._file = file

    def write(self, index: int, record: bytes) -> None:
        self._file.append(record)

    def close(self) -> None:
        self._file.sync()


class InputOrderWriter:
    """Records in the order of their indices: each waits in the pending file until all before it have come.

    `first` is the index whose turn it is; `waiting` are records that are already in the pending file (`offset + 1` by index).
    Holds 8 bytes for each row between the first that is missing and the last that has come. Closing removes the pending file
    at `path` once nothing waits in it.
    """

    def __init__(
        self,
        file: Appender,
        pending: AppendFile,
        first: int = 0,
        waiting: RowTable | None = None,
        path: Path | None = None,
    ) -> None:
        self._file = file
        self._pending = pending
        self._path = path
        self._next = first
        self._offsets = waiting or RowTable()
        self._pending_size = os.fstat(pending.descriptor).st_size
        self._num_waiting = sum(1 for _ in self._offsets.indices())

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def write(self, index: int, record: bytes) -> None:
        assert index >= self._next and not self._offsets[index], f"row {index} has its record already"
        if index != self._next:
            self._pending.append(record)
            self._offsets[index] = self._pending_size + 1
            self._pending_size += len(record)
            self._num_waiting += 1
            return
        self._file.append(record)
        self._next += 1
        self.move_waiting()

    def move_waiting(self) -> None:
        """Appends to the output whatever has its turn now."""
        while self._num_waiting and (place := self._offsets[self._next]):
            self._file.append(_line_at(self._pending.descriptor, place - 1))
            self._num_waiting -= 1
            self._next += 1
            if self._next % 4096 == 0:
                self._offsets.drop_before(self._next)
        if not self._num_waiting and self._pending_size > _PENDING_KEPT_BYTES:
            self._empty_pending()

    def close(self) -> None:
        self._pending.sync()
        self._file.sync()
        if not self._num_waiting and self._path is not None:
            self._path.unlink(missing_ok=True)
        os.close(self._pending.descriptor)

    def _empty_pending(self) -> None:
        """Only once the output is on the disk: a power cut finds each record in one of the two."""
        self._file.sync()
        os.ftruncate(self._pending.descriptor, 0)
        os.lseek(self._pending.descriptor, 0, os.SEEK_SET)
        self._pending_size = 0


class HeldRecords:
    """Records that come before the output may be touched, kept in a nameless temporary file until they are released."""

    def __init__(self, clock: Clock) -> None:
        self._file = _nameless_file(clock)
        self._indices = array("q")

    def write(self, index: int, record: bytes) -> None:
        self._file.append(record)
        self._indices.append(index)

    def release(self, writer: RecordWriter) -> None:
        """Hands all of them on, in the order in which they came."""
        offset = 0
        for index in self._indices:
            record = _line_at(self._file.descriptor, offset)
            writer.write(index, record)
            offset += len(record)

    def close(self) -> None:
        os.close(self._file.descriptor)


def _line_at(descriptor: int, offset: int) -> bytes:
    """The line that begins at `offset`, with its newline."""
    pieces: list[bytes] = []
    while piece := os.pread(descriptor, _READ_BYTES, offset):
        end = piece.find(b"\n") + 1
        if end:
            return b"".join([*pieces, piece[:end]])
        pieces.append(piece)
        offset += len(piece)
    raise EngineError(f"a record that waited for its turn is cut off at byte {offset:,}")


def standard_output_writer(descriptor: int, order: Order, clock: Clock) -> RecordWriter:
    """Records to a descriptor that this process does not own, usually a pipe or a terminal. Nothing of it can be resumed:
    under `--order input` the waiting records are in a nameless temporary file.
    """
    return unowned_writer(AppendFile(descriptor, "standard output", clock), order, clock)


def unowned_writer(file: Appender, order: Order, clock: Clock) -> RecordWriter:
    """The same for records that something else appends: a view that stands on the same terminal."""
    return CompletionOrderWriter(file) if order == "completion" else InputOrderWriter(file, _nameless_file(clock))


def _nameless_file(clock: Clock) -> AppendFile:
    with tempfile.TemporaryFile(buffering=0) as nameless:
        return AppendFile(os.dup(nameless.fileno()), "the temporary file of waiting records", clock)


def output_writer(
    output: OutputFile, order: Order, clock: Clock, first: int = 0, waiting: RowTable | None = None
) -> RecordWriter:
    """Records to an output; `first` and `waiting` are what a resumed run found (see `resume`)."""
    file = AppendFile(output.descriptor, str(output.path), clock)
    if order == "completion":
        return CompletionOrderWriter(file)
    if not output.is_regular:
        return standard_output_writer(output.descriptor, order, clock)
    path = pending_path(output.path)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return InputOrderWriter(file, AppendFile(descriptor, str(path), clock), first, waiting, path)
