"""A model's chat template, rendered as transformers' `apply_chat_template` renders it, without transformers or torch.

Templates come with models and are not trusted: they run in Jinja2's immutable sandbox. The rendered text holds the special
tokens that the template wrote, BOS included, so it is encoded without adding any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from contbatch_cli.data.model_files import read_json
from contbatch_cli.errors import RowError, UsageError
from contbatch_cli.units import counted

Message = Mapping[str, Any]

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_MARK "
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "documents"})


class ReasoningMarkers(NamedTuple):
    """What a model writes around its reasoning."""

    start: str
    end: str


_KNOWN_MARKERS = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The named templates of a model (`default`, `tool_use`, ...) and its special tokens by name (`bos_token`, ...)."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the model"

    @classmethod
    def from_directory(
        cls, path: Path, special_tokens: Mapping[str, str] | None = None, chat_template: Path | None = None
    ) -> ChatTemplate:
        """The templates of a model directory, or the one in the file `chat_template` instead of them.

        Raises UsageError for a file that cannot be read or is no template.
        """
        if chat_template is not None:
            template = cls({"default": _read_template(chat_template)}, special_tokens or {}, str(chat_template))
            template.check()
            return template
        config = read_json(path / "tokenizer_config.json") or {}
        sources = {**_configured_sources(config.get("chat_template")), **_file_sources(path)}
        return cls(sources, special_tokens or {}, str(path))

    @property
    def is_present(self) -> bool:
        return bool(self.sources)

    def check(self) -> None:
        """Compile every template. Raises UsageError with the line of the first fault."""
        for name, source in self.sources.items():
            try:
                _compile(source)
            except jinja2.TemplateSyntaxError as error:
                raise UsageError(f"chat template {name!r} of {self.origin}, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, to be encoded without special tokens.

        `variables` (a row's `chat_template_kwargs`) are seen by the template beside ours. With `continue_final_message` the
        text ends within the last message, for the model to go on, and there is no generation prompt. Raises RowError
        `no_chat_template` or `template_error`.
        """
        name = self._choose(tools)
        extra = dict(variables or {})
        if clash := sorted(_RESERVED & extra.keys()):
            raise RowError(
                "invalid_parameter", f"chat_template_kwargs must not set {clash[0]!r}: it has a key of its own in the row"
            )
        chat = [_normalized(message) for message in messages]
        final = _mark_final_message(chat, self.sources[name]) if continue_final_message else ""
        context = {
            **self.special_tokens,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **extra,
            "messages": chat,
            "tools": list(tools) if tools is not None else None,
            "documents": list(documents) if documents is not None else None,
        }
        text = self._render(name, context, len(chat))
        return _cut_at_mark(text, final) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Which template to use: the one for tools when there are tools and it exists, else the default."""
        if not self.sources:
            raise RowError(
                "no_chat_template", f"{self.origin} has no chat template: give one with --chat-template, or use 'prompt'"
            )
        if tools is not None and "tool_use" in self.sources:
            return "tool_use"
        if "default" not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise RowError("no_chat_template", f"{self.origin} has no default chat template, only: {names}")
        return "default"

    def _render(self, name: str, context: dict[str, Any], num_messages: int) -> str:
        try:
            return str(_compile(self.sources[name]).render(context))
        # A template is a program: whatever it raises is the fault of this row with this template.
        except Exception as error:
            where = f"chat template {name!r} of {self.origin}{_line_of(error)}, {counted(num_messages, 'message')}"
            raise RowError("template_error", f"{where}: {_message_of(error)}") from error

    @property
    def reasoning_markers(self) -> ReasoningMarkers | None:
        """The markers that the default template knows, None when it knows of no reasoning."""
        return _markers_of(self.sources.get("default", ""))


@lru_cache(maxsize=32)
def _markers_of(source: str) -> ReasoningMarkers | None:
    return next((pair for pair in _KNOWN_MARKERS if pair.start in source and pair.end in source), None)


def split_reasoning(text: str, markers: ReasoningMarkers | None, prompt: str = "") -> tuple[str | None, str]:
    """Reasoning and content of an answer; the reasoning is None when the model marked none.

    The prompt matters because some templates open the reasoning themselves: then the answer begins inside it. A reasoning that
    never ends is all of the answer.
    """
    if markers is None:
        return None, text
    is_open = prompt.rstrip().endswith(markers.start)
    body = text.lstrip()
    if not is_open and not body.startswith(markers.start):
        return None, text
    inside = body.removeprefix(markers.start)
    reasoning, _, content = inside.partition(markers.end)
    return reasoning.strip("\n"), content.lstrip("\n")


# -- where templates are kept


def _configured_sources(value: Any) -> dict[str, str]:
    """`chat_template` of `tokenizer_config.json`: one template, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value if isinstance(item, dict)}
    return {}


def _file_sources(path: Path) -> dict[str, str]:
    """`chat_template.jinja` (or the older `chat_template.json`) and `additional_chat_templates/NAME.jinja`; files win."""
    sources = {}
    older = read_json(path / "chat_template.json") or {}
    if isinstance(older.get("chat_template"), str):
        sources["default"] = older["chat_template"]
    if (path / "chat_template.jinja").is_file():
        sources["default"] = _read_template(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_template(file)
    return sources


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chat-template {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--chat-template {file}: not UTF-8 at byte {error.start}") from None


# -- messages


def _normalized(message: Message) -> dict[str, Any]:
    """A copy without null values, which templates take for present, and with reasoning under each of its three names."""
    if not isinstance(message, Mapping):
        raise RowError("invalid_row", f"a chat message is an object with 'role' and 'content', not {type(message).__name__}")
    chosen = {key: value for key, value in message.items() if value is not None}
    reasoning = next((chosen[key] for key in _REASONING_KEYS if key in chosen), None)
    return chosen if reasoning is None else {"thinking": reasoning, **chosen, "reasoning_content": reasoning}


def _mark_final_message(chat: list[dict[str, Any]], source: str) -> str:
    """Put a mark behind the last message's text, to find the place in the rendered text; returns the text without it."""
    content = chat[-1].get("content") if chat else None
    if content is None:
        raise RowError("template_error", "continue_final_message needs a last message with 'content'")
    if "content" not in source:
        raise RowError("template_error", "continue_final_message: the chat template does not use a message's 'content'")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
    last = next((part for part in reversed(parts) if isinstance(part, dict) and "text" in part), None)
    if last is None:
        raise RowError("template_error", f"continue_final_message: none of the last message's {len(parts)} parts is text")
    text = str(last["text"])
    last["text"] = text + _CONTINUE_MARK
    chat[-1]["content"] = parts
    return text


def _cut_at_mark(text: str, final: str) -> str:
    """The rendered text up to the end of the last message. A template that trims messages has trimmed the mark's space too."""
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise RowError("template_error", "continue_final_message: the chat template does not show the last message as it is")
    return text[:place] if text.startswith(_CONTINUE_MARK, place) else text[:place].rstrip()


# -- Jinja2


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """`namespace()` whose attributes cannot begin with an underscore, so that none of Python's own is reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace)
    return environment


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _line_of(error: BaseException) -> str:
    """`, line N` of the template, from a syntax error or from the traceback, in which Jinja2 writes template lines."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line is not None else ""


def _message_of(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
