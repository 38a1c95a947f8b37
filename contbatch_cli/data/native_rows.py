"""Rows in contbatch's own shape: a prompt, parameters beside it, and data. Told apart by their keys."""

from __future__ import annotations

from typing import Any

from contbatch_cli.data.params import MAX_TOKENS, split_parameters
from contbatch_cli.data.rows import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from contbatch_cli.errors import RowError

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
CHAT_KEYS = ("tools", "chat_template_kwargs", "continue_final_message")
_CHAT_KEYS = frozenset(CHAT_KEYS)
_RESERVED = frozenset({"id", *PROMPT_KEYS, *CHAT_KEYS})


def native_draft(columns: dict[str, Any]) -> Draft:
    """The draft of one JSON object. Raises RowError with `invalid_row`, `empty_prompt` or a parameter's code."""
    prompt = _prompt(columns)
    params, extra = split_parameters(columns, _RESERVED)
    return Draft(prompt, params, extra)


def _prompt(columns: dict[str, Any]) -> Prompt:
    kinds = [key for key in PROMPT_KEYS if columns.get(key) is not None]
    if len(kinds) != 1:
        raise RowError("invalid_row", _wrong_number(columns, kinds))
    kind = kinds[0]
    if kind == "messages":
        return chat_prompt(columns)
    if not _CHAT_KEYS.isdisjoint(columns):
        _refuse_chat_keys(columns, kind)
    return text_prompt(columns[kind]) if kind == "prompt" else token_prompt(columns[kind])


def _refuse_chat_keys(columns: dict[str, Any], kind: str) -> None:
    for key in CHAT_KEYS:
        if columns.get(key) is not None:
            raise RowError("invalid_row", f'"{key}" needs "messages", the row has "{kind}"')


def _wrong_number(columns: dict[str, Any], kinds: list[str]) -> str:
    if kinds:
        return f"the row has {' and '.join(kinds)}: one of them is the prompt, not {len(kinds)}"
    empty = [key for key in PROMPT_KEYS if key in columns]
    if empty:
        return f'"{empty[0]}" is null, and the row has no other prompt'
    keys = ", ".join(list(columns)[:8]) or "none"
    return f"the row has no prompt, messages or prompt_token_ids (its keys: {keys[:200]})"


def text_prompt(value: object) -> TextPrompt:
    if type(value) is not str:
        raise RowError("invalid_row", f'"prompt" is {json_type(value)}, it must be a string')
    if not value:
        raise RowError("empty_prompt", "the prompt is empty")
    return TextPrompt(value)


def token_prompt(value: object) -> TokenPrompt:
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise RowError("invalid_row", '"prompt_token_ids" must be a list of integers')
    if not value:
        raise RowError("empty_prompt", "the prompt has no token ids")
    if min(value) < 0 or max(value) > MAX_TOKENS:
        wrong = min(value) if min(value) < 0 else max(value)
        raise RowError("invalid_row", f'"prompt_token_ids" holds {wrong}, which is no token id')
    return TokenPrompt(value)


def chat_prompt(columns: dict[str, Any]) -> ChatPrompt:
    """The chat of a row that has `messages`, with `tools`, `chat_template_kwargs` and `continue_final_message`."""
    return ChatPrompt(
        checked_messages(columns["messages"]),
        _typed(columns, "tools", list) or None,
        _typed(columns, "chat_template_kwargs", dict) or None,
        _typed(columns, "continue_final_message", bool) or False,
    )


def _typed(columns: dict[str, Any], key: str, wanted: type) -> Any:
    value = columns.get(key)
    if value is not None and type(value) is not wanted:
        raise RowError("invalid_row", f'"{key}" is {json_type(value)}, it must be {_NAMES[wanted]}')
    return value


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Messages with text content. Content given in text parts becomes one text, the parts joined by newlines."""
    if type(value) is not list:
        raise RowError("invalid_row", f'"messages" is {json_type(value)}, it must be a list')
    if not value:
        raise RowError("empty_prompt", "messages is an empty list")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("invalid_row", f"messages[{number}] is {json_type(message)}, it must be an object")
    role = message.get("role")
    if type(role) is not str or not role:
        raise RowError("invalid_row", f'messages[{number}] has no "role"')
    content = message.get("content")
    if type(content) is str:
        return message
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return message
        raise RowError("invalid_row", f'messages[{number}] has no "content"')
    return {**message, "content": _joined_parts(number, content)}


def _joined_parts(number: int, content: object) -> str:
    if not isinstance(content, list):
        raise RowError("invalid_row", f"messages[{number}].content is {json_type(content)}, it must be a string")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or type(part.get("text")) is not str:
            raise RowError("invalid_row", f"messages[{number}].content has a part of type {kind!r}: only text can be run")
        texts.append(part["text"])
    return "\n".join(texts)


_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    return _NAMES.get(type(value), type(value).__name__)
