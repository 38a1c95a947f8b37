"""Going on with an output that an earlier run left: which records are kept, and which rows still need one.

At any moment a kill leaves OUTPUT, OUTPUT.pending and OUTPUT.meta.json in a state from which this starts again, also a kill in
the midst of it: no step takes a good record out of one of the first two while it is not on the disk in the other.

    completion order: all good records to OUTPUT.resume, sync, rename over OUTPUT; then remove OUTPUT.pending
    input order: those after the first gap, and all that stood in OUTPUT.pending, to OUTPUT.pending.resume, sync, rename; then
        those before the gap to OUTPUT.resume, sync, rename over OUTPUT

A record may stand in both files for a while; the first one found counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from contbatch_cli.data.output_file import OutputFile, pending_path, sync_directory
from contbatch_cli.data.row_table import RowTable
from contbatch_cli.data.rows import Row, RowFault
from contbatch_cli.data.run_meta import put_meta, refuse_other_settings, write_meta, written_meta
from contbatch_cli.errors import EngineError, UsageError
from contbatch_cli.units import counted

Order = Literal["completion", "input"]
_ROW_HASH = re.compile(r"[0-9a-f]{16}")
_BUFFER_BYTES = 1024 * 1024
MAX_INDEX = 2**48


class GoodRecord(NamedTuple):
    """What resuming needs of a kept record: its row and the hash of that row, never 0."""

    row: int
    row_hash: int


@dataclass(slots=True)
class ResumePlan:
    """What a run finds done. `hashes` has the row hash of each kept record by index: 8 bytes a row.

    `first` and `waiting` are for the writer under `--order input`: the first row without a record in OUTPUT, and the places of
    records in OUTPUT.pending. `num_failed` counts the error and cancelled records that were dropped so that their rows run
    again, `num_broken` torn, foreign or repeated lines, `num_changed` kept records given up because their row changed.
    """

    hashes: RowTable = field(default_factory=RowTable)
    first: int = 0
    waiting: RowTable = field(default_factory=RowTable)
    num_kept: int = 0
    num_failed: int = 0
    num_broken: int = 0
    num_changed: int = 0

    def remaining(self, rows: Iterable[Row | RowFault]) -> Iterator[Row | RowFault]:
        """The rows that still need a record. Raises UsageError, naming the row, when a row is not the one of its record."""
        for row in rows:
            known = self.hashes[row.index]
            if not known:
                yield row
            elif known != hash_number(row.row_hash):
                raise changed_row(row)


def start_output(output: OutputFile, settings: Mapping[str, Any]) -> None:
    """Empties an output and what stands beside it, and writes its meta file, before the first record.

    Nothing is lost before the new meta file is whole on the disk; a kill in between leaves an output without one, which is
    refused by `--resume`. Raises EngineError.
    """
    if output.is_regular:
        meta = written_meta(output.path, settings)
        output.empty()
        _remove_temporaries(output.path)
        put_meta(output.path, meta)


def resume_output(
    output: OutputFile,
    settings: Mapping[str, Any],
    order: Order,
    rows: Iterable[Row | RowFault] | None,
    rerun_changed: bool = False,
    is_whole_input: bool = True,
) -> ResumePlan:
    """Repairs a locked output and says what is done. A missing or empty output is begun afresh.

    `rows` is a reading of the input ahead of the run, which finds changed rows before anything is touched; None when the input
    can be read only once: then `ResumePlan.remaining` finds them, and `rerun_changed` cannot be had. `is_whole_input` is false
    when `rows` ends early (`--limit`).

    Raises UsageError, with nothing touched, that names the setting which differs or the row which changed, and EngineError
    when the repaired file cannot be written.
    """
    if rows is None and rerun_changed:
        raise UsageError("--rerun-changed needs an input that can be read twice: a regular file")
    pending = pending_path(output.path)
    if output.size or (pending.exists() and pending.stat().st_size):
        refuse_other_settings(output.path, settings)
    _remove_temporaries(output.path)
    plan = ResumePlan()
    with _Records(output.path, pending) as records:
        places = _scan(records, plan)
        if rows is not None:
            _compare(plan, places, rows, rerun_changed, is_whole_input)
        try:
            if order == "input":
                _rewrite_in_order(output, records, plan, places)
            elif plan.num_failed or plan.num_broken or plan.num_changed or records.has_pending:
                _rewrite(output, records, places)
        except OSError as error:
            _remove_temporaries(output.path)
            raise EngineError(f"{output.path}: {error.strerror}; it is as it was, --resume goes on") from error
    write_meta(output.path, settings)
    return plan


def good_record(line: bytes) -> GoodRecord | Literal["failed"] | None:
    """What a line of an output is: a record to keep, one of a row that failed, or None for a torn or foreign line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    index, digits = record.get("index"), record.get("row_hash")
    if type(index) is not int or not 0 <= index < MAX_INDEX or type(digits) is not str or not _ROW_HASH.fullmatch(digits):
        return None
    if record.get("error", False) is not None:
        return "failed" if isinstance(record.get("error"), dict) else None
    return GoodRecord(index, hash_number(digits))


def hash_number(digits: str) -> int:
    """A row hash as a number, never 0."""
    return int(digits, 16) or 1


def changed_row(row: Row | RowFault) -> UsageError:
    name = f"row {row.index}" + (f" (id {json.dumps(row.id)})" if row.id is not None else "")
    where = f"{row.file}, line {row.line}"
    return UsageError(
        f"--resume: {name} of {where} is not the row that its record was made from; --rerun-changed runs it again"
    )


class _Records:
    """The lines of OUTPUT and OUTPUT.pending, read in turn or by place: a place is `offset * 2 + which file + 1`."""

    def __init__(self, output: Path, pending: Path) -> None:
        self._paths = (output, pending)
        self._files: list[BinaryIO] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Records:
        for path in self._paths:
            if path.exists():
                self._files.append(self._stack.enter_context(path.open("rb", buffering=_BUFFER_BYTES)))
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    @property
    def has_pending(self) -> bool:
        return len(self._files) > 1

    def is_pending(self, place: int) -> bool:
        return (place - 1) % 2 == 1

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Place and bytes of each line."""
        for which, file in enumerate(self._files):
            file.seek(0)
            offset = 0
            for line in iter(file.readline, b""):
                yield offset * 2 + which + 1, line
                offset += len(line)

    def at(self, place: int) -> bytes:
        offset, which = divmod(place - 1, 2)
        file = self._files[which]
        file.seek(offset)
        return file.readline()


def _scan(records: _Records, plan: ResumePlan) -> RowTable:
    """Fills the plan's hashes and counts; returns the places of the records to keep."""
    places = RowTable()
    for place, line in records.lines():
        found = good_record(line)
        if found is None:
            plan.num_broken += bool(line.strip())
        elif found == "failed":
            plan.num_failed += 1
        elif not plan.hashes[found.row]:
            plan.hashes[found.row] = found.row_hash
            places[found.row] = place
            plan.num_kept += 1
        elif not records.is_pending(place):
            plan.num_broken += 1
    return places


def _compare(
    plan: ResumePlan, places: RowTable, rows: Iterable[Row | RowFault], rerun_changed: bool, is_whole_input: bool
) -> None:
    """Gives up the records whose rows changed or are gone, or refuses to."""
    num_rows = 0
    for row in rows:
        num_rows += 1
        known = plan.hashes[row.index]
        if known and known != hash_number(row.row_hash):
            if not rerun_changed:
                raise changed_row(row)
            _give_up(plan, places, row.index)
    if not is_whole_input:
        return
    for index in plan.hashes.indices():
        if index >= num_rows:
            if not rerun_changed:
                only = f"the output has a record of row {index}, the input has only {counted(num_rows, 'row')}"
                raise UsageError(f"--resume: {only}; --rerun-changed drops what is gone")
            _give_up(plan, places, index)


def _give_up(plan: ResumePlan, places: RowTable, index: int) -> None:
    plan.hashes[index] = places[index] = 0
    plan.num_kept -= 1
    plan.num_changed += 1


def _rewrite(output: OutputFile, records: _Records, places: RowTable) -> None:
    """All records to OUTPUT, in the order in which they stand; then the pending file has nothing of its own."""
    temporary = _temporary(output.path)
    with temporary.open("wb", buffering=_BUFFER_BYTES) as file:
        for place, line in records.lines():
            found = good_record(line)
            if isinstance(found, GoodRecord) and places[found.row] == place:
                file.write(line)
    output.replace_with(temporary)
    pending_path(output.path).unlink(missing_ok=True)


def _rewrite_in_order(output: OutputFile, records: _Records, plan: ResumePlan, places: RowTable) -> None:
    """The records before the first gap to OUTPUT, the others to OUTPUT.pending, whose rename comes first."""
    temporary, waiting = _temporary(output.path), _temporary(pending_path(output.path))
    offset = 0
    with temporary.open("wb", buffering=_BUFFER_BYTES) as file, waiting.open("wb", buffering=_BUFFER_BYTES) as later:
        for index in places.indices():
            line = records.at(places[index])
            is_next = index == plan.first
            if is_next:
                file.write(line)
                plan.first += 1
            else:
                plan.waiting[index] = offset + 1
            if not is_next or records.is_pending(places[index]):
                later.write(line)
                offset += len(line)
        later.flush()
        os.fsync(later.fileno())
    os.replace(waiting, pending_path(output.path))
    sync_directory(output.path)
    output.replace_with(temporary)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".resume")


def _remove_temporaries(path: Path) -> None:
    """What a resume that was killed may have left; the lock says that nobody is at work on it."""
    for temporary in (_temporary(path), _temporary(pending_path(path))):
        temporary.unlink(missing_ok=True)
