"""Writes the pictures of schedules: the kind of a picture is told by its file's name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from contbatch_cli.cli.perfetto import write_perfetto
from contbatch_cli.cli.schedule_html import draw_html
from contbatch_cli.cli.schedule_lanes import ScheduleChart
from contbatch_cli.cli.schedule_svg import draw_svg
from contbatch_cli.errors import EngineError, UsageError

PNG_ZOOM = 2


def plot_writer(path: Path) -> Callable[[Sequence[ScheduleChart]], None]:
    """What writes the picture to `path`. Raises UsageError before any work is done, for a kind or file that cannot be written."""
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
    _check_writable("--plot", path)
    return lambda charts: _write(path, draw(charts))


def perfetto_writer(path: Path) -> Callable[[Sequence[ScheduleChart]], None]:
    """What writes the schedules for Perfetto. Raises UsageError before any work is done, for a file that cannot be written."""
    _check_writable("--perfetto", path)

    def write(charts: Sequence[ScheduleChart]) -> None:
        try:
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                write_perfetto(file, charts)
        except OSError as error:
            raise EngineError(f"--perfetto {path}: {error.strerror}") from error

    return write


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise EngineError(f"--plot {path}: {error.strerror}") from error


def _check_writable(option: str, path: Path) -> None:
    """Finds most of what would keep a file from being written, without making it."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: permission denied")


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
