"""What a running job shows on standard error: a live table on a terminal, a line now and then elsewhere, or nothing.

The consumer of the engine feeds `Metrics` first; then it hands the view the iteration's records, where records go to standard
output, and last the iteration: the table is then drawn right below them.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rich.console import Console, Group
from rich.text import Text

from contbatch_cli.cli.figures import bar, clock_time, crop, duration, join_fitting, printable, three_figures
from contbatch_cli.cli.iteration_columns import row_text, table_columns, title_text
from contbatch_cli.cli.live_region import (
    Line,
    LiveRegion,
    TerminalSize,
    terminal_size,
    terminals_reflow,
    write_all,
    write_if_read,
)
from contbatch_cli.cli.summary import RunSummary, summary_lines
from contbatch_cli.engine import IterationReport
from contbatch_cli.metrics import Metrics, RowCounts
from contbatch_cli.trace import NameOf, iteration_of, no_name
from contbatch_cli.units import counted

REDRAWS_PER_S = 8
COST_SHARE = 0.01
"""The share of the run's time that drawing may take: a slow terminal is drawn less often."""
PLAIN_INTERVAL_S = 10.0
MAX_TABLE_ROWS = 10
STDIN, STDOUT, STDERR = 0, 1, 2
COUNTED_BY = 256
"""`told` tells of every so many items."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What is known before the first iteration: lines to leave on the screen, and the number of rows where it is known."""

    lines: tuple[str, ...]
    rows: int | None = None


class View(Protocol):
    """Shows a run. All calls come from the thread that runs the engine."""

    def stage(self, name: str, progress: str = "") -> None:
        """What goes on, and how far it is, while there is no iteration yet; it stands until something else is shown."""

    def start(self, header: RunHeader) -> None: ...

    def iteration(self, report: IterationReport) -> None:
        """One iteration is done; the metrics have it already."""

    def record(self, data: bytes) -> None:
        """Writes to standard output, byte for byte, above whatever the view shows. Raises BrokenPipeError."""

    def message(self, text: str) -> None:
        """A line for people, kept on the screen (a warning)."""

    def finish(self, summary: RunSummary) -> None:
        """The run is over: leaves the summary."""

    def close(self) -> None:
        """Takes the view off the screen; may be called twice, and after `finish`. For a `finally`."""


def told(view: View, name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; the view tells how many of them were taken so far."""
    for number, item in enumerate(items, 1):
        if number % COUNTED_BY == 0:
            view.stage(name, f"{number:,}")
        yield item


def stage_text(name: str, progress: str) -> str:
    return f"{name}: {progress}" if progress else f"{name} ..."


MoreLines = Callable[[], list[str]]
"""Lines that stand below the state of the run, such as one for each replica."""


def no_lines() -> list[str]:
    return []


def make_view(
    metrics: Metrics,
    *,
    quiet: bool = False,
    live: bool | None = None,
    name_of: NameOf = no_name,
    fds: tuple[int, int] = (STDOUT, STDERR),
    more_lines: MoreLines = no_lines,
) -> View:
    """The view for these settings: `live` None means live when standard error is a terminal that can move its cursor."""
    stdout, stderr = fds
    if quiet:
        return QuietView(stdout)
    if live is False or not _can_draw(stderr):
        return PlainView(metrics, stdout, stderr)
    return LiveView(metrics, name_of, stdout, stderr, more_lines=more_lines)


def _can_draw(fd: int) -> bool:
    return os.isatty(fd) and os.environ.get("TERM", "") not in ("dumb", "unknown", "") and sys.platform != "win32"


def _drawing_console() -> Console:
    """Lays out text for standard error's encoding. It writes to nowhere: Rich writes an empty text even when it captures."""
    nowhere = io.TextIOWrapper(io.BytesIO(), encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
    return Console(file=nowhere, force_terminal=True, highlight=False, markup=False)


def _same_terminal(one: int, other: int) -> bool:
    if not (os.isatty(one) and os.isatty(other)):
        return False
    return os.fstat(one).st_rdev == os.fstat(other).st_rdev


class QuietView:
    """Nothing but records."""

    def __init__(self, stdout: int = STDOUT) -> None:
        self._stdout = stdout

    def stage(self, name: str, progress: str = "") -> None:
        """Nothing to show."""

    def start(self, header: RunHeader) -> None:
        """Nothing to show."""

    def iteration(self, report: IterationReport) -> None:
        """Nothing to show."""

    def record(self, data: bytes) -> None:
        write_all(self._stdout, data)

    def message(self, text: str) -> None:
        """Nothing to show: quiet means errors only, and those are the caller's."""

    def finish(self, summary: RunSummary) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to take away."""


class PlainView:
    """Lines without control codes: the header, progress about every ten seconds and at the end, the summary."""

    def __init__(
        self, metrics: Metrics, stdout: int = STDOUT, stderr: int = STDERR, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._stdout = stdout
        self._stderr = stderr
        self._clock = clock
        self._due = clock() + PLAIN_INTERVAL_S
        self._last: IterationReport | None = None

    def stage(self, name: str, progress: str = "") -> None:
        if self._last is None and self._is_due():
            self.message(stage_text(name, progress))

    def start(self, header: RunHeader) -> None:
        for line in header.lines:
            self.message(line)

    def iteration(self, report: IterationReport) -> None:
        self._last = report
        if self._is_due():
            self._progress(report)

    def _is_due(self) -> bool:
        """Whether the next of the lines that come now and then may be written, which it then is."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + PLAIN_INTERVAL_S
        return True

    def record(self, data: bytes) -> None:
        write_all(self._stdout, data)

    def message(self, text: str) -> None:
        write_if_read(self._stderr, (printable(text) + "\n").encode("utf-8", "backslashreplace"))

    def finish(self, summary: RunSummary) -> None:
        if self._last is not None:
            self._progress(replace(self._last, num_running=0, num_waiting=0))
        for label, text in summary_lines(summary):
            self.message(f"{label:<9} {text}")

    def close(self) -> None:
        """Nothing to take away."""

    def _progress(self, report: IterationReport) -> None:
        self.message(", ".join(progress_words(self._metrics, report)))


def progress_words(metrics: Metrics, report: IterationReport) -> list[str]:
    """`40/192 done` (rows), speed, time left, what runs and waits (requests), tokens: the most wanted first."""
    snapshot = metrics.snapshot()
    words = [_done_words(metrics.rows), f"{three_figures(snapshot.recent_tokens_per_s)} tokens/s"]
    if metrics.total_requests is not None:
        words.append(f"{clock_time(snapshot.time_left_s)} left")
    words += [f"{report.num_running:,} running", f"{report.num_waiting:,} waiting"]
    return [*words, counted(snapshot.output_tokens, "output token")]


def _done_words(rows: RowCounts) -> str:
    done = f"{rows.done:,}" if rows.total is None else f"{rows.done:,}/{rows.total:,}"
    return f"{done} done" + (f" ({rows.bad:,} bad)" if rows.bad else "")


class LiveView:
    """The last iterations as a table that is redrawn in place, the run's state below it; see `LiveRegion` for how.

    Redrawn at most eight times a second, and so seldom that drawing takes about one hundredth of the time. Records that come
    while the table stands on the same terminal wait for the next redraw, so that the table does not flicker.
    """

    def __init__(
        self,
        metrics: Metrics,
        name_of: NameOf = no_name,
        stdout: int = STDOUT,
        stderr: int = STDERR,
        clock: Callable[[], float] = time.monotonic,
        more_lines: MoreLines = no_lines,
    ) -> None:
        self._metrics = metrics
        self._name_of = name_of
        self._stdout = stdout
        self._stderr = stderr
        self._clock = clock
        self._shares_terminal = _same_terminal(stdout, stderr)
        self._region = LiveRegion(stderr, lambda: terminal_size(stderr), terminals_reflow())
        self._table = LiveTable(metrics, name_of, _drawing_console(), more_lines)
        self._recent: deque[IterationReport] = deque(maxlen=MAX_TABLE_ROWS)
        self._stage = ("", "")
        self._pending: list[bytes] = []
        self._due = clock()

    def stage(self, name: str, progress: str = "") -> None:
        if self._recent:
            return
        is_new = name != self._stage[0]
        self._stage = (name, progress)
        if is_new or self._clock() >= self._due:
            self._draw()

    def start(self, header: RunHeader) -> None:
        for line in header.lines:
            self.message(line)

    def iteration(self, report: IterationReport) -> None:
        self._recent.append(report)
        if self._clock() >= self._due:
            self._draw()

    def record(self, data: bytes) -> None:
        if not self._shares_terminal:
            write_all(self._stdout, data)
            return
        self._pending.append(data)
        if not self._region.is_shown:
            self._flush_records()
        elif self._clock() >= self._due:
            self._draw()

    def message(self, text: str) -> None:
        self._flush_records()
        self._region.print_above(self._stderr, (printable(text) + "\n").encode("utf-8", "backslashreplace"))

    def finish(self, summary: RunSummary) -> None:
        self.close()
        for label, text in summary_lines(summary):
            self.message(f"{label:<9} {text}")

    def close(self) -> None:
        self._flush_records()
        self._region.clear()
        self._recent.clear()

    def _flush_records(self) -> None:
        if self._pending:
            data, self._pending = b"".join(self._pending), []
            self._region.print_above(self._stdout, data)

    def _draw(self) -> None:
        began = self._clock()
        self._flush_records()
        size = terminal_size(self._stderr)
        stage = stage_text(*self._stage)
        self._region.draw(self._table.lines(self._recent, size) if self._recent else self._table.line(stage, size))
        cost = self._clock() - began
        self._due = began + max(1 / REDRAWS_PER_S, cost / COST_SHARE)


class LiveTable:
    """Turns iterations and metrics into the lines of the table. Every line is at least one cell narrower than the terminal."""

    def __init__(self, metrics: Metrics, name_of: NameOf, console: Console, more_lines: MoreLines = no_lines) -> None:
        self._more_lines = more_lines
        self._metrics = metrics
        self._name_of = name_of
        self._console = console
        self._ascii_only = "utf" not in console.encoding.lower()
        self._rows: dict[int, Text] = {}
        self._width = 0

    def lines(self, recent: deque[IterationReport], size: TerminalSize) -> list[Line]:
        """The newest iterations that the screen has room for, padded to a height that stays the same, then the run's state."""
        width = max(size.columns - 1, 1)
        state = self._state(recent[-1], width)
        room = max(min(MAX_TABLE_ROWS, size.rows - len(state) - 2), 0)
        shown = list(recent)[max(len(recent) - room, 0) :] if room else []
        rows = [self._title(recent[-1], width), *self._table_rows(shown, width)] if room else []
        rows += [Text()] * (room - len(shown))
        return self._render([*rows, *state][-size.rows :], width)

    def line(self, text: str, size: TerminalSize) -> list[Line]:
        """A line of text in the place of the table."""
        width = max(size.columns - 1, 1)
        return self._render([Text(crop(text, width), "dim")], width)

    def _title(self, report: IterationReport, width: int) -> Text:
        return title_text(table_columns(width + 1, iteration_of(report, self._name_of), self._ascii_only), width)

    def _table_rows(self, reports: list[IterationReport], width: int) -> list[Text]:
        """A row is laid out once and kept while it is shown and the width stays."""
        if width != self._width:
            self._rows, self._width = {}, width
        kept = {report.iteration: self._rows.get(report.iteration) or self._row(report, width) for report in reports}
        self._rows = kept
        return list(kept.values())

    def _row(self, report: IterationReport, width: int) -> Text:
        iteration = iteration_of(report, self._name_of)
        return row_text(iteration, table_columns(width + 1, iteration, self._ascii_only), width)

    def _state(self, report: IterationReport, width: int) -> list[Text]:
        snapshot = self._metrics.snapshot()
        rows = self._metrics.rows
        first = Text()
        if rows.total and width >= 50:
            first.append(bar(rows.done / rows.total, 20 if width >= 100 else 10, self._ascii_only) + " ", "green")
        first.append(join_fitting(progress_words(self._metrics, report), width - first.cell_len))
        words = [f"ITL {duration(snapshot.itl_p50_s)}, p99 {duration(snapshot.itl_p99_s)}"]
        words += [f"budget use {snapshot.budget_use:.0%}", f"peak {counted(snapshot.peak_blocks, 'block')}"]
        words += [counted(snapshot.preemptions, "preemption")] if snapshot.preemptions else []
        words += [f"{counted(snapshot.cached_tokens, 'prompt token')} from the cache"] if snapshot.cached_tokens else []
        more = [Text(crop(line, width), "dim") for line in self._more_lines()]
        return [first, Text(join_fitting(words, width), "dim"), *more]

    def _render(self, texts: list[Text], width: int) -> list[Line]:
        for text in texts:
            text.truncate(width, overflow="crop")
        self._console.width = width + 1
        with self._console.capture() as capture:
            self._console.print(Group(*texts), no_wrap=True, overflow="crop", crop=False)
        rendered = capture.get().split("\n")
        return [Line(ansi, text.cell_len) for ansi, text in zip(rendered, texts, strict=False)]
