"""`--trace FILE`: the schedule of a run, a line an iteration, written beside its records."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from contbatch_cli.errors import EngineError, UsageError


class TraceFile:
    """An opened trace. Without a path nothing is written.

    Raises UsageError when the file cannot be written or is one of `others`, the run's inputs and its output, and EngineError
    when the disk does not take a line.
    """

    def __init__(self, path: Path | None, others: Iterable[str]) -> None:
        self._path = path
        self._file = None
        if path is None:
            return
        for other in others:
            if path.exists() and os.path.exists(other) and os.path.samefile(path, other):
                raise UsageError(f"--trace {path}: is {other}, an input or the output")
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--trace {path}: {error.strerror}") from None

    @property
    def is_wanted(self) -> bool:
        return self._file is not None

    def write(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(line)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Writes what is still buffered."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise self._failure(error) from error

    def _failure(self, error: OSError) -> EngineError:
        return EngineError(f"--trace {self._path}: {error.strerror}; the records are whole")
