"""What a reader yields: a row that can be tried, or the fault that makes its record. Frozen values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

OpenAIKind = Literal["chat", "completion"]


class TextPrompt(NamedTuple):
    """Raw text; the tokenizer's own special-token rule applies."""

    text: str


class ChatPrompt(NamedTuple):
    """Messages for the model's chat template, each an object with at least a `role`."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False


class TokenPrompt(NamedTuple):
    """Token ids, used as they are."""

    ids: list[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class OpenAIEnvelope(NamedTuple):
    """An OpenAI batch row: its result line has OpenAI's shape."""

    custom_id: str
    kind: OpenAIKind


class Row(NamedTuple):
    """One readable row. `index` counts rows over all inputs from 0; `line` is the physical line of `file`, from 1.

    `params` holds the parameters that the row itself gives, validated, under their canonical names (see `params`);
    `extra` holds its data columns; `row_hash` is 16 hex digits of prompt and parameters.
    """

    index: int  # type: ignore[assignment]  # it hides a method of tuples
    id: str | int | None
    line: int
    file: str
    prompt: Prompt
    params: dict[str, Any]
    extra: dict[str, Any]
    row_hash: str
    openai: OpenAIEnvelope | None = None


@dataclass(frozen=True, slots=True)
class RowFault:
    """One row that cannot run. `code` is one of the contract's error codes; `row_hash` covers whatever could be read."""

    index: int
    id: str | int | None
    line: int
    file: str
    code: str
    message: str
    row_hash: str
    extra: dict[str, Any]
    openai: OpenAIEnvelope | None = None

    @property
    def placed_message(self) -> str:
        """The message behind file and line, for people; in a record `index` and `line` stand beside it."""
        if self.message.startswith("line "):
            return f"{self.file}, {self.message}"
        return f"{self.file}, line {self.line}: {self.message.removeprefix(f'row {self.index}: ')}"


class Draft(NamedTuple):
    """What a row says, before it has a place in the job."""

    prompt: Prompt
    params: dict[str, Any]
    extra: dict[str, Any]


canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
"""The one text of a JSON value: keys sorted, no spaces, ASCII."""


def row_hash(prompt: Prompt, params: dict[str, Any]) -> str:
    """16 hex digits of BLAKE2b over the kind of prompt, the canonical parameters and the prompt; equal in every process."""
    settings = _canonical_params(params) if params else ""
    if isinstance(prompt, TextPrompt):
        content = f"text\0{settings}\0{prompt.text}"
    elif isinstance(prompt, TokenPrompt):
        content = f"ids\0{settings}\0{','.join(map(str, prompt.ids))}"
    else:
        content = f"chat\0{settings}\0{canonical_json(list(prompt))}"
    return bytes_hash(content.encode("utf-8", "surrogatepass"))


def _canonical_params(params: dict[str, Any]) -> str:
    """Their canonical JSON, kept: most rows of a job give the same ones, and equal ones are written alike (see `params`)."""
    try:
        return _canonical_items(tuple(params.items()))
    except TypeError:  # a list or an object among the values
        return canonical_json(params)


@lru_cache(maxsize=1024)
def _canonical_items(items: tuple[tuple[str, Any], ...]) -> str:
    return canonical_json(dict(items))


def bytes_hash(content: bytes) -> str:
    """16 hex digits of BLAKE2b over bytes that could not be read as a row."""
    return blake2b(content, digest_size=8).hexdigest()
