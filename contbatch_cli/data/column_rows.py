"""Rows whose columns are all data (CSV, Parquet, text lines, or any row under a template): one column is the prompt.

Parameters come from a `params` object only, which in a text format is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contbatch_cli.data.json_line import parse_json
from contbatch_cli.data.native_rows import checked_messages, json_type, text_prompt
from contbatch_cli.data.params import validated
from contbatch_cli.data.rows import ChatPrompt, Draft
from contbatch_cli.errors import RowError, UsageError

PARAMS_COLUMN = "params"
ID_COLUMN = "id"
_DEFAULT_COLUMNS = ("messages", "prompt", "text")


def prompt_column(names: Sequence[str], source: str) -> str:
    """The column that holds the prompt: `messages`, `prompt`, `text`, or the only one that is neither `id` nor `params`."""
    for name in _DEFAULT_COLUMNS:
        if name in names:
            return name
    data = [name for name in names if name not in (ID_COLUMN, PARAMS_COLUMN)]
    if len(data) == 1:
        if ";" in data[0] or "\t" in data[0]:
            raise UsageError(f"{source}: one column, {data[0]!a}: columns are parted by commas, in a .tsv by tabs")
        return data[0]
    listed = ", ".join(names[:20])
    raise UsageError(f"{source}: no column is named {', '.join(_DEFAULT_COLUMNS)}; use --template over its columns: {listed}")


def column_draft(columns: dict[str, Any], column: str) -> Draft:
    """The draft of one row by its prompt column. Raises RowError."""
    params, extra = split_params_column(columns)
    value = extra.pop(column, None)
    if value is None:
        raise RowError("empty_prompt", f'the column "{column}" is empty')
    if column == "messages":
        return Draft(ChatPrompt(checked_messages(_from_json(value, column))), params, extra)
    return Draft(text_prompt(value), params, extra)


def split_params_column(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The validated parameters and the data columns (`id` and `params` are neither)."""
    extra = dict(columns)
    extra.pop(ID_COLUMN, None)
    given = extra.pop(PARAMS_COLUMN, None)
    if given is None or given == "":
        return {}, extra
    params = _from_json(given, PARAMS_COLUMN)
    if type(params) is not dict:
        raise RowError("invalid_row", f'"{PARAMS_COLUMN}" is {json_type(params)}, it must be an object')
    return validated(params), extra


def _from_json(value: Any, column: str) -> Any:
    """A nested value, which text formats carry as JSON."""
    if type(value) is not str:
        return value
    return parse_json(value.encode("utf-8", "surrogatepass"), f'column "{column}"')
