"""CSV with a header line: fields may be quoted and hold newlines; each record is a dict of texts."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from contbatch_cli.data.rows import canonical_json
from contbatch_cli.data.sources import Line, split_lines
from contbatch_cli.errors import RowError, UsageError
from contbatch_cli.units import counted


class CsvRecord(NamedTuple):
    """One record, the line where it begins, and bytes to hash when it is faulty."""

    line: int
    raw: bytes
    columns: dict[str, Any] | RowError


class CsvReader:
    """Reads the header at once, records as they are asked for. Raises UsageError for a header that cannot name columns."""

    def __init__(self, stream: BinaryIO, name: str, delimiter: str, max_bytes: int) -> None:
        csv.field_size_limit(max_bytes)
        self._lines = split_lines(stream, name, max_bytes, keep_blank=True)
        self._first_line = 0
        self._last_line = 0
        self._oversized: RowError | None = None
        self._is_at_end = False
        self._reader = csv.reader(self._texts(), delimiter=delimiter)
        self.names = self._header(name)

    def _texts(self) -> Iterator[str]:
        for line in self._lines:
            self._last_line = line.number
            self._first_line = self._first_line or line.number
            yield self._text(line)
        self._is_at_end = True

    def _text(self, line: Line) -> str:
        if line.error is not None:
            self._oversized = line.error
            return "\n"
        return line.raw.decode("utf-8", "surrogateescape")

    def _header(self, name: str) -> list[str]:
        try:
            names = next((fields for fields in self._reader if fields), [])
        except csv.Error as error:
            raise UsageError(f"{name}: line {self._last_line}: {error}") from None
        if not names:
            raise UsageError(f"{name}: no header line that names the columns")
        for column in names:
            if not column or names.count(column) > 1 or not _is_clean(column):
                raise UsageError(f"{name}: the header has an empty, repeated or undecodable column name: {column!a}")
        return names

    def records(self) -> Iterator[CsvRecord]:
        """All records after the header; blank lines between them are skipped."""
        while True:
            self._first_line, self._oversized = 0, None
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield self._faulty("invalid_row", str(error), [])
                continue
            if self._is_at_end:  # a complete record ends with its line, before the next one is asked for
                yield self._faulty("invalid_row", "a quote that opens here is not closed by the end of the file", fields)
            elif self._oversized is not None:
                yield CsvRecord(self._first_line, b"", self._oversized)
            elif fields and fields != [""]:
                yield self._record(fields)

    def _record(self, fields: list[str]) -> CsvRecord:
        if len(fields) != len(self.names):
            return self._faulty("invalid_row", f"{counted(len(fields), 'field')}, the header names {len(self.names)}", fields)
        if not all(map(_is_clean, fields)):
            return self._faulty("invalid_encoding", "not UTF-8", fields)
        return CsvRecord(self._first_line, canonical_json(fields).encode(), dict(zip(self.names, fields, strict=True)))

    def _faulty(self, code: str, message: str, fields: list[str]) -> CsvRecord:
        error = RowError(code, f"line {self._first_line}: {message}")
        return CsvRecord(self._first_line, canonical_json(fields).encode(), error)


def _is_clean(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
