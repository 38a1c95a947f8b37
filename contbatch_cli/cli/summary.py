"""What a run leaves on the screen: pairs of a label and a text."""

from __future__ import annotations

from dataclasses import dataclass

from contbatch_cli.cli.figures import duration, three_figures
from contbatch_cli.metrics import MetricsSnapshot
from contbatch_cli.units import counted


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run leaves: rows counted by their records, everything else from the metrics. `output` None is standard output."""

    metrics: MetricsSnapshot
    rows_good: int
    rows_bad: int
    rows_cancelled: int = 0
    rows_kept: int = 0
    runaway_rows: int = 0
    output: str | None = None
    notes: tuple[str, ...] = ()


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """What a run leaves, as pairs of a label and a text."""
    metrics = summary.metrics
    lines = [("rows", _rows_text(summary)), *metric_lines(metrics)]
    if summary.runaway_rows:
        lines.append(("runaway", f"{counted(summary.runaway_rows, 'row')} ran on, repeating the same tokens"))
    lines += [("note", note) for note in summary.notes]
    lines.append(("output", summary.output or "standard output"))
    return lines


def metric_lines(metrics: MetricsSnapshot) -> list[tuple[str, str]]:
    """Tokens and speed, latencies, and how the schedule used budget and cache; what never happened is left out."""
    lines = [("tokens", _tokens_text(metrics))]
    if metrics.ttft_p50_s is not None:
        lines.append(("latency", _latency_text(metrics)))
    if metrics.iterations:
        lines.append(("schedule", _schedule_text(metrics)))
    return lines


def _rows_text(summary: RunSummary) -> str:
    words = [f"{summary.rows_good:,} good", f"{summary.rows_bad:,} bad"]
    words += [f"{summary.rows_cancelled:,} cancelled"] if summary.rows_cancelled else []
    words += [f"{summary.rows_kept:,} kept from the earlier run"] if summary.rows_kept else []
    duplicates, saved = summary.metrics.duplicates, summary.metrics.duplicate_tokens
    words += [f"{counted(duplicates, 'duplicate')} not computed again ({counted(saved, 'token')} saved)"] if duplicates else []
    return ", ".join(words)


def _tokens_text(metrics: MetricsSnapshot) -> str:
    cached = f" ({metrics.cached_tokens:,} from the prefix cache)" if metrics.cached_tokens else ""
    speed = f"{three_figures(metrics.output_tokens_per_s)} output tokens/s"
    took = f" in {duration(metrics.elapsed_s)}: {speed}" if metrics.iterations else ""
    return f"{metrics.prompt_tokens:,} prompt{cached}, {metrics.output_tokens:,} output{took}"


def _latency_text(metrics: MetricsSnapshot) -> str:
    ttft = f"TTFT p50 {duration(metrics.ttft_p50_s)}, p99 {duration(metrics.ttft_p99_s)} from the start"
    itl = f"ITL p50 {duration(metrics.itl_p50_s)}, p99 {duration(metrics.itl_p99_s)}"
    return f"{ttft}; {itl}" if metrics.itl_p50_s is not None else ttft


def _schedule_text(metrics: MetricsSnapshot) -> str:
    text = f"{counted(metrics.iterations, 'iteration')}, {metrics.budget_use:.0%} of the token budget used"
    text += f", peak {metrics.peak_blocks:,} of {counted(metrics.num_blocks, 'block')}"
    if metrics.preemptions:
        text += f", {counted(metrics.preemptions, 'preemption')} ({counted(metrics.recomputed_tokens, 'token')} computed again)"
    if metrics.draft_tokens:
        text += f", {metrics.accepted_drafts:,} of {counted(metrics.draft_tokens, 'draft token')} right"
    return text
