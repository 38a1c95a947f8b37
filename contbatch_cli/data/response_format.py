"""What a row's `response_format` means: a grammar for llguidance (the extra `grammar`), made and checked without torch.

| format | the text is |
|---|---|
| `{"type": "json_schema", "json_schema": {"schema": S}}` | JSON that is valid under S (OpenAI's shape) |
| `{"type": "json_object"}` | any JSON object |
| `{"type": "regex", "pattern": R}` | matched by R from its first character to its last (also under the key `regex`) |
| `{"type": "choice", "choices": [C, ...]}` | one of the choices |

JSON is written on one line with `", "` and `": "`: where a grammar lets whitespace grow, small models write it without end.
A schema may choose otherwise by llguidance's own key `x-guidance`. Keywords that the library does not know as a constraint are
annotations and change nothing; those that it knows of but cannot enforce are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from contbatch_cli.errors import RowError

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def has_grammar_support() -> bool:
    """Whether the grammar library is installed."""
    return find_spec("llguidance") is not None


def check_response_format(response_format: str | Mapping[str, Any]) -> None:
    """Raises RowError `invalid_parameter` when no grammar can be made of a format, given as an object or as its JSON."""
    text = response_format if isinstance(response_format, str) else json.dumps(response_format, ensure_ascii=False)
    if (problem := _problem_of(text)) is not None:
        raise RowError("invalid_parameter", f"response_format: {problem}")


@lru_cache(maxsize=4096)
def _problem_of(response_format: str) -> str | None:
    if not has_grammar_support():
        return "needs the grammar library: pip install 'contbatch[grammar]'"
    import llguidance

    try:
        grammar = grammar_text(response_format)
    except RowError as error:
        return error.message
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(messages[0].split()) if is_error else None


def grammar_text(response_format: str) -> str:
    """The grammar, in llguidance's own notation, of a format's JSON. Raises RowError for a format of another shape.

    That the library takes the grammar is not checked here.
    """
    from llguidance import LLMatcher

    grammar: str
    match json.loads(response_format):
        case {"type": "json_object"}:
            grammar = LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=JSON_LAYOUT)
        case {"type": "json_schema", "json_schema": {"schema": False}}:
            raise RowError("invalid_parameter", "the schema false allows no value")
        case {"type": "json_schema", "json_schema": {"schema": dict() | True as schema}}:
            grammar = LLMatcher.grammar_from_json_schema("{}" if schema is True else json.dumps(schema), defaults=JSON_LAYOUT)
        case {"type": "regex", "pattern": str() as pattern} | {"type": "regex", "regex": str() as pattern}:
            grammar = LLMatcher.grammar_from_regex(pattern)
        case {"type": "choice", "choices": [str(), *_] as choices} if all(isinstance(choice, str) for choice in choices):
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, choices)))
        case _:
            kinds = 'json_schema with "json_schema": {"schema": ...}, json_object, regex with "pattern", choice with "choices"'
            raise RowError("invalid_parameter", f"is none of {kinds}")
    return grammar


def _lark_text(choice: str) -> str:
    """A text as a terminal of a Lark grammar, whose escapes are JSON's."""
    return json.dumps(choice, ensure_ascii=False)
