"""One error family and the exit statuses. A bad row fails alone; a bad config ends the run before a model is loaded."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    OK = 0
    ROW_ERRORS = 1
    USAGE = 2
    FAILED = 3
    SIGHUP = 129
    INTERRUPTED = 130
    SIGPIPE = 141
    SIGTERM = 143


class ContbatchError(Exception):
    """An error whose message is for the user: printed in one line, without a traceback."""

    exit_status = ExitStatus.FAILED


class UsageError(ContbatchError, ValueError):
    """A wrong command line, config or model: nothing was run."""

    exit_status = ExitStatus.USAGE


class EngineError(ContbatchError):
    """The engine or the disk failed in mid-run; records already written are good."""


class RowError(ContbatchError, ValueError):
    """One row cannot be run. `code` is one of the contract's stable error codes."""

    exit_status = ExitStatus.ROW_ERRORS

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
