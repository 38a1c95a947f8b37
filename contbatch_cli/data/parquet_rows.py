"""Parquet files through pyarrow (an extra): batches of records, each a dict of JSON values."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

from contbatch_cli.errors import UsageError

BATCH_ROWS = 1024


class ParquetReader:
    """Opens the file at once and reads row groups as they are asked for. Raises UsageError when it cannot be read so."""

    def __init__(self, name: str) -> None:
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise UsageError(f"{name}: reading Parquet needs pyarrow: pip install 'contbatch[parquet]'") from None
        try:
            self._file = parquet.ParquetFile(name)
        except (OSError, ValueError) as error:  # pyarrow's own errors derive from ValueError
            raise UsageError(f"{name}: {error}") from None
        self.names: list[str] = list(self._file.schema_arrow.names)

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Record number from 1 (a Parquet file has no lines) and columns."""
        number = 0
        for batch in self._file.iter_batches(batch_size=BATCH_ROWS):
            for columns in batch.to_pylist():
                number += 1
                yield number, {key: json_value(value) for key, value in columns.items()}


def json_value(value: Any) -> Any:
    """What JSON can carry of a Parquet value: a number that is not finite becomes null, dates ISO 8601, bytes UTF-8, the rest
    (decimals, UUIDs) its text. The nulls of a struct are left out: its fields are those of all records together.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
