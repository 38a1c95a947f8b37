"""What each config key may hold, read off the dataclasses: checks with messages, and the JSON Schema."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from contbatch_cli.config import Config, Rule

Value = bool | int | float | str | tuple[str, ...] | Mapping[str, str] | None
"""What a key can hold. Values of files arrive as these, or as lists."""

MAX_NUMBER = 2**63 - 1
"""The largest number that any key takes."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the config; `path` is "section.name".

    It holds one of `kinds`, one of the words `choices`, a list of strings, or a mapping of names to strings.
    """

    path: str
    default: Value
    kinds: tuple[type, ...]
    choices: tuple[str, ...]
    is_list: bool
    is_mapping: bool
    rule: Rule

    def convert(self, value: object) -> Value:
        """`value` as this key holds it. Raises ValueError that says what the key must be."""
        if self.is_list:
            return self._convert_list(value)
        if self.is_mapping:
            return self._convert_mapping(value)
        converted = self._convert_scalar(value)
        if self.rule.check is not None:
            self.rule.check(converted)
        return converted

    def _convert_list(self, value: object) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"must be {self.expects}")
        for item in items:
            self._check_text(item)
        return tuple(items)

    def _convert_mapping(self, value: object) -> dict[str, str]:
        entries = {} if value is None else value
        if not isinstance(entries, Mapping) or not all(isinstance(entry, str) for entry in entries.values()):
            raise ValueError(f"must be {self.expects}")
        if not all(name.strip() for name in entries):
            raise ValueError("has an entry without a name")
        return {name: self._check_text(entry) for name, entry in entries.items()}

    def _convert_scalar(self, value: object) -> Value:
        if isinstance(value, str) and value in self.choices:
            return value
        if isinstance(value, str) and str in self.kinds:
            return self._check_text(value)
        if isinstance(value, bool) or value is None:
            if type(value) in self.kinds:
                return cast(Value, value)
        elif isinstance(value, int) and int in self.kinds:
            self._check_range(value)
            return value
        elif isinstance(value, (int, float)) and float in self.kinds:
            self._check_range(value)
            return float(value)
        raise ValueError(f"must be {self.expects}{self._nearest_choice(value)}")

    def _check_text(self, text: str) -> str:
        if self.rule.pattern is not None and not re.fullmatch(self.rule.pattern, text):
            raise ValueError(f"must be {self.expects}" if text else "must not be empty")
        return text

    def _check_range(self, number: int | float) -> None:
        rule = self.rule
        too_low = (rule.minimum is not None and number < rule.minimum) or (rule.above is not None and number <= rule.above)
        too_high = rule.maximum is not None and number > rule.maximum
        if too_low or too_high or number != number:
            raise ValueError(f"must be {self.expects}")
        if abs(number) > MAX_NUMBER:
            raise ValueError(f"must be at most {MAX_NUMBER:,}")

    def _nearest_choice(self, value: object) -> str:
        close = difflib.get_close_matches(value, self.choices, 1) if isinstance(value, str) else []
        return f"; did you mean {close[0]}?" if close else ""

    @property
    def expects(self) -> str:
        """The values in words: "a whole number of at least 1, or auto"."""
        if self.rule.expects is not None:
            return self.rule.expects
        if self.is_list:
            return "a string that is not empty, or a list of such strings"
        parts = [f"{_word(kind)}{self._bounds() if kind in (int, float) else ''}" for kind in self.kinds]
        words = ([", ".join(self.choices)] if not parts else [*self.choices]) if self.choices else []
        prefix = "one of " if words and not parts else ""
        return prefix + ", or ".join(parts + words)

    def _bounds(self) -> str:
        rule = self.rule
        if rule.above is not None:
            return f" above {rule.above}" + (f" and up to {rule.maximum}" if rule.maximum is not None else "")
        if rule.minimum is None:
            return ""
        return f" of at least {rule.minimum}" if rule.maximum is None else f" from {rule.minimum} to {rule.maximum}"

    def json_schema(self) -> dict[str, Any]:
        """This key in JSON Schema."""
        types = [self._type_schema(kind) for kind in self.kinds]
        if self.choices:
            types.append({"enum": list(self.choices)})
        if self.is_list:
            text = {"type": "string", "minLength": 1}
            types = [text, {"type": "array", "items": text}]
        if self.is_mapping:
            types = [{"type": ["object", "null"], "additionalProperties": {"type": "string", "minLength": 1}}]
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        return {"description": self.rule.doc, "default": default, **(types[0] if len(types) == 1 else {"anyOf": types})}

    def _type_schema(self, kind: type) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": _JSON_TYPES[kind]}
        if kind in (int, float):
            bounds = {"minimum": self.rule.minimum, "exclusiveMinimum": self.rule.above, "maximum": self.rule.maximum}
            schema |= {name: bound for name, bound in bounds.items() if bound is not None}
        if kind is str and self.rule.pattern is not None:
            schema["pattern"] = f"^({self.rule.pattern})$"
        return schema


def _word(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}[kind]


@cache
def config_keys() -> dict[str, Key]:
    """Every key by its path, in the order of the dataclasses."""
    sections = get_type_hints(Config)
    keys = (key for section in fields(Config) for key in _section_keys(section.name, sections[section.name]))
    return {key.path: key for key in keys}


def section_names() -> tuple[str, ...]:
    return tuple(section.name for section in fields(Config))


def _section_keys(section: str, section_type: Any) -> list[Key]:
    hints = get_type_hints(section_type)
    return [
        Key(f"{section}.{item.name}", _default(item), *_allowed(hints[item.name]), item.metadata["rule"])
        for item in fields(section_type)
    ]


def _default(item: Field[Any]) -> Value:
    return cast(Value, item.default if item.default_factory is MISSING else item.default_factory())


def mapping_of(path: str) -> Key | None:
    """The mapping that "section.name.entry" is an entry of, None if there is none."""
    section, _, rest = path.partition(".")
    key = config_keys().get(f"{section}.{rest.partition('.')[0]}")
    return key if key is not None and key.is_mapping and path.startswith(f"{key.path}.") else None


def _allowed(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...], bool, bool]:
    """The kinds and the words that a type hint allows, whether it is a list of strings, and whether a mapping to strings."""
    if get_origin(hint) in (tuple, Mapping):
        return (), (), get_origin(hint) is tuple, get_origin(hint) is Mapping
    members = [hint] if isinstance(hint, type) or get_origin(hint) is Literal else get_args(hint)
    kinds = tuple(member for member in members if isinstance(member, type))
    choices = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
    return kinds, choices, False, False


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a config file."""
    sections: dict[str, Any] = {
        name: {"type": ["object", "null"], "additionalProperties": False, "properties": {}} for name in section_names()
    }
    for path, key in config_keys().items():
        section, name = path.split(".")
        sections[section]["properties"][name] = key.json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "contbatch config",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": sections,
    }


def suggestion(unknown: str) -> str:
    """The known path nearest to an unknown one, by its last word (own section first) or the whole; "" if none is near."""
    section, _, name = unknown.rpartition(".")
    paths = list(config_keys())
    siblings = {path.rpartition(".")[2]: path for path in paths if path.startswith(f"{section}.")}
    sections = {} if section else {known: known for known in section_names()}
    leaves = {path.rpartition(".")[2]: path for path in paths}
    for candidates, word in ((siblings, name), (sections, name), (leaves, name), ({path: path for path in paths}, unknown)):
        close = difflib.get_close_matches(word, candidates, 1)
        if close:
            return candidates[close[0]]
    return ""


def shown(value: object) -> str:
    """A value as messages show it: short, in one line."""
    text = value if isinstance(value, str) and value.isprintable() and value else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
