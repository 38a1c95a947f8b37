"""`--trace FILE`: the schedule of a run, a line an iteration, written beside its records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from contbatch_cli.errors import UsageError


class TraceFile:
    """An opened trace. Without a path nothing is written; what the file held before goes with the first line.

    The trace is a by-product: when the disk does not take a line, `say` is told so once, and the run goes on without it. Raises
    UsageError when the file cannot be opened or is one of `others`, the run's inputs and its output.
    """

    def __init__(self, path: Path | None, others: Iterable[str], say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._file: TextIO | None = None
        self._is_begun = False
        if path is None:
            return
        for other in others:
            if path.exists() and os.path.exists(other) and os.path.samefile(path, other):
                raise UsageError(f"--trace {path}: is {other}, an input or the output")
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--trace {path}: {error.strerror}") from None

    @property
    def is_wanted(self) -> bool:
        """Whether lines are still written: there is a path, and it took all lines so far."""
        return self._file is not None

    def write(self, line: str) -> None:
        assert self._file is not None, "a line for a trace that nobody wants"
        try:
            if not self._is_begun and self._path is not None and self._path.is_file():
                self._file.truncate(0)
            self._is_begun = True
            self._file.write(line)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is still buffered."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        assert file is not None, "a trace is given up once"
        with suppress(OSError):  # it still holds what was not taken, and fails again
            file.close()
        self._say(f"--trace {self._path}: {error.strerror}; the trace is incomplete, the records are not touched by it")
