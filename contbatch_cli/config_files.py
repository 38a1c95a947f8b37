"""Reads a config: a YAML file, `--set` assignments and command-line options, each over the one before, with their origins.

YAML is read by the core schema of YAML 1.2: `1e-5` is a number, `no` is a string (and still false where a key is true or
false), dates are strings, duplicate keys are refused. Everything wrong is a `UsageError` of one line: the place, the key, its
value, and what it must be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from contbatch_cli.config import (
    CacheConfig,
    ClusterConfig,
    Config,
    EngineConfig,
    ModelConfig,
    OutputConfig,
    SamplingConfig,
    SchedulerConfig,
)
from contbatch_cli.config_schema import Key, Value, config_keys, mapping_of, section_names, shown, suggestion
from contbatch_cli.errors import UsageError

MAX_FILE_BYTES = 1 << 20

_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_NOT_ROW_PARAMETERS = {"sampling.seed", "sampling.from_model"}
_YAML_1_1_BOOLS = {"yes": True, "on": True, "no": False, "off": False}


class Option(NamedTuple):
    """A command-line option that stands for one key; `value` is None where it was not given."""

    key: str
    flag: str
    value: object


class Assignment(NamedTuple):
    """A "key.path=value" that came with another option than `--set`."""

    flag: str
    text: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `place` names it for people: "default", "run.yaml:12", "--set", "--max-tokens"."""

    kind: Literal["default", "file", "set", "option"]
    place: str

    @property
    def is_command_line(self) -> bool:
        return self.kind in ("set", "option")


DEFAULT = Origin("default", "default")


@dataclass(frozen=True, slots=True)
class Effective:
    """The config of a run, the origin of every key, and by these what the user wrote."""

    config: Config
    values: Mapping[str, Value]
    origins: Mapping[str, Origin]

    def is_written(self, path: str) -> bool:
        """Whether the user gave this key, in a file or on the command line."""
        return self.origins[path] is not DEFAULT

    def command_line_sampling(self) -> dict[str, Value]:
        """Row parameters that the command line sets: they stand between a row's own and the config file's, and are explicit."""
        return self._sampling("set", "option")

    def file_sampling(self) -> dict[str, Value]:
        """Row parameters that the config file sets: before the model's own (`sampling.from_model`) and the built-ins."""
        return self._sampling("file")

    def default_sampling(self) -> dict[str, Value]:
        """Row parameters that nobody wrote, with their built-in defaults."""
        return self._sampling("default")

    def _sampling(self, *kinds: str) -> dict[str, Value]:
        paths = {path for path, origin in self.origins.items() if origin.kind in kinds} - _NOT_ROW_PARAMETERS
        return {
            path.removeprefix("sampling."): self.values[path]
            for path in self.values
            if path in paths and path.startswith("sampling.")
        }


def load_config(
    file: Path | None = None, assignments: Iterable[str | Assignment] = (), options: Iterable[Option] = ()
) -> Effective:
    """The effective config: built-in defaults, then `file`, then each "key.path=value", then each option that was given.

    "key.path.name=value" adds one entry to a mapping.
    """
    values: dict[str, Value] = {path: key.default for path, key in config_keys().items()}
    origins = dict.fromkeys(values, DEFAULT)
    for written in _all_written(file, assignments, options):
        path = written.key.path
        values[path] = written.checked(values[path])
        origins[path] = written.origin
    _check_together(values, origins)
    return Effective(_build(values), values, origins)


class _Scalar(NamedTuple):
    """A YAML scalar: its value, and its text where it stands unquoted."""

    value: object
    plain_text: str | None


@dataclass(frozen=True, slots=True)
class _Written:
    """One value that the user wrote somewhere."""

    path: str
    value: object
    origin: Origin

    @property
    def key(self) -> Key:
        known = config_keys().get(self.path) or mapping_of(self.path)
        if known is None:
            raise self._error(_unknown_key(self.path))
        return known

    def checked(self, before: Value) -> Value:
        """The value as its key holds it; `before` is what the key holds so far, to which an entry of a mapping is added."""
        key = self.key
        try:
            meant = _as_meant(self.value, key)
            if key.path == self.path or not isinstance(before, Mapping):
                return key.convert(meant)
            return key.convert({**before, self.path[len(key.path) + 1 :]: meant})
        except ValueError as error:
            raise self._error(str(error)) from None

    def _error(self, message: str) -> UsageError:
        place, value = self.origin.place, _shown_as_written(self.value)
        subject = {"option": f"{place} {value}", "set": f"{place} {self.path}={value}"}
        return UsageError(f"{subject.get(self.origin.kind, f'{place}: {self.path} = {value}')}: {message}")


def _shown_as_written(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown_as_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(name)}: {_shown_as_written(entry)}' for name, entry in value.items())}}}"
    if not isinstance(value, _Scalar):
        return shown(value)
    return shown(value.plain_text) if value.plain_text else json.dumps(value.value, default=str)


def _unknown_key(path: str) -> str:
    if path in section_names():
        names = ", ".join(known.split(".")[1] for known in config_keys() if known.startswith(f"{path}."))
        return f"{path} is a section; its keys are {names}"
    nearest = suggestion(path)
    return f"unknown key; did you mean {nearest}?" if nearest else f"unknown key; the sections are {', '.join(section_names())}"


def _as_meant(value: object, key: Key) -> object:
    """The value of a scalar as its key means it: a revision of digits is text, `off` is false where a key is true or false."""
    if isinstance(value, list):
        return [_as_meant(item, key) for item in value]
    if isinstance(value, dict):
        return {name: _as_meant(entry, key) for name, entry in value.items()}
    if not isinstance(value, _Scalar):
        return value
    is_text = (str in key.kinds and not {int, float} & set(key.kinds)) or key.is_list or key.is_mapping
    if is_text and value.plain_text is not None and value.value is not None:
        return value.plain_text
    if bool in key.kinds and value.plain_text is not None:
        return _YAML_1_1_BOOLS.get(value.plain_text.lower(), value.value)
    return value.value


def _all_written(file: Path | None, assignments: Iterable[str | Assignment], options: Iterable[Option]) -> Iterator[_Written]:
    if file is not None:
        yield from _read_file(file)
    for assignment in assignments:
        yield _read_assignment(assignment)
    for option in options:
        if option.value is not None:
            yield _Written(option.key, option.value, Origin("option", option.flag))


def _read_assignment(assignment: str | Assignment) -> _Written:
    flag, assigned = ("--set", assignment) if isinstance(assignment, str) else assignment
    path, equals, text = assigned.partition("=")
    place = f"{flag} {shown(assigned)}"
    if not equals or not path.strip():
        raise UsageError(f"{place}: must be key.path=value, such as sampling.max_tokens=64")
    return _Written(path.strip(), _plain_value(_compose(text, place), place), Origin("set", flag))


def _read_file(file: Path) -> Iterator[_Written]:
    """The values of a config file in the order of its lines."""
    root = _compose(_read_text(file), str(file))
    for section, section_node in _pairs(root, str(file), "the config"):
        place = f"{file}:{section_node.start_mark.line + 1}"
        if section not in section_names():
            yield _Written(section, _plain_or_none(section_node), Origin("file", place))
            continue
        for name, node in _pairs(section_node, str(file), section):
            node_place = f"{file}:{node.start_mark.line + 1}"
            path = f"{section}.{name}"
            yield _Written(path, _plain_value(node, f"{node_place}: {path}"), Origin("file", node_place))


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"config {file}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"config {file}: larger than {MAX_FILE_BYTES:,} bytes; is it the config?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"config {file}: not UTF-8 at byte {error.start}") from None


class _CoreSchemaLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_PLAIN_SCALARS = (
    (_NULL, r"~|null|Null|NULL|", [*"~nN", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+0123456789."),
)
for _tag, _pattern, _first in _PLAIN_SCALARS:
    _CoreSchemaLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _compose(text: str, place: str) -> yaml.Node | None:
    loader: _CoreSchemaLoader | None = None
    try:
        loader = _CoreSchemaLoader(text)
        node: yaml.Node | None = loader.get_single_node()
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{place}{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UsageError(f"{place}: not valid YAML: {reason}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _pairs(node: yaml.Node | None, file: str, what: str) -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values of a mapping node; nothing for an empty one. Refuses duplicate keys, naming both lines."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL):
        return
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{file}:{node.start_mark.line + 1}: {what} must be a mapping of keys to values")
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UsageError(f"{file}:{line}: a key in {what} must be a word")
        if key_node.value in lines:
            raise UsageError(
                f"{file}:{line}: {shown(key_node.value)} stands in {what} twice, first on line {lines[key_node.value]}"
            )
        lines[key_node.value] = line
        yield key_node.value, value_node


def _plain_value(node: yaml.Node | None, place: str) -> object:
    """A scalar with its text, a list of scalars or a mapping to scalars; anything deeper is refused."""
    if node is None:
        return _Scalar(None, "")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, place)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [_scalar(item, place) for item in node.value]
    if isinstance(node, yaml.MappingNode) and all(isinstance(part, yaml.ScalarNode) for pair in node.value for part in pair):
        names = [name.value for name, _ in node.value]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{place}: {shown(twice)} stands in it twice")
        return {name.value: _scalar(entry, place) for name, entry in node.value}
    raise UsageError(f"{place}: must be a single value, a list or a mapping of single values")


def _plain_or_none(node: yaml.Node) -> object:
    return _Scalar(node.value, node.value) if isinstance(node, yaml.ScalarNode) else "{...}"


def _scalar(node: yaml.ScalarNode, place: str) -> _Scalar:
    text: str = node.value
    plain_text = text if node.style is None else None
    if node.tag == _STR:
        return _Scalar(_without_surrogates(text, place), plain_text)
    if node.tag == _NULL:
        return _Scalar(None, plain_text)
    if node.tag == _BOOL:
        return _Scalar(text.lower() == "true", plain_text)
    try:
        if node.tag == _INT:
            return _Scalar(int(text, 0 if text[:2] in ("0x", "0o") else 10), plain_text)
        if node.tag == _FLOAT:
            return _Scalar(float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), plain_text)
    except ValueError:
        raise UsageError(f"{place}: not a number that can be read: {shown(text)}") from None
    raise UsageError(f"{place}: the tag {shown(node.tag)} is not supported")


def _without_surrogates(text: str, place: str) -> str:
    """Joins the halves of a character that was written as in JSON, "\\ud83d\\ude00"; refuses a half that stands alone."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise UsageError(f"{place}: holds half of a surrogate pair") from None


def _check_together(values: Mapping[str, Value], origins: Mapping[str, Origin]) -> None:
    """Limits between keys."""
    conflicts = (
        (
            "cache.num_blocks",
            "cache.memory",
            values["cache.num_blocks"] != "auto" and values["cache.memory"] is not None,
            "give only one of them",
        ),
        ("sampling.min_tokens", "sampling.max_tokens", _exceeds(values), "the first must not be above the second"),
    )
    for first, second, is_conflict, message in conflicts:
        if is_conflict:
            both = " and ".join(f"{path} = {shown(values[path])} ({origins[path].place})" for path in (first, second))
            raise UsageError(f"{both}: {message}")


def _exceeds(values: Mapping[str, Value]) -> bool:
    low, high = values["sampling.min_tokens"], values["sampling.max_tokens"]
    return isinstance(low, int) and isinstance(high, int) and low > high


def _build(values: Mapping[str, Value]) -> Config:
    def section(name: str) -> dict[str, Any]:
        return {path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{name}.")}

    return Config(
        model=ModelConfig(**section("model")),
        scheduler=SchedulerConfig(**section("scheduler")),
        cache=CacheConfig(**section("cache")),
        engine=EngineConfig(**section("engine")),
        sampling=SamplingConfig(**section("sampling")),
        output=OutputConfig(**section("output")),
        cluster=ClusterConfig(**section("cluster")),
    )


def to_yaml(effective: Effective) -> str:
    """The effective config as a config file, each value's origin in a comment beside it. Reading it gives the same values."""
    lines: list[str] = []
    width = max(len(f"  {path.split('.')[1]}: {yaml_text(effective.values[path])}") for path in effective.values)
    for section in section_names():
        lines.append(f"{section}:")
        for path, value in effective.values.items():
            if path.startswith(f"{section}."):
                entry = f"  {path.split('.')[1]}: {yaml_text(value)}"
                lines.append(f"{entry:<{width}}  # {_one_line(effective.origins[path].place)}")
    return "\n".join(lines) + "\n"


def yaml_text(value: Value) -> str:
    """A value in one line of YAML that this module reads back as the same value."""
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{yaml_text(name)}: {yaml_text(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_./][\w./-]*", value, re.ASCII) and _is_plain_string(value) else _quoted(value)
    return json.dumps(value)


def _one_line(place: str) -> str:
    return place if place.isprintable() else ascii(place)


def _quoted(text: str) -> str:
    """Double-quoted YAML in printable ASCII."""
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(named.get(c) or (c if " " <= c <= "~" else _escape(ord(c))) for c in text)}"'


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _is_plain_string(text: str) -> bool:
    if text.lower() in _YAML_1_1_BOOLS:
        return False  # older readers take these for true and false
    node = _compose(text, "value")
    return isinstance(node, yaml.ScalarNode) and node.tag == _STR
