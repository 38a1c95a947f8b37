"""Every parameter that a row may give: its names, its range, its canonical form. A parameter is honoured or refused.

| parameter | accepted | canonical form |
|---|---|---|
| `max_tokens` (`max_new_tokens`, `max_completion_tokens`) | integer from 0 (0: score the prompt only) | int |
| `min_tokens` | integer from 0 | int |
| `temperature` | 0 to 2; 0 is greedy | float |
| `top_p` | above 0, at most 1 | float |
| `top_k` | integer from -1; -1 and 0 are off | int from 0 |
| `min_p` | 0 to 1 | float |
| `seed` | 64-bit signed integer | int |
| `n` | 1 to 128 | int |
| `stop` | a text or a list of texts, none empty | list of str |
| `stop_token_ids` | list of token ids | list of int |
| `ignore_eos`, `stop_on_repetition` | boolean | bool |
| `presence_penalty`, `frequency_penalty` | -2 to 2 | float |
| `repetition_penalty` | above 0, at most 100 | float |
| `logit_bias` | object of token id to -100..100 | the same, keys in numeric order |
| `bad_words` | list of texts, none empty | list of str |
| `logprobs`, `top_logprobs` | see `_merge_logprobs` | `logprobs`: int, the number of alternatives |
| `prompt_logprobs` | 0 to 20 | int |
| `response_format` | see `_response_format` | the same object; `text` is the same as nothing |
| `adapter` | a name | str |

null is the same as not given. An integer may be written as `16.0`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from contbatch_cli.data.misspelling import corrected
from contbatch_cli.errors import RowError

Check = Callable[[str, Any], Any]

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 128
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_SHOWN_CHARACTERS = 80


class Parameter(NamedTuple):
    """A parameter under one of its names; `check(name, value)` gives the canonical value or raises RowError."""

    name: str
    check: Check


def refused(name: str, value: object, wanted: str) -> RowError:
    """The error of a value that is not what the parameter takes."""
    return RowError("invalid_parameter", f"{name} is {shown(value)}, it must be {wanted}")


def shown(value: object) -> str:
    """A value as its row has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise refused(name, value, f"an integer from {low:,} to {high:,}")
        return value

    return check


def _number(low: float, high: float, above: bool = False) -> Check:
    wanted = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise refused(name, value, wanted)
        return float(value) + 0.0  # -0.0 becomes 0.0: what is equal is written alike

    return check


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise refused(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if type(value) is not str or not value:
        raise refused(name, value, "a text that is not empty")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if type(value) is not list or not all(type(text) is str and text for text in value):
        raise refused(name, value, "a list of texts, none of them empty")
    return value


def _text_or_texts(name: str, value: Any) -> list[str]:
    return _texts(name, [value] if type(value) is str else value)


def _token_ids(name: str, value: Any) -> list[int]:
    if type(value) is not list or not all(type(token) is int and 0 <= token <= MAX_TOKENS for token in value):
        raise refused(name, value, "a list of token ids")
    return value


def _top_k(name: str, value: Any) -> int:
    return max(0, int(_integer(-1, MAX_TOKENS)(name, value)))


def _logit_bias(name: str, value: Any) -> dict[str, float]:
    if type(value) is not dict:
        raise refused(name, value, "an object of token id to bias")
    number = _number(-100, 100)
    for key in value:
        if not _TOKEN_ID.fullmatch(key):
            raise RowError("invalid_parameter", f"{name} has the key {shown(key)}, which is no token id")
    return {key: number(f"{name}[{key}]", value[key]) for key in sorted(value, key=int)}


def _logprobs(name: str, value: Any) -> bool | int:
    if type(value) is bool:
        return value
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise refused(name, value, f"true, false or an integer from 0 to {MAX_TOP_LOGPROBS}")
    return value


def _response_format(name: str, value: Any) -> dict[str, Any]:
    """`{"type": T, ...}` with T one of `text`, `json_object`, `json_schema` (its `json_schema.schema`, as OpenAI has it),
    `regex` (its `pattern`, also under the key `regex`) and `choice` (its `choices`). Whether the schema can be used is for the
    grammar library to say.
    """
    kind = value.get("type") if type(value) is dict else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema":
        spec = value.get("json_schema")
        if type(spec) is dict and type(spec.get("schema")) in (dict, bool):
            return {"type": kind, "json_schema": spec}
        raise RowError("invalid_parameter", f'{name}: "json_schema" needs {{"schema": {{...}}}} inside "json_schema"')
    if kind == "regex":
        return {"type": kind, "pattern": _text(f"{name}.pattern", value.get("pattern", value.get("regex")))}
    if kind == "choice":
        choices = _texts(f"{name}.choices", value.get("choices"))
        if choices:
            return {"type": kind, "choices": choices}
        raise refused(f"{name}.choices", choices, "a list of at least one text")
    raise refused(name, value, 'an object whose "type" is text, json_object, json_schema, regex or choice')


_CHECKS: dict[str, Check] = {
    "max_tokens": _integer(0, MAX_TOKENS),
    "min_tokens": _integer(0, MAX_TOKENS),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "n": _integer(1, MAX_SAMPLES),
    "stop": _text_or_texts,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 100, above=True),
    "logit_bias": _logit_bias,
    "bad_words": _texts,
    "logprobs": _logprobs,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "response_format": _response_format,
    "adapter": _text,
    "stop_on_repetition": _boolean,
}
_ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

PARAMETERS: dict[str, Parameter] = {
    **{name: Parameter(name, check) for name, check in _CHECKS.items()},
    **{alias: Parameter(name, _CHECKS[name]) for alias, name in _ALIASES.items()},
}


def split_parameters(columns: dict[str, Any], reserved: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters, canonical, and the other columns that are not `reserved`. Raises RowError for a bad or misspelt one."""
    params: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in columns.items():
        parameter = PARAMETERS.get(key)
        if parameter is not None:
            if value is not None:
                _add(params, parameter, key, value)
        elif key not in reserved:
            right = misspelt_parameter(key)
            if right is not None:
                raise RowError("unknown_parameter", f'"{key}" is no parameter; the right name is "{right}"')
            others[key] = value
    return (_merged(params) if params else params), others


def validated(params: dict[str, Any]) -> dict[str, Any]:
    """The canonical form of an object that holds parameters and nothing else. Raises RowError, naming the key."""
    good, others = split_parameters(params, frozenset())
    for key in others:
        raise unknown(key)
    return good


def unknown(key: str, names: Iterable[str] = ()) -> RowError:
    """The error of a key that stands where only parameters may, with the name it may have meant."""
    right = misspelt_parameter(key) or corrected(key, names)
    hint = f'; the right name is "{right}"' if right else ""
    return RowError("unknown_parameter", f"{shown(key)} is no parameter{hint}")


@lru_cache(maxsize=4096)
def misspelt_parameter(key: str) -> str | None:
    """The parameter's name that `key` surely misspells; the same columns come with every row, so answers are kept."""
    return corrected(key, PARAMETERS)


def _add(params: dict[str, Any], parameter: Parameter, key: str, value: Any) -> None:
    checked = parameter.check(key, value)
    name = parameter.name
    if name in params and params[name] != checked:
        message = f"{name} is given twice, under two names: {params[name]} and {checked} ({key})"
        raise RowError("invalid_parameter", message)
    params[name] = checked


def _merged(params: dict[str, Any]) -> dict[str, Any]:
    """Rules over several parameters."""
    if "logprobs" in params or "top_logprobs" in params:
        _merge_logprobs(params)
    response_format = params.get("response_format")
    if response_format is not None and response_format["type"] == "text":
        del params["response_format"]
    minimum, maximum = params.get("min_tokens", 0), params.get("max_tokens")
    if maximum is not None and minimum > maximum:
        raise RowError("invalid_parameter", f"min_tokens is {minimum:,}, above max_tokens, {maximum:,}")
    return params


def _merge_logprobs(params: dict[str, Any]) -> None:
    """OpenAI's two ways in one number: chat's `logprobs: true` with `top_logprobs: k`, completions' `logprobs: k`.

    `logprobs: true` alone reports each token's own only (0 alternatives); `top_logprobs` without `logprobs: true` is refused,
    except for 0, which asks for nothing.
    """
    asked = params.pop("logprobs", False)
    top = params.pop("top_logprobs", None)
    if asked is False:
        if top:
            raise RowError("invalid_parameter", f"top_logprobs is {top}, which needs logprobs: true")
        return
    if asked is not True and top not in (None, asked):
        raise RowError("invalid_parameter", f"logprobs is {asked} and top_logprobs is {top}: give one number")
    params["logprobs"] = (top or 0) if asked is True else asked
