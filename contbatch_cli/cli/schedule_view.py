"""A schedule, rehearsed or replayed, in the terminal: a table of iterations, a summary, comparisons of several schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contbatch_cli.cli.figures import duration, three_figures
from contbatch_cli.cli.iteration_columns import row_text, table_columns, title_text
from contbatch_cli.cli.summary import metric_lines
from contbatch_cli.metrics import Metrics, MetricsSnapshot
from contbatch_cli.trace import TraceIteration
from contbatch_cli.units import counted

PIPED_WIDTH = 140
DEFAULT_ITERATIONS = 40
TIE = 0.01
"""Makespans that differ by less than this share count as equal: a rehearsal's clock is no better."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule to show. `clock` says where its times come from; `iterations` is walked once, then `notes` is asked.

    `overrides` are the config keys in which it differs from the job's config, as strings (`scheduler.token_budget`, `128`).
    """

    title: str
    header: dict[str, Any]
    iterations: Iterable[TraceIteration]
    clock: str
    notes: Callable[[], tuple[str, ...]] = tuple
    overrides: tuple[tuple[str, str], ...] = ()


class Result(NamedTuple):
    """A schedule that was walked to its end."""

    schedule: Schedule
    metrics: MetricsSnapshot
    notes: tuple[str, ...]


class _Console(Console):
    """Leaves a reader that went away to the program, which ends with the status for it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def open_console(file: Any = None) -> Console:
    """A console for tables: the terminal's width and colours, or wide and plain when piped. Text is never taken for markup."""
    console = _Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = _Console(file=file, highlight=False, markup=False, emoji=False, width=PIPED_WIDTH, color_system=None)
    return console


def walk(schedule: Schedule, consumers: Sequence[Callable[[TraceIteration], None]] = ()) -> Result:
    """Runs through a schedule once, handing each iteration to the consumers; memory stays flat."""
    metrics = Metrics()
    for iteration in schedule.iterations:
        metrics.observe_trace(iteration)
        for consume in consumers:
            consume(iteration)
    return Result(schedule, metrics.snapshot(), schedule.notes())


class IterationTable:
    """Prints the first iterations as they come and, at the end, the last ones; `limit` in all, None for every one."""

    def __init__(self, console: Console, limit: int | None = DEFAULT_ITERATIONS) -> None:
        self._console = console
        self._head = None if limit is None else limit - limit // 4
        self._tail: deque[TraceIteration] = deque(maxlen=0 if limit is None else limit // 4)
        self._num_seen = 0
        self._ascii_only = "utf" not in console.encoding.lower()

    def add(self, iteration: TraceIteration) -> None:
        if self._num_seen == 0:
            self._print(title_text(self._columns(iteration), self._console.width))
        self._num_seen += 1
        if self._head is None or self._num_seen <= self._head:
            self._print_row(iteration)
        else:
            self._tail.append(iteration)

    def finish(self) -> None:
        """Prints what was held back, behind a line that says how many are left out."""
        num_printed = self._num_seen if self._head is None else self._head
        left_out = self._num_seen - num_printed - len(self._tail)
        if left_out > 0:
            self._print(Text(f"        … {left_out:,} more (--iterations N shows more)", "dim"))
        for iteration in self._tail:
            self._print_row(iteration)
        self._tail.clear()

    def _columns(self, iteration: TraceIteration) -> Any:
        return table_columns(self._console.width, iteration, self._ascii_only)

    def _print_row(self, iteration: TraceIteration) -> None:
        self._print(row_text(iteration, self._columns(iteration), self._console.width))

    def _print(self, text: Text) -> None:
        text.rstrip()
        self._console.print(text, no_wrap=True, crop=False, overflow="ignore")


def print_summary(console: Console, result: Result) -> None:
    """The schedule's figures, what its clock is worth, and its notes."""
    lines = [("makespan", f"{duration(result.metrics.elapsed_s)} ({result.schedule.clock})")]
    lines += [("rows", f"{result.metrics.rows:,} done, at most {counted(result.metrics.peak_running, 'request')} at once")]
    lines += metric_lines(result.metrics)
    lines += [("note", note) for note in result.notes]
    console.print()
    for label, text in lines:
        console.print(Text.assemble((f"{label:<9} ", "bold"), text), soft_wrap=True)


class Measure(NamedTuple):
    """One measure of a comparison: its name, a short one for a column's title, its value (None when it has none), how it is
    written, and which way is better: -1 less, 1 more, 0 neither."""

    name: str
    short: str
    value: Callable[[MetricsSnapshot], float | None]
    write: Callable[[float], str]
    is_better: int


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


MEASURES = (
    Measure("makespan", "makespan", lambda m: m.elapsed_s, duration, -1),
    Measure("output tokens/s", "tokens/s", lambda m: m.output_tokens_per_s, three_figures, 1),
    Measure("ITL p50", "ITL p50", lambda m: m.itl_p50_s, duration, -1),
    Measure("ITL p99", "ITL p99", lambda m: m.itl_p99_s, duration, -1),
    Measure("ITL max", "ITL max", lambda m: m.itl_max_s, duration, -1),
    Measure("TTFT p50", "TTFT p50", lambda m: m.ttft_p50_s, duration, -1),
    Measure("TTFT p99", "TTFT p99", lambda m: m.ttft_p99_s, duration, -1),
    Measure("iterations", "iterations", lambda m: m.iterations, _count, -1),
    Measure("budget use", "use", lambda m: m.budget_use, _share, 0),
    Measure("peak blocks", "blocks", lambda m: m.peak_blocks, _count, 0),
    Measure("preemptions", "preempted", lambda m: m.preemptions, _count, -1),
    Measure("tokens computed again", "again", lambda m: m.recomputed_tokens, _count, -1),
    Measure("prefix hits, tokens", "hits", lambda m: m.cached_tokens, _count, 1),
)


def comparison_table(results: Sequence[Result], width: int = PIPED_WIDTH) -> Table:
    """One line a measure and one column a schedule; more than four schedules stand below one another. The best is marked `*`.

    Below one another, measures that are equal everywhere are left out, and the last ones where `width` cells do not hold all.
    """
    titles = [result.schedule.title for result in results]
    if len(results) <= 4:
        return _grid(titles, [measure.name for measure in MEASURES], [_marked_cells(measure, results) for measure in MEASURES])
    shown: list[tuple[str, list[Text]]] = []
    left = width - max(map(cell_len, titles)) - 2
    for measure in MEASURES:
        cells = _marked_cells(measure, results)
        if len({cell.plain for cell in cells}) == 1:
            continue
        left -= max(len(measure.short), *(cell.cell_len for cell in cells)) + 2
        if left < 0:
            break
        shown.append((measure.short, cells))
    columns = [cells for _, cells in shown]
    return _grid([name for name, _ in shown], titles, [[cells[row] for cells in columns] for row in range(len(results))])


def _grid(columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for name, row in zip(rows, cells, strict=True):
        table.add_row(Text(name), *row)
    return table


def _marked_cells(measure: Measure, results: Sequence[Result]) -> list[Text]:
    values = [measure.value(result.metrics) for result in results]
    known = [value for value in values if value is not None]
    best = None
    if measure.is_better and known and min(known) != max(known):
        best = max(known, key=lambda value: value * measure.is_better)
    return [_cell(measure, value, value is not None and value == best) for value in values]


def _cell(measure: Measure, value: float | None, is_best: bool) -> Text:
    if value is None:
        return Text("-")
    return Text(measure.write(value) + ("*" if is_best else " "), "bold green" if is_best else "")


def choose(results: Sequence[Result]) -> tuple[Result, str]:
    """The schedule to take and why: the least makespan; among those within 1 % of it, the least p99 ITL, then the first."""
    least = min(result.metrics.elapsed_s for result in results)
    near = [result for result in results if result.metrics.elapsed_s <= least * (1 + TIE)]
    best = min(near, key=lambda result: result.metrics.itl_p99_s or 0.0)
    worst = max(results, key=lambda result: result.metrics.elapsed_s)
    saved = 1 - best.metrics.elapsed_s / worst.metrics.elapsed_s if worst.metrics.elapsed_s else 0.0
    reason = f"makespan {duration(best.metrics.elapsed_s)}"
    if saved > TIE:
        reason += f", {saved:.0%} less than {worst.schedule.title}"
    if len(near) > 1:
        reason += (
            f"; of {len(near)} within {TIE:.0%} of the least it has the lowest p99 ITL, {duration(best.metrics.itl_p99_s)}"
        )
    return best, reason


def print_comparison(console: Console, results: Sequence[Result]) -> None:
    """The table, the choice with its reason, and the choice as lines of a config."""
    console.print(comparison_table(results, console.width))
    best, reason = choose(results)
    console.print()
    console.print(Text(f"* best of its kind. Take {best.schedule.title}: {reason}."), soft_wrap=True)
    console.print(Text(f"Times are {results[0].schedule.clock}."), soft_wrap=True)
    for note in dict.fromkeys(note for result in results for note in result.notes):
        console.print(Text(note), soft_wrap=True)
    if best.schedule.overrides:
        console.print()
        for line in config_lines(best.schedule.overrides):
            console.print(Text(line))


def config_lines(overrides: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Config keys as YAML lines, grouped by section."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in overrides:
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append((name, value))
    for section, items in sections.items():
        yield f"{section}:"
        yield from (f"  {name}: {value}" for name, value in items)
