"""How numbers, bars and names are written for people: plain strings, no markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from contbatch_cli.trace import RowName, TraceRun

ELLIPSIS = "…"


def printable(text: str) -> str:
    """The text as it is, with whatever is not printable (control characters, joiners, lone surrogates) as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def row_name(name: RowName, index: int, sample: int = 0) -> str:
    """The user's name of a row, or `#index`; the sample is added for the second and later ones."""
    text = f"#{index}" if name is None else printable(str(name))
    return f"{text}/{sample}" if sample else text


def crop(text: str, width: int) -> str:
    """The text cut to at most `width` terminal cells, an ellipsis marking a cut."""
    if cell_len(text) <= width:
        return text
    if width <= 0:
        return ""
    kept = ""
    for char in text:
        if cell_len(kept + char) > width - 1:
            break
        kept += char
    return kept + ELLIPSIS


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """A bar of `width` cells, filled in eighths of a cell; never empty for a share above zero, never full below one."""
    share = min(max(share, 0.0), 1.0)
    if ascii_only:
        filled = _filled(share, width)
        return "#" * filled + "-" * (width - filled)
    eighths = _filled(share, width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "·")


def _filled(share: float, units: int) -> int:
    filled = round(share * units)
    if share > 0:
        filled = max(filled, 1)
    return min(filled, units - 1) if share < 1 else filled


def clock_time(seconds: float | None) -> str:
    """Hours, minutes and seconds: `0:42`, `1:02:03`; `?` while unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float | None) -> str:
    """Three figures and a unit: `850 us`, `31.2 ms`, `1.23 s`, then `4:05` from two minutes on; `-` when there is none."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    for unit, scale, limit in (("us", 1e6, 1e-3), ("ms", 1e3, 1.0), ("s", 1.0, 120.0)):
        if seconds < limit:
            return f"{three_figures(seconds * scale)} {unit}"
    return clock_time(seconds)


def three_figures(value: float) -> str:
    """`0.12`, `1.23`, `12.3`, `123`, `12,345`."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def prefill_text(run: TraceRun) -> str:
    """`name:tokens`, `name:tokens@start` for a run that does not begin the prompt; an ellipsis when more of it is to follow."""
    name = row_name(run.name, run.request_id.row, run.request_id.sample)
    where = f"@{run.start}" if run.start else ""
    return f"{name}:{run.num_tokens}{where}{'' if run.samples else ELLIPSIS}"


def fit_runs(runs: Iterable[TraceRun], width: int) -> str:
    """As many prefill runs as `width` cells hold, then how many more there are."""
    return fit_words([prefill_text(run) for run in runs], width)


def fit_words(words: Sequence[str], width: int) -> str:
    """The words with two spaces between them; `+N` stands for the N that do not fit."""
    whole = "  ".join(words)
    if cell_len(whole) <= width:
        return whole
    for kept in range(min(len(words) - 1, width // 3), 0, -1):
        text = "  ".join(words[:kept]) + f"  +{len(words) - kept}"
        if cell_len(text) <= width:
            return text
    more = f" +{len(words) - 1}" if len(words) > 1 else ""
    return crop(words[0], width - len(more)) + more if width > len(more) else crop(whole, width)


def join_fitting(words: Sequence[str], width: int) -> str:
    """The words with commas between them, the last ones left out where `width` cells do not hold them all."""
    kept = len(words)
    while kept > 1 and cell_len(", ".join(words[:kept])) > width:
        kept -= 1
    return crop(", ".join(words[:kept]), width)
