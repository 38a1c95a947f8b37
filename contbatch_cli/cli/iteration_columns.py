"""The columns of a table of iterations, the same in the live table and in `inspect-schedule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from contbatch_cli.cli.figures import bar, crop, duration, fit_runs
from contbatch_cli.trace import TraceIteration


class Column:
    """One column of the table: its title, its width in cells, and its text for an iteration."""

    def __init__(
        self, title: str, width: int, text: Callable[[TraceIteration], str], style: str = "", left: bool = False
    ) -> None:
        self.title = title
        self.width = width
        self.text = text
        self.style = style
        self.left = left

    def cell(self, text: str) -> str:
        text = crop(text, self.width)
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def _meter(used: int, total: int, width: int, ascii_only: bool) -> str:
    figures = f"{used}/{total}"
    return f"{bar(used / total if total else 0.0, width, ascii_only)} {figures}"


def _decodes(iteration: TraceIteration) -> str:
    """How many requests decode, and how many drafts they carry."""
    drafts = iteration.num_drafts
    return f"{iteration.num_decodes} +{drafts}" if drafts else str(iteration.num_decodes)


def table_columns(columns: int, sample: TraceIteration, ascii_only: bool) -> list[Column]:
    """The columns that fit a terminal of this width; `sample` tells how long its figures are."""
    bar_cells = 4 if columns < 72 else 8 if columns < 120 else 12
    token_cells = bar_cells + 2 + 2 * len(str(sample.token_budget))
    block_cells = bar_cells + 2 + 2 * len(str(sample.num_blocks))
    found = [
        Column("step", 7, lambda it: f"{it.iteration:,}", "dim"),
        Column("time", 7, lambda it: duration(it.elapsed_s)),
        Column("decodes", 7, _decodes, "green"),
        Column("tokens", token_cells, lambda it: _meter(it.num_tokens, it.token_budget, bar_cells, ascii_only), "cyan", True),
    ]
    if sample.replica is not None:
        found.insert(1, Column("replica", 7, lambda it: str(it.replica)))
    if columns >= 60:
        meter = Column(
            "blocks", block_cells, lambda it: _meter(it.blocks_used, it.num_blocks, bar_cells, ascii_only), "blue", True
        )
        found.append(meter)
    if columns >= 100:
        found.append(Column("running", 7, lambda it: f"{it.num_running:,}"))
        found.append(Column("waiting", 7, lambda it: f"{it.num_waiting:,}"))
    return found


def title_text(columns: Sequence[Column], width: int) -> Text:
    """The line of titles, at most `width` cells."""
    titles = "  ".join(column.cell(column.title) for column in columns)
    return Text(crop(titles + "  prefill runs", width), "bold")


def row_text(iteration: TraceIteration, columns: Sequence[Column], width: int) -> Text:
    """One iteration's line, at most `width` cells: its columns, how many it preempted, and the prefill runs that fit."""
    text = Text()
    for column in columns:
        text.append(column.cell(column.text(iteration)), column.style).append("  ")
    if iteration.preempted:
        text.append(crop(f"{len(iteration.preempted)} preempted  ", max(width - text.cell_len, 0)), "red")
    text.append(fit_runs(iteration.prefills, max(width - text.cell_len, 0)), "yellow")
    text.truncate(width, overflow="crop")
    return text
