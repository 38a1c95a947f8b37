"""Where a run's records go: a locked file, begun or gone on with, or standard output."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from contbatch_cli.build import Inputs
from contbatch_cli.cli.live import STDERR, STDIN, STDOUT
from contbatch_cli.data.job_rows import ReadRow
from contbatch_cli.data.output_file import STANDARD_OUTPUT, OpenMode, OutputFile, open_output
from contbatch_cli.data.readers import read_rows
from contbatch_cli.data.resume import ResumePlan, resume_output, start_output
from contbatch_cli.data.writer import (
    HeldRecords,
    Order,
    ReaderGone,
    RecordWriter,
    output_writer,
    standard_output_writer,
    unowned_writer,
)
from contbatch_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the command line says of the output."""

    name: str = STANDARD_OUTPUT
    order: Order = "completion"
    resume: bool = False
    overwrite: bool = False
    rerun_changed: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other")
        if self.rerun_changed and not self.resume:
            raise UsageError("--rerun-changed needs --resume")
        if self.name == STANDARD_OUTPUT and self.resume:
            raise UsageError("--resume needs -o FILE: standard output cannot be resumed")

    @property
    def mode(self) -> OpenMode:
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"


class Output:
    """The opened output. `begin` comes before the first record, `settle` when nothing is left that can fail at the start.

    What an earlier run left and `--overwrite` gives up is there until then.
    """

    def __init__(self, options: OutputOptions, inputs: Inputs) -> None:
        self._options = options
        self._inputs = inputs
        self._file: OutputFile | None = None
        self._writer: RecordWriter | None = None
        self._settings: Mapping[str, Any] = {}
        self._held: HeldRecords | None = None
        self.plan = ResumePlan()
        if options.name != STANDARD_OUTPUT:
            self._file = open_output(options.name, options.mode, inputs.sources)

    def begin(self, settings: Mapping[str, Any], to_standard_output: Callable[[bytes], None], descriptor: int) -> None:
        """Repair what an earlier run left, write the meta file, and be ready for records.

        `to_standard_output` writes to a terminal that `descriptor`, the run's own standard output, shares with the view.
        """
        order, self._settings = self._options.order, settings
        if self._file is None:
            if os.isatty(descriptor):
                self._writer = unowned_writer(TerminalAppender(to_standard_output), order, time.monotonic)
            else:
                self._writer = standard_output_writer(descriptor, order, time.monotonic)
            return
        if self._options.resume:
            self.plan = resume_output(
                self._file,
                settings,
                order,
                None if self._inputs.are_live else read_rows(self._inputs.sources, self._inputs.options),
                self._options.rerun_changed,
                self._inputs.options.limit is None,
            )
        elif self._options.overwrite:
            self._writer = self._held = HeldRecords(time.monotonic)
            return
        else:
            start_output(self._file, settings)
        self._writer = self._file_writer(self._file)

    def settle(self) -> None:
        """The run can go on: with `--overwrite` the old records go now, and those that came meanwhile take their place."""
        if self._held is not None:
            assert self._file is not None, "only a file is overwritten"
            start_output(self._file, self._settings)
            held, self._held = self._held, None
            self._writer = self._file_writer(self._file)
            held.release(self._writer)
            held.close()

    def _file_writer(self, file: OutputFile) -> RecordWriter:
        return output_writer(file, self._options.order, time.monotonic, self.plan.first, self.plan.waiting)

    def remaining(self, rows: Iterator[ReadRow]) -> Iterator[ReadRow]:
        """The rows that have no good record yet."""
        return self.plan.remaining(rows) if self._options.resume else rows

    def write(self, index: int, record: bytes) -> None:
        assert self._writer is not None, "a record before the output was begun"
        self._writer.write(index, record)

    def close(self) -> None:
        """Everything that was written is on the disk; the lock is let go."""
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()


class TerminalAppender:
    """Records to a terminal, through the view that may stand on it."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def append(self, record: bytes) -> None:
        try:
            self._write(record)
        except OSError as error:
            raise ReaderGone("standard output: its terminal went away") from error

    def sync(self) -> None:
        """A terminal has nothing to wait for."""


def claim_standard_output(options: OutputOptions) -> int:
    """A descriptor for records alone: what else is printed to descriptor 1, by whichever library, goes to standard error.

    Standard descriptors that are closed are opened to nowhere first, so that no file of the run gets their numbers. Raises
    UsageError when records should go to a closed one.
    """
    if options.name == STANDARD_OUTPUT and not _is_open(STDOUT):
        raise UsageError("standard output is closed: use -o FILE")
    if not _is_open(STDOUT):
        sys.stdout = sys.stderr
    for descriptor in (STDIN, STDOUT, STDERR):
        if not _is_open(descriptor):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    own = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    return own


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
