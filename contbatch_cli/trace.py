"""The trace format: a header line, then one JSON line an iteration; written from reports, read back as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contbatch_cli.core.batch import ScheduledSequence
from contbatch_cli.core.request import RequestId
from contbatch_cli.engine import IterationReport
from contbatch_cli.errors import UsageError

TRACE_VERSION = 1
_TIME_DIGITS = 6

RowName = str | int | None
NameOf = Callable[[int], RowName]
"""The user's own name of the row with this index, None for a row without."""


class TraceRun(NamedTuple):
    """One request's run in one iteration: positions `start` to `start + num_tokens`; `samples` when it ends in a new token.

    Of the tokens the last `num_drafts` were drafts, and `num_accepted` of these were right.
    """

    request_id: RequestId
    name: RowName
    start: int
    num_tokens: int
    is_decode: bool
    samples: bool
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_sampled(self) -> int:
        """The tokens that the request got."""
        return self.samples + self.num_accepted


class TraceIteration(NamedTuple):
    """One iteration as the trace holds it. Times in seconds since the run began.

    `finished` names every row that was done then, rows that took the result of an equal one among them. `replica` is in the
    trace of a run of several engines only.
    """

    iteration: int
    scheduled: tuple[TraceRun, ...]
    num_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    preempted: tuple[RequestId, ...]
    finished: tuple[RequestId, ...]
    start_s: float
    elapsed_s: float
    replica: int | None = None

    @property
    def num_decodes(self) -> int:
        return sum(run.is_decode for run in self.scheduled)

    @property
    def num_drafts(self) -> int:
        return sum(run.num_drafts for run in self.scheduled)

    @property
    def prefills(self) -> tuple[TraceRun, ...]:
        return tuple(run for run in self.scheduled if not run.is_decode)

    @property
    def end_s(self) -> float:
        return self.start_s + self.elapsed_s


def no_name(index: int) -> RowName:
    """The naming of a job whose rows have no names."""
    return None


def iteration_of(report: IterationReport, name_of: NameOf = no_name) -> TraceIteration:
    """What the trace keeps of a report."""
    return TraceIteration(
        iteration=report.iteration,
        scheduled=tuple(
            _run_of(sequence, name_of, report.accepted_drafts.get(sequence.request_id, 0))
            for sequence in report.batch.sequences
        ),
        num_tokens=report.batch.num_tokens,
        token_budget=report.token_budget,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        blocks_used=report.blocks_used,
        num_blocks=report.num_blocks,
        preempted=report.batch.preempted,
        finished=tuple(request.request_id for request in (*report.finished, *report.duplicates)),
        start_s=round(report.start_s, _TIME_DIGITS),
        elapsed_s=round(report.elapsed_s, _TIME_DIGITS),
        replica=report.replica,
    )


def _run_of(sequence: ScheduledSequence, name_of: NameOf, num_accepted: int) -> TraceRun:
    return TraceRun(
        sequence.request_id,
        name_of(sequence.request_id.row),
        sequence.start,
        len(sequence.tokens),
        sequence.is_decode,
        sequence.samples,
        sequence.num_drafts,
        num_accepted,
    )


def header_fields(config: Mapping[str, Any], device: Mapping[str, Any], rows: int | None, **more: Any) -> dict[str, Any]:
    """What a trace's header holds. `config` has resolved values; `rows` is None when a pipe does not tell.

    With `rehearsable` false among `more` the rows came through a pipe: their timing shaped the schedule.
    """
    return {"version": TRACE_VERSION, "config": dict(config), "device": dict(device), "rows": rows, **more}


def header_line(config: Mapping[str, Any], device: Mapping[str, Any], rows: int | None, **more: Any) -> str:
    """The first line of a trace, with its newline; the arguments are those of `header_fields`."""
    return format_header(header_fields(config, device, rows, **more))


def format_header(fields: Mapping[str, Any]) -> str:
    """The first line from a header's fields, such as those that were read back."""
    return _dumps({"header": dict(fields)})


def iteration_line(report: IterationReport, name_of: NameOf = no_name) -> str:
    """One iteration's line, with its newline."""
    return format_iteration(iteration_of(report, name_of))


def format_iteration(iteration: TraceIteration) -> str:
    """The same for an iteration that was read back or simulated."""
    line = iteration._asdict()
    if iteration.replica is None:
        del line["replica"]
    line["scheduled"] = [_run_fields(run) for run in iteration.scheduled]
    line["preempted"] = [_id_field(request_id) for request_id in iteration.preempted]
    line["finished"] = [_id_field(request_id) for request_id in iteration.finished]
    return _dumps(line)


def _run_fields(run: TraceRun) -> dict[str, Any]:
    drafts = {"num_drafts": run.num_drafts, "num_accepted": run.num_accepted} if run.num_drafts else {}
    return {
        "index": run.request_id.row,
        "id": run.name,
        "sample": run.request_id.sample,
        "start": run.start,
        "num_tokens": run.num_tokens,
        "is_decode": run.is_decode,
        "samples": run.samples,
        **drafts,
    }


def _id_field(request_id: RequestId) -> int | list[int]:
    """A row's index; a pair of index and sample for the second and later samples of a row."""
    return request_id.row if request_id.sample == 0 else [request_id.row, request_id.sample]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def read_trace(path: Path | str) -> tuple[dict[str, Any], Iterator[TraceIteration]]:
    """The header's fields and the iterations, read lazily. Raises UsageError, with the line's number, for what is no trace.

    A torn last line (the run was killed in mid-write) ends the trace.
    """
    lines = _whole_lines(Path(path))
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path}: empty: a trace begins with a header line")
    header = _loads(path, 1, first).get("header")
    if not isinstance(header, dict):
        raise UsageError(f'{path}, line 1: no trace: it should begin with {{"header":{{...}}}}')
    if header.get("version") != TRACE_VERSION:
        raise UsageError(f"{path}, line 1: trace version {header.get('version')!r}; this program reads version {TRACE_VERSION}")
    return header, _read_iterations(path, lines)


def _whole_lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line.decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _read_iterations(path: Path | str, lines: Iterator[str]) -> Iterator[TraceIteration]:
    for number, line in enumerate(lines, 2):
        fields = _loads(path, number, line)
        try:
            yield _parse_iteration(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}, line {number}: no iteration of a trace: {_lacking(error)}") from error


def _lacking(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _loads(path: Path | str, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UsageError(f"{path}, line {number}: no JSON: {reason}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {number}: no JSON object")
    return value


def _parse_iteration(fields: dict[str, Any]) -> TraceIteration:
    fields = {name: fields[name] for name in TraceIteration._fields if name != "replica"} | {"replica": fields.get("replica")}
    fields["scheduled"] = tuple(_parse_run(run) for run in fields["scheduled"])
    fields["preempted"] = tuple(_parse_id(value) for value in fields["preempted"])
    fields["finished"] = tuple(_parse_id(value) for value in fields["finished"])
    return TraceIteration(**fields)


def _parse_run(fields: dict[str, Any]) -> TraceRun:
    request_id = RequestId(int(fields["index"]), int(fields.get("sample", 0)))
    is_decode = bool(fields["is_decode"])
    return TraceRun(
        request_id,
        fields.get("id"),
        int(fields["start"]),
        int(fields["num_tokens"]),
        is_decode,
        bool(fields.get("samples", is_decode)),
        int(fields.get("num_drafts", 0)),
        int(fields.get("num_accepted", 0)),
    )


def _parse_id(value: Any) -> RequestId:
    return RequestId(int(value)) if isinstance(value, int) else RequestId(*map(int, value))
