"""Signals: the first one lets the run end in order, the second ends the process at once, whatever it is doing."""

from __future__ import annotations

import os
import signal
import threading
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

    Within `may_raise` (waiting for input, loading the model) the signal raises Interrupted instead of waiting to be asked. The
    second signal is taken by a thread of its own: Python's handlers wait for the main thread, which may be deep in a long step.
    """

    def __init__(self) -> None:
        self.status: ExitStatus | None = None
        self._may_raise = False
        self._previous: dict[int, object] = {}
        self._wakeup = -1
        self._previous_wakeup = -1

    def __enter__(self) -> Interrupts:
        read_end, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        threading.Thread(target=_exit_at_the_second, args=(read_end,), name="signals", daemon=True).start()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._wakeup)

    @contextmanager
    def may_raise(self) -> Iterator[None]:
        """A signal that comes within, or came before, raises Interrupted.

        It does so whatever the code within makes of that exception: a library may report another in its place (compiled code
        raises SystemError for one that came while it returned), or swallow it (finalizers and callbacks do).
        """
        self.refuse()
        outer, self._may_raise = self._may_raise, True
        try:
            yield
        except Exception:
            self.refuse()
            raise
        finally:
            self._may_raise = outer
        self.refuse()

    def refuse(self) -> None:
        """Raises Interrupted when a signal has come."""
        if self.status is not None:
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None:
            return
        self.status = SIGNALS[signal.Signals(number)]
        if self._may_raise:
            raise Interrupted


def _exit_at_the_second(read_end: int) -> None:
    """Reads the numbers of the signals as they come, until the other end is closed."""
    num_seen = 0
    while numbers := os.read(read_end, 64):
        for number in numbers:
            if number in SIGNALS:
                num_seen += 1
                if num_seen > 1:
                    os._exit(int(SIGNALS[signal.Signals(number)]))
    os.close(read_end)
