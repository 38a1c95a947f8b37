"""One line of bytes to one JSON value, strictly: what RFC 8259 does not allow is an error that says where."""

from __future__ import annotations

import json
import re
from json.scanner import make_scanner
from typing import Any

from contbatch_cli.errors import RowError

MAX_DEPTH = 128
_LINE_ENDS = frozenset({"", "\n", "\r\n"})
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """JSON that Python would read and that is not allowed here."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"the key {json.dumps(twice)} stands twice in one object")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if value - value != 0.0:
        raise _Refused(f"the number {digits[:40]} is out of range")
    return value


def _no_constant(name: str) -> float:
    raise _Refused(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
_scan = make_scanner(_decoder)  # type: ignore[arg-type]  # its stub means the scanner itself


def parse_json(raw: bytes, where: str) -> object:
    """The value of one JSON text. `where` ("line 3") begins each message.

    Raises RowError with `invalid_encoding` (not UTF-8, half a surrogate pair), `invalid_json`, or `invalid_row` (nested more
    than 128 deep, which could not be written again).
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        message = f"{where}, byte {error.start + 1}: not UTF-8 (0x{byte:02x}: {error.reason})"
        raise RowError("invalid_encoding", message) from None
    value = _decoded(text, where)
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RowError("invalid_row", f"{where}: nested more than {MAX_DEPTH} deep")
    if "\\u" in text and _SURROGATE_ESCAPE.search(raw):
        _refuse_lone_surrogates(value, where)
    return value


def _decoded(text: str, where: str) -> object:
    try:
        return _whole(text)
    except json.JSONDecodeError as error:
        raise RowError("invalid_json", f"{where}, {_described(error)}") from None
    except _Refused as error:
        raise RowError("invalid_json", f"{where}: {error}") from None
    except RecursionError:
        raise RowError("invalid_row", f"{where}: nested more than {MAX_DEPTH} deep") from None
    except ValueError:  # an integer of more digits than Python converts
        raise RowError("invalid_json", f"{where}: a number has too many digits") from None


def _whole(text: str) -> object:
    """The value of all of the text, as `JSONDecoder.decode` has it: what a line mostly ends with is told without its regexes."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:  # no value at the very start: whitespace, or an error that `decode` describes
        return _decoder.decode(text)
    return value if text[end:] in _LINE_ENDS else _decoder.decode(text)


def _described(error: json.JSONDecodeError) -> str:
    """Column (from 1, in characters) and reason, with a trailing comma named and placed alike in all versions of Python."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if error.msg.startswith("Illegal trailing comma"):
        return f"column {error.colno}: trailing comma"
    if before.endswith(",") and after[:1] in ("]", "}"):
        return f"column {len(before)}: trailing comma"
    if not after and before in ("[", "{"):
        return f"column {error.colno}: a lone {before}: each line has to be one whole row (JSON Lines)"
    if not after:
        return f"column {error.colno}: the line ends too early ({error.msg})"
    return f"column {error.colno}: {error.msg}"


def _is_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return False
        level = [item for item in below if isinstance(item, (dict, list))]
    return bool(level)


def _refuse_lone_surrogates(value: object, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = ord(error.object[error.start])
        message = f"{where}: a string holds half a surrogate pair (\\u{lone:04x})"
        raise RowError("invalid_encoding", message) from None
