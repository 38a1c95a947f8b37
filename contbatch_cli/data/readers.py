"""From inputs to rows and faults, in order, read as they are needed: every row of the input gives exactly one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Literal

from contbatch_cli.data.column_rows import column_draft, prompt_column
from contbatch_cli.data.csv_rows import CsvReader
from contbatch_cli.data.duplicate_ids import DuplicateIds
from contbatch_cli.data.json_line import parse_json
from contbatch_cli.data.native_rows import json_type, native_draft, text_prompt
from contbatch_cli.data.openai_rows import is_openai_row, openai_draft, openai_envelope
from contbatch_cli.data.parquet_rows import ParquetReader
from contbatch_cli.data.rows import ChatPrompt, Draft, OpenAIEnvelope, Row, RowFault, bytes_hash, canonical_json, row_hash
from contbatch_cli.data.sources import (
    MAX_LINE_BYTES,
    STANDARD_INPUT,
    Line,
    can_be_read_twice,
    check_sources,
    opened_source,
    split_lines,
)
from contbatch_cli.data.template_rows import compiled_template, template_draft
from contbatch_cli.errors import RowError, UsageError

Format = Literal["jsonl", "text", "csv", "parquet"]
MakeDraft = Callable[[Any], Draft]
_Entry = tuple[int, bytes, Any]
"""One row as a format has it: its line, its bytes, which are hashed for a fault, and a JSON value, or why there is none."""

_FORMATS_BY_SUFFIX: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How inputs are read. `template` is a text or `@FILE`; `limit` counts rows, good or bad."""

    format: Literal["auto"] | Format = "auto"
    template: str | None = None
    raw: bool = False
    system: str | None = None
    limit: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES

    def __post_init__(self) -> None:
        if self.raw and self.template is None:
            raise UsageError("--raw needs --template: it says what the template's text is")
        if self.raw and self.system is not None:
            raise UsageError("--system needs a chat, --raw makes raw text: give one of them")


def format_of(name: str, wanted: Literal["auto"] | Format) -> Format:
    """The format of one input: the one wanted, or by the name's ending (`.gz` aside), JSON Lines where that says nothing."""
    if wanted != "auto":
        return wanted
    base = name.lower().removesuffix(".gz")
    return next((kind for suffix, kind in _FORMATS_BY_SUFFIX.items() if base.endswith(suffix)), "jsonl")


def read_rows(sources: Sequence[str], options: InputOptions | None = None) -> Iterator[Row | RowFault]:
    """The rows and faults of all inputs in order; `-` is standard input.

    Raises UsageError at once for options and inputs that cannot be used, and EngineError when an input breaks off.
    """
    options = options or InputOptions()
    check_sources(sources)
    reader = _Reader(sources, options)
    reader.check()
    return islice(reader.rows(), options.limit)


class _Reader:
    def __init__(self, sources: Sequence[str], options: InputOptions) -> None:
        self._inputs = [(name, format_of(name, options.format)) for name in sources]
        self._options = options
        self._render = compiled_template(options.template) if options.template is not None else None
        self._ids = DuplicateIds()

    def check(self) -> None:
        """Opens what can be opened twice, so that a wrong header is known before anything is run."""
        for name, kind in self._inputs:
            if kind == "parquet":
                if name == STANDARD_INPUT:
                    raise UsageError("-: Parquet cannot be read from standard input")
                self._column_drafter(ParquetReader(name).names, name)
            elif kind == "csv" and can_be_read_twice(name):
                with opened_source(name) as stream:
                    self._column_drafter(self._csv(stream, name).names, name)

    def rows(self) -> Iterator[Row | RowFault]:
        index = 0
        for number, (name, kind) in enumerate(self._inputs):
            with nullcontext() if kind == "parquet" else opened_source(name) as stream:
                entries, draft_of = self._entries(name, kind, stream)
                for entry in entries:
                    yield self._row(index, number, name, entry, draft_of)
                    index += 1

    def _row(self, index: int, number: int, file: str, entry: _Entry, draft_of: MakeDraft) -> Row | RowFault:
        line, raw, value = entry
        id: str | int | None = None
        envelope: OpenAIEnvelope | None = None
        try:
            if isinstance(value, RowError):
                raise value
            if type(value) is dict:
                envelope = self._envelope(value)
                id = _row_id(value) if envelope is None else envelope.custom_id
                if id is not None:
                    self._refuse_duplicate(id, number, line)
            prompt, params, extra = openai_draft(value, envelope) if envelope is not None else draft_of(value)
            if self._options.system is not None:
                prompt = _with_system(prompt, self._options.system)
            return Row(index, id, line, file, prompt, params, extra, row_hash(prompt, params), envelope)
        except RowError as error:
            return RowFault(
                index, id, line, file, error.code, _placed(index, error), bytes_hash(raw.rstrip(b"\r\n")), {}, envelope
            )

    def _envelope(self, columns: dict[str, Any]) -> OpenAIEnvelope | None:
        return openai_envelope(columns) if self._render is None and is_openai_row(columns) else None

    def _refuse_duplicate(self, id: str | int, number: int, line: int) -> None:
        first = self._ids.first_use(id, number, line)
        if first is not None:
            where = "" if first.source == number else f" of {self._inputs[first.source][0]}"
            shown = canonical_json(id)[:80]
            raise RowError("duplicate_id", f"the id {shown} was used before, in line {first.line}{where}")

    def _entries(self, name: str, kind: Format, stream: BinaryIO | None) -> tuple[Iterator[_Entry], MakeDraft]:
        """One input's rows and what makes their drafts. `stream` is None for Parquet, which opens its own file."""
        if stream is None:
            parquet = ParquetReader(name)
            return _parquet_entries(parquet), self._column_drafter(parquet.names, name)
        if kind == "csv":
            table = self._csv(stream, name)
            return _csv_entries(table), self._column_drafter(table.names, name)
        lines = split_lines(stream, name, self._options.max_line_bytes)
        entries = _json_entries(lines) if kind == "jsonl" else _text_entries(lines)
        return entries, self._drafter(_json_draft if kind == "jsonl" else _text_draft)

    def _csv(self, stream: BinaryIO, name: str) -> CsvReader:
        delimiter = "\t" if name.lower().removesuffix(".gz").endswith(".tsv") else ","
        return CsvReader(stream, name, delimiter, self._options.max_line_bytes)

    def _drafter(self, without_template: MakeDraft) -> MakeDraft:
        render, raw = self._render, self._options.raw
        if render is None:
            return without_template
        return lambda value: template_draft(value, render, raw)

    def _column_drafter(self, names: Sequence[str], source: str) -> MakeDraft:
        if self._render is not None:
            return self._drafter(_json_draft)
        column = prompt_column(names, source)
        return lambda value: column_draft(value, column)


def _placed(index: int, error: RowError) -> str:
    """Text that cannot be read is told by its line, everything that is wrong with what it says by the row (`prepared_fault`)."""
    return error.message if error.message.startswith("line ") else f"row {index}: {error.message}"


def _row_id(columns: dict[str, Any]) -> str | int | None:
    id = columns.get("id")
    if id is None or type(id) is str or type(id) is int:
        return id
    raise RowError("invalid_row", f'"id" is {json_type(id)}, it must be a string or an integer')


def _with_system(prompt: object, system: str) -> ChatPrompt:
    """The chat with a system message before it, unless it begins with its own."""
    if not isinstance(prompt, ChatPrompt):
        raise RowError("invalid_row", "--system needs messages or --template, the row is a raw prompt")
    if prompt.messages[0]["role"] in ("system", "developer"):
        return prompt
    return prompt._replace(messages=[{"role": "system", "content": system}, *prompt.messages])


def _json_entries(lines: Iterator[Line]) -> Iterator[_Entry]:
    for number, raw, error in lines:
        value: object = error
        if error is None:
            try:
                value = parse_json(raw, f"line {number}")
            except RowError as fault:
                value = fault
        yield number, raw, value


def _json_draft(value: object) -> Draft:
    if type(value) is dict:
        return native_draft(value)
    if type(value) is str:
        return Draft(text_prompt(value), {}, {})
    raise RowError("invalid_row", f"the row is {json_type(value)}, it must be an object or a string")


def _text_entries(lines: Iterator[Line]) -> Iterator[_Entry]:
    for number, raw, error in lines:
        value: object = error
        if error is None:
            try:
                value = raw.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as fault:
                value = RowError("invalid_encoding", f"line {number}, byte {fault.start + 1}: not UTF-8 ({fault.reason})")
        yield number, raw, value


def _text_draft(value: object) -> Draft:
    return Draft(text_prompt(value), {}, {})


def _csv_entries(table: CsvReader) -> Iterator[_Entry]:
    yield from table.records()


def _parquet_entries(table: ParquetReader) -> Iterator[_Entry]:
    for number, columns in table.records():
        yield number, canonical_json(columns).encode(), columns
