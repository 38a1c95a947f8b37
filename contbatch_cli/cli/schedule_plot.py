"""Writes the pictures of schedules: the kind of a picture is told by its file's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from contbatch_cli.cli.perfetto import write_perfetto
from contbatch_cli.cli.schedule_html import draw_html
from contbatch_cli.cli.schedule_lanes import ScheduleChart
from contbatch_cli.cli.schedule_svg import draw_svg
from contbatch_cli.errors import UsageError

PNG_ZOOM = 2


def plot_writer(path: Path) -> Callable[[Sequence[ScheduleChart]], None]:
    """What writes the picture to `path`. Raises UsageError before any work is done, for a kind that cannot be written."""
    drawers: dict[str, Callable[[Sequence[ScheduleChart]], bytes]] = {
        ".svg": lambda charts: draw_svg(charts).encode("utf-8", "backslashreplace"),
        ".html": lambda charts: draw_html(charts).encode("utf-8", "backslashreplace"),
        ".png": _draw_png,
    }
    draw = drawers.get(path.suffix.lower())
    if draw is None:
        raise UsageError(f"--plot {path}: should end in .svg, .png or .html")
    if draw is _draw_png:
        _check_png()
    return lambda charts: _write(path, draw(charts))


def perfetto_writer(path: Path) -> Callable[[Sequence[ScheduleChart]], None]:
    """What writes the schedules for Perfetto."""

    def write(charts: Sequence[ScheduleChart]) -> None:
        try:
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                write_perfetto(file, charts)
        except OSError as error:
            raise UsageError(f"--perfetto {path}: {error.strerror}") from error

    return write


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from error


def _check_png() -> None:
    try:
        import_module("resvg_py")
    except ImportError:
        raise UsageError(
            "--plot: a .png needs the package resvg_py (pip install 'contbatch[png]'); .svg and .html do not"
        ) from None


def _draw_png(charts: Sequence[ScheduleChart]) -> bytes:
    resvg = import_module("resvg_py")

    return bytes(resvg.svg_to_bytes(svg_string=draw_svg(charts, "light"), zoom=PNG_ZOOM))
