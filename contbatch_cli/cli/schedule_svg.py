"""Schedules as an SVG picture: lanes, the make-up of the iterations against the budget, and cache use, over one axis of time.

Readable for ten rows and for five thousand: with many rows several share a line of the picture, with many iterations several
share a column; the picture's size stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from math import floor, log10
from typing import NamedTuple

from contbatch_cli.cli.figures import ELLIPSIS, three_figures
from contbatch_cli.cli.schedule_lanes import STATE_NAMES, Lane, ScheduleChart, State, Step
from contbatch_cli.units import counted

WIDTH = 1120
LEFT, RIGHT = 118, 24
PLOT = WIDTH - LEFT - RIGHT
LANES_HEIGHT = 360
MAX_LANE = 16
MIN_NAMED_LANE = 9
LINE = 2
"""The least height of a line of lanes, in pixels: lower lanes are drawn several to a line."""
STEPS_HEIGHT, CACHE_HEIGHT = 110, 60
MAX_STEPS = 600
SHADES = 4

LIGHT = {
    "bg": "#ffffff", "ink": "#20242c", "dim": "#667085", "grid": "#e4e7ec", "panel": "#f7f8fa", "waiting": "#dfe3ea",
    "prefill": "#e8871e", "decode": "#2f7ed8", "stalled": "#d92d4a", "preempted": "#8e44ad", "cache": "#2a9d8f",
}  # fmt: skip
DARK = {
    "bg": "#14171c", "ink": "#e6e8ec", "dim": "#98a2b3", "grid": "#2b313b", "panel": "#1a1e25", "waiting": "#2f3641",
    "prefill": "#f2a04a", "decode": "#5aa2f0", "stalled": "#f0596f", "preempted": "#b77fd6", "cache": "#4cc3b4",
}  # fmt: skip


def draw_svg(charts: Sequence[ScheduleChart], theme: str = "auto") -> str:
    """The charts below one another, all on the same scale of time. `theme` is auto (follows the viewer), light or dark."""
    end_s = max((chart.end_s for chart in charts), default=0.0) or 1.0
    parts = [*_legend()]
    top = 46.0
    for chart in charts:
        drawing = _Drawing(chart, end_s, top)
        parts += drawing.draw()
        top = drawing.bottom + 26
    label = escape("Schedule: " + ", ".join(chart.title for chart in charts))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}"'
    head += f' role="img" aria-label="{label}">'
    return "\n".join([head, _style(theme), f'<rect class="bg" width="{WIDTH}" height="{top:.0f}"/>', *parts, "</svg>", ""])


def _style(theme: str) -> str:
    colors = DARK if theme == "dark" else LIGHT
    rules = _rules(colors)
    if theme == "auto":
        rules += f"@media (prefers-color-scheme: dark){{{_rules(DARK)}}}"
    font = "text{font:11px system-ui,'Segoe UI','DejaVu Sans',Helvetica,Arial,sans-serif}.title{font-size:14px;font-weight:600}"
    return f"<style>{font}.end{{text-anchor:end}}.mid{{text-anchor:middle}}{rules}</style>"


def _rules(colors: dict[str, str]) -> str:
    fills = "".join(f".{name}{{fill:{colors[name]}}}" for name in ("bg", "panel", "cache", *STATE_NAMES))
    ink = f".ink{{fill:{colors['ink']}}}.dim{{fill:{colors['dim']}}}.grid{{stroke:{colors['grid']}}}"
    return fills + ink + f".limit{{stroke:{colors['ink']};stroke-dasharray:5 4;stroke-width:1.2}}"


def _legend() -> Iterator[str]:
    x = LEFT
    for name, words in zip(STATE_NAMES, ("waits", "prefill", "decode", "stalled", "preempted"), strict=True):
        yield f'<rect class="{name}" x="{x}" y="14" width="14" height="11" rx="2"/>'
        yield _text(x + 19, 24, words, "ink")
        x += 34 + 7 * len(words)
    yield f'<path class="limit" d="M{x} 20h22"/>' + _text(x + 28, 24, "limit: token budget, blocks of the cache", "ink")


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


class Column(NamedTuple):
    """The mean of the iterations that share one column of the picture."""

    start_s: float
    end_s: float
    decode_tokens: float
    prefill_tokens: float
    blocks_used: float


class _Drawing:
    """One chart's panels, from `top` on."""

    def __init__(self, chart: ScheduleChart, end_s: float, top: float) -> None:
        self._chart = chart
        self._end_s = end_s
        self._lanes = list(chart.lanes.values())
        self._columns = merge_steps(chart.steps, end_s)
        self._lane_height = min(MAX_LANE, LANES_HEIGHT / max(len(self._lanes), 1))
        self._lanes_top = top + 20
        self._title_y = top + 6
        self._steps_top = self._lanes_top + self._lane_height * len(self._lanes) + 16
        self._cache_top = self._steps_top + STEPS_HEIGHT + 14
        self.bottom = self._cache_top + CACHE_HEIGHT + 20

    def draw(self) -> Iterator[str]:
        yield _text(LEFT, self._title_y, self._chart.title, "ink title")
        yield from self._panel(self._lanes_top, self._lane_height * len(self._lanes))
        yield from self._panel(self._steps_top, STEPS_HEIGHT)
        yield from self._panel(self._cache_top, CACHE_HEIGHT)
        yield from self._axis()
        yield from self._draw_lanes()
        yield from self._draw_steps()
        yield from self._draw_cache()

    def _x(self, seconds: float) -> float:
        return LEFT + seconds / self._end_s * PLOT

    def _panel(self, top: float, height: float) -> Iterator[str]:
        yield f'<rect class="panel" x="{LEFT}" y="{top:.1f}" width="{PLOT}" height="{height:.1f}"/>'

    def _axis(self) -> Iterator[str]:
        height = self._cache_top + CACHE_HEIGHT - self._lanes_top
        for tick, words in time_ticks(self._end_s):
            x = self._x(tick)
            yield f'<path class="grid" d="M{x:.1f} {self._lanes_top:.1f}v{height:.1f}"/>'
            yield _text(x, self.bottom - 6, words, "dim mid")

    def _draw_lanes(self) -> Iterator[str]:
        words = counted(len(self._lanes), "request")
        if self._lane_height >= MIN_NAMED_LANE:
            for index, lane in enumerate(self._lanes):
                y = self._lanes_top + (index + 0.5) * self._lane_height + 3.5
                yield _text(LEFT - 6, y, _short(lane.name), "dim end")
        else:
            yield _text(LEFT - 6, self._lanes_top + 12, words, "dim end")
        if self._lane_height >= LINE:
            yield from self._draw_segments()
        else:
            yield from self._draw_raster()

    def _draw_segments(self) -> Iterator[str]:
        paths: dict[State, list[str]] = {state: [] for state in State}
        gap = 2 if self._lane_height >= 6 else 0.4 if self._lane_height >= 3 else 0
        for index, lane in enumerate(self._lanes):
            y = self._lanes_top + index * self._lane_height + gap / 2
            for segment in lane.segments:
                x = self._x(segment.start_s)
                width = max(self._x(segment.end_s) - x, 0.3)
                if segment.state is State.PREFILL and gap and width > 3:
                    width -= 0.7
                paths[segment.state].append(_box(x, y, width, self._lane_height - gap))
        for state, boxes in paths.items():
            if boxes:
                yield f'<path class="{STATE_NAMES[state]}" d="{"".join(boxes)}"/>'

    def _draw_raster(self) -> Iterator[str]:
        """Several lanes to a line: each cell shows what most of them do there, the stronger the more of them do anything."""
        num_lines = LANES_HEIGHT // LINE
        paths: dict[tuple[State, int], list[str]] = {}
        for line in range(num_lines):
            first, last = (len(self._lanes) * part // num_lines for part in (line, line + 1))
            cells = raster_line(self._lanes[first:last], self._end_s, PLOT)
            for start, end, state, shade in _runs(cells):
                box = _box(LEFT + start, self._lanes_top + line * LINE, end - start, LINE)
                paths.setdefault((state, shade), []).append(box)
        for (state, shade), boxes in sorted(paths.items()):
            opacity = "" if shade == SHADES else f' fill-opacity="{0.25 + 0.75 * shade / SHADES:.2f}"'
            yield f'<path class="{STATE_NAMES[state]}"{opacity} d="{"".join(boxes)}"/>'

    def _draw_steps(self) -> Iterator[str]:
        bottom = self._steps_top + STEPS_HEIGHT
        scale = (STEPS_HEIGHT - 8) / max(self._chart.token_budget, 1)
        decodes = [(c.start_s, c.end_s, 0.0, c.decode_tokens) for c in self._columns]
        prefills = [(c.start_s, c.end_s, c.decode_tokens, c.decode_tokens + c.prefill_tokens) for c in self._columns]
        for name, bars in (("decode", decodes), ("prefill", prefills)):
            boxes = [
                self._bar(start, end, bottom - high * scale, (high - low) * scale)
                for start, end, low, high in bars
                if high > low
            ]
            if boxes:
                yield f'<path class="{name}" d="{"".join(boxes)}"/>'
        yield from self._limit(self._steps_top + 8, f"budget {self._chart.token_budget:,}")
        yield _text(LEFT - 6, bottom - 2, "tokens a step", "dim end")

    def _draw_cache(self) -> Iterator[str]:
        bottom = self._cache_top + CACHE_HEIGHT
        scale = (CACHE_HEIGHT - 8) / max(self._chart.num_blocks, 1)
        boxes = [self._bar(c.start_s, c.end_s, bottom - c.blocks_used * scale, c.blocks_used * scale) for c in self._columns]
        yield f'<path class="cache" d="{"".join(boxes)}"/>'
        yield from self._limit(self._cache_top + 8, counted(self._chart.num_blocks, "block"))
        yield _text(LEFT - 6, bottom - 2, "cache in use", "dim end")

    def _bar(self, start_s: float, end_s: float, y: float, height: float) -> str:
        x = self._x(start_s)
        return _box(x, y, max(self._x(end_s) - x, 0.3), height)

    def _limit(self, y: float, words: str) -> Iterator[str]:
        yield f'<path class="limit" d="M{LEFT} {y:.1f}h{PLOT}"/>'
        yield _text(LEFT - 6, y + 4, words, "dim end")


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{_num(x)} {_num(y)}h{_num(width)}v{_num(height)}h-{_num(width)}z"


def _num(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _short(name: str) -> str:
    return name if len(name) <= 17 else name[:16] + ELLIPSIS


def merge_steps(steps: Sequence[Step], end_s: float, most: int = MAX_STEPS) -> list[Column]:
    """The iterations as they are, or, when there are more than `most`, their means (weighted by time) in that many columns."""
    if len(steps) <= most:
        return [Column(s.start_s, s.end_s, s.decode_tokens, s.prefill_tokens, s.blocks_used) for s in steps]
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(min(int(step.start_s / end_s * most), most - 1), []).append(step)
    return [_mean(group) for group in groups.values()]


def _mean(steps: Sequence[Step]) -> Column:
    total = sum(step.end_s - step.start_s for step in steps) or 1.0

    def mean(position: int) -> float:
        return sum(step[position] * (step.end_s - step.start_s) for step in steps) / total

    return Column(steps[0].start_s, steps[-1].end_s, mean(2), mean(3), mean(4))


def raster_line(lanes: Sequence[Lane], end_s: float, columns: int) -> list[tuple[State, int] | None]:
    """For each column what the lanes that share a line do there, and how much of the line that is in `SHADES` shades.

    Waiting shows where none of them runs; None where all are done.
    """
    parts = [[0.0] * columns for _ in State]
    inner = [[0] * (columns + 1) for _ in State]
    for lane in lanes:
        for segment in lane.segments:
            start, end = segment.start_s / end_s * columns, segment.end_s / end_s * columns
            _spread(parts[segment.state], inner[segment.state], start, end)
    totals = [[part + whole for part, whole in zip(parts[state], accumulate(inner[state]), strict=False)] for state in State]
    return [_cell(cell, len(lanes)) for cell in zip(*totals, strict=True)]


def _spread(parts: list[float], inner: list[int], start: float, end: float) -> None:
    """Adds the stretch to the columns that it covers: in part to the first and the last, as a difference to those between."""
    last_column = len(parts) - 1
    first, last = min(int(start), last_column), min(int(end), last_column)
    if first == last:
        parts[first] += end - start
        return
    parts[first] += first + 1 - start
    parts[last] += end - last
    inner[first + 1] += 1
    inner[last] -= 1


def _cell(cell: Sequence[float], num_lanes: int) -> tuple[State, int] | None:
    waiting, active = cell[State.WAITING], sum(cell) - cell[State.WAITING]
    if active >= 0.02:
        state = max((state for state in State if state is not State.WAITING), key=lambda state: cell[state])
        return state, min(SHADES, 1 + int(active / num_lanes * SHADES))
    return (State.WAITING, SHADES) if waiting > num_lanes / 2 else None


def _runs(cells: Sequence[tuple[State, int] | None]) -> Iterator[tuple[int, int, State, int]]:
    start = 0
    for position in range(1, len(cells) + 1):
        if position == len(cells) or cells[position] != cells[start]:
            cell = cells[start]
            if cell is not None:
                yield start, position, *cell
            start = position


def time_ticks(end_s: float, most: int = 9) -> list[tuple[float, str]]:
    """Round moments from 0 to the end, at most `most` + 1 of them, with their labels."""
    rough = end_s / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    unit, scale = ("s", 1.0) if end_s >= 1 else ("ms", 1e3)
    ticks = [index * step for index in range(int(end_s / step * (1 + 1e-9)) + 1)]
    return [(tick, f"{_num(tick * scale) if tick * scale < 1000 else three_figures(tick * scale)} {unit}") for tick in ticks]
