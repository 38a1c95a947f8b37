"""A schedule in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from contbatch_cli.cli.schedule_lanes import STATE_NAMES, Lane, ScheduleChart, Step


def write_perfetto(file: TextIO, charts: Sequence[ScheduleChart]) -> None:
    """One process a schedule: a thread a request, and counters of tokens, blocks and requests. Times in microseconds."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    for process, chart in enumerate(charts, 1):
        for event in _events(process, chart):
            file.write(separator + json.dumps({"pid": process, **event}, ensure_ascii=False, separators=(",", ":")))
            separator = ",\n"
    file.write("\n]}\n")


def _events(process: int, chart: ScheduleChart) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": chart.title}}
    for thread, lane in enumerate(chart.lanes.values(), 1):
        yield from _lane_events(thread, lane)
    for step in chart.steps:
        yield from _counters(step)


def _lane_events(thread: int, lane: Lane) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": lane.name}}
    yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": {"sort_index": thread}}
    for segment in lane.segments:
        start, end = _us(segment.start_s), _us(segment.end_s)
        yield {
            "ph": "X",
            "name": STATE_NAMES[segment.state],
            "tid": thread,
            "ts": start,
            "dur": end - start,
            "args": {"tokens": segment.num_tokens},
        }


def _counters(step: Step) -> Iterator[dict[str, Any]]:
    values = {
        "tokens": {"decode": step.decode_tokens, "prefill": step.prefill_tokens},
        "blocks": {"used": step.blocks_used},
        "requests": {"running": step.num_running, "waiting": step.num_waiting},
    }
    for name, args in values.items():
        yield {"ph": "C", "name": name, "ts": _us(step.start_s), "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
