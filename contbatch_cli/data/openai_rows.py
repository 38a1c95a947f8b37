"""OpenAI batch rows: `{"custom_id", "method", "url", "body"}` for chat completions and completions.

| keys of the body | treatment |
|---|---|
| `messages`, `tools` for chat; `prompt` (a text, a list of one text, or token ids) for completions | the prompt |
| all parameters of `params`, also those that OpenAI lacks; `chat_template_kwargs`, `continue_final_message` | honoured |
| `model`, `user`, `store`, `metadata`, `service_tier`, `safety_identifier` | accepted: they do not shape the text |
| `prompt_cache_key`, `prompt_cache_options`, `prompt_cache_retention` | accepted likewise |
| `stream: false`, `echo: false`, `suffix: ""`, `best_of` equal to `n`, `modalities: ["text"]` | accepted: it is so |
| `parallel_tool_calls: true`, `tool_choice: "auto"`, `tool_choice: "none"` without tools | accepted: it is so |
| the keys of these two lines with other values; `stream_options` | refused as `invalid_parameter` |
| `functions`, `function_call`, `audio`, `prediction`, `reasoning_effort`, `verbosity` | refused as `invalid_parameter` |
| `web_search_options`, `moderation` | refused likewise |
| anything else | refused as `unknown_parameter` |

null is the same as not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contbatch_cli.data.native_rows import CHAT_KEYS, PROMPT_KEYS, chat_prompt, json_type, text_prompt, token_prompt
from contbatch_cli.data.params import shown, split_parameters, unknown
from contbatch_cli.data.rows import Draft, OpenAIEnvelope, OpenAIKind, Prompt
from contbatch_cli.errors import RowError

_URLS: dict[str, OpenAIKind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_HARMLESS = frozenset(
    {
        "model",
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
_UNSUPPORTED = frozenset(
    {
        "functions",
        "function_call",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "moderation",
    }
)
_ONLY: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "stream": lambda value, body: value is False,
    "stream_options": lambda value, body: False,
    "echo": lambda value, body: value is False,
    "best_of": lambda value, body: value == (body.get("n") or 1),
    "suffix": lambda value, body: value == "",
    "modalities": lambda value, body: value == ["text"],
    "parallel_tool_calls": lambda value, body: value is True,
    "tool_choice": lambda value, body: value == "auto" or (value == "none" and not body.get("tools")),
}
_RESERVED = frozenset({"messages", "prompt", "prompt_token_ids", *CHAT_KEYS})


def is_openai_row(columns: dict[str, Any]) -> bool:
    """Whether the keys are those of a batch row and not of a prompt with data beside it."""
    return "body" in columns and "url" in columns and not any(key in columns for key in PROMPT_KEYS)


def openai_envelope(columns: dict[str, Any]) -> OpenAIEnvelope:
    """The envelope of a batch row. Raises RowError with `invalid_row`."""
    custom_id, method, url = columns.get("custom_id"), columns.get("method", "POST"), columns["url"]
    if type(custom_id) is not str or not custom_id:
        raise RowError("invalid_row", f'"custom_id" is {json_type(custom_id)}, it must be a string that is not empty')
    if method != "POST":
        raise RowError("invalid_row", f'"method" is {shown(method)}, it must be "POST"')
    kind = _URLS.get(url) if type(url) is str else None
    if kind is None:
        raise RowError("invalid_row", f'"url" is {shown(url)}, it must be {" or ".join(_URLS)}')
    return OpenAIEnvelope(custom_id, kind)


def openai_draft(columns: dict[str, Any], envelope: OpenAIEnvelope) -> Draft:
    """The draft of a batch row's body. Raises RowError."""
    body = columns["body"]
    if type(body) is not dict:
        raise RowError("invalid_row", f'"body" is {json_type(body)}, it must be an object')
    prompt = _chat(body) if envelope.kind == "chat" else _completion(body)
    params, others = split_parameters(body, _RESERVED)
    for key, value in others.items():
        if value is not None:
            _check_other(key, value, body)
    return Draft(prompt, params, {})


def _check_other(key: str, value: Any, body: dict[str, Any]) -> None:
    if key in _HARMLESS:
        return
    if key in _ONLY:
        if not _ONLY[key](value, body):
            raise RowError("invalid_parameter", f"{key} cannot be {shown(value)} in a batch job")
    elif key in _UNSUPPORTED:
        raise RowError("invalid_parameter", f'"{key}" is not supported')
    else:
        raise unknown(key, (*_HARMLESS, *_ONLY, *_UNSUPPORTED, *_RESERVED))


def _chat(body: dict[str, Any]) -> Prompt:
    if body.get("messages") is None:
        raise RowError("invalid_row", 'the body has no "messages"')
    _refuse_keys(body, ("prompt", "prompt_token_ids"))
    return chat_prompt(body)


def _completion(body: dict[str, Any]) -> Prompt:
    _refuse_keys(body, ("messages", "prompt_token_ids", *CHAT_KEYS))
    prompt = body.get("prompt")
    if prompt is None:
        raise RowError("invalid_row", 'the body has no "prompt"')
    if type(prompt) is not list:
        return text_prompt(prompt)
    if len(prompt) == 1 and type(prompt[0]) in (str, list):
        return text_prompt(prompt[0]) if type(prompt[0]) is str else token_prompt(prompt[0])
    if prompt and type(prompt[0]) in (str, list):
        raise RowError("invalid_row", f'"prompt" is a list of {len(prompt)} prompts, a row has one')
    return token_prompt(prompt)


def _refuse_keys(body: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if body.get(key) is not None:
            raise RowError("invalid_row", f'the body of this url has no "{key}"')
