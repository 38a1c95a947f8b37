"""A few lines at the cursor of a terminal that are redrawn in place, with other output kept above them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

_UP = "\x1b[{}A"
_ERASE_LINE = "\x1b[K"
_ERASE_BELOW = "\x1b[J"
_WRAP_OFF = "\x1b[?7l"
_WRAP_ON = "\x1b[?7h"
_RESET = "\x1b[0m"


class Line(NamedTuple):
    """A line as it goes to the terminal, and the number of cells it takes there."""

    ansi: str
    width: int


class TerminalSize(NamedTuple):
    columns: int
    rows: int


def terminal_size(fd: int) -> TerminalSize:
    """The size now: asked for at each drawing, so that a resize needs no signal handler."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 80, 24
    return TerminalSize(columns or 80, rows or 24)


def write_all(fd: int, data: bytes) -> None:
    """All bytes, whatever a single write takes. Raises OSError (BrokenPipeError when the reader went away)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_if_read(fd: int, data: bytes) -> None:
    """The same for what is shown to people: a job goes on when nobody looks at it any more."""
    with suppress(OSError):
        write_all(fd, data)


def terminals_reflow() -> bool:
    """Whether this terminal re-wraps long lines when it gets narrower; xterm is the one in use that cuts them."""
    return "XTERM_VERSION" not in os.environ


class LiveRegion:
    """The region's last line holds the cursor. It is never taller or wider than the screen, so a redraw never scrolls.

    When the terminal has got narrower since, it has re-wrapped the old lines; the number of rows that they take then is
    reckoned from their widths, so that exactly those are erased.
    """

    def __init__(self, fd: int, size: Callable[[], TerminalSize], reflows: bool = True) -> None:
        self._fd = fd
        self._size = size
        self._reflows = reflows
        self._widths: list[int] = []
        self._after_text = False

    @property
    def is_shown(self) -> bool:
        return bool(self._widths)

    def draw(self, lines: Sequence[Line]) -> None:
        """Replaces the region by these lines, the last ones when the screen is lower; each must be narrower than the screen."""
        size = self._size()
        shown = list(lines)[-size.rows :]
        body = (_ERASE_LINE + "\r\n").join(line.ansi + _RESET for line in shown)
        self._write(_WRAP_OFF + self._to_top(size) + body + _ERASE_BELOW + _WRAP_ON)
        self._widths = [line.width for line in shown]

    def clear(self) -> None:
        """Erases the region; the cursor is then where the region began."""
        if self._widths:
            self._write(self._to_top(self._size()) + _ERASE_BELOW)
            self._widths = []

    def print_above(self, fd: int, data: bytes) -> None:
        """Erases the region and writes the data, unchanged, in its place; the region is to be drawn again behind it."""
        self.clear()
        (write_if_read if fd == self._fd else write_all)(fd, data)
        self._after_text = not data.endswith(b"\n")

    def _to_top(self, size: TerminalSize) -> str:
        start = "\r\n" if self._after_text else "\r"
        self._after_text = False
        up = min(self._rows_taken(size.columns), size.rows) - 1
        return start + (_UP.format(up) if up > 0 else "")

    def _rows_taken(self, columns: int) -> int:
        if not self._reflows:
            return len(self._widths)
        return sum(max(1, -(-width // columns)) for width in self._widths)

    def _write(self, text: str) -> None:
        write_if_read(self._fd, text.encode("utf-8", "backslashreplace"))
