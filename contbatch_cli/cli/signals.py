"""Signals: the first one lets the run end in order, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from contbatch_cli.errors import ExitStatus

SIGNALS = {
    signal.SIGINT: ExitStatus.INTERRUPTED,
    signal.SIGTERM: ExitStatus.SIGTERM,
    signal.SIGHUP: ExitStatus.SIGHUP,
}


class Interrupted(BaseException):
    """Raised by a signal while nothing is under way that must not be cut off."""


class Interrupts:
    """Remembers the first signal in `status`, for the loop to ask between two iterations.

    Within `may_raise` (waiting for input, loading the model) the signal raises Interrupted instead of waiting to be asked.
    """

    def __init__(self) -> None:
        self.status: ExitStatus | None = None
        self._may_raise = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def may_raise(self) -> Iterator[None]:
        """A signal that comes within, or came before, raises Interrupted."""
        outer, self._may_raise = self._may_raise, True
        try:
            if self.status is not None:
                raise Interrupted
            yield
        finally:
            self._may_raise = outer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None:
            os._exit(int(SIGNALS[signal.Signals(number)]))
        self.status = SIGNALS[signal.Signals(number)]
        if self._may_raise:
            raise Interrupted
