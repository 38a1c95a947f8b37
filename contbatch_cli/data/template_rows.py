"""`--template`: a sandboxed Jinja2 template over a row's columns makes a user message, or raw text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contbatch_cli.data.column_rows import split_params_column
from contbatch_cli.data.native_rows import json_type
from contbatch_cli.data.rows import ChatPrompt, Draft, TextPrompt
from contbatch_cli.errors import RowError, UsageError

Render = Callable[[dict[str, Any]], str]


def template_text(option: str) -> str:
    """The template itself: the option's text, or the UTF-8 file that `@FILE` names, without its last newline."""
    if not option.startswith("@"):
        return option
    try:
        return Path(option[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {option}: {getattr(error, 'strerror', None) or error}") from None


def compiled_template(option: str) -> Render:
    """Renders columns to text. A column that is missing is an error, nothing is escaped, and the code cannot reach Python's
    internals. `row` is all columns, for names that are no identifiers: `{{ row["my column"] }}`.

    Raises UsageError when the template has a syntax error; rendering raises RowError with `template_error`.
    """
    from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    try:
        template = environment.from_string(template_text(option))
    except TemplateSyntaxError as error:
        raise UsageError(f"--template: line {error.lineno}: {error.message}") from None

    def render(columns: dict[str, Any]) -> str:
        try:
            text = template.render({"row": columns, **columns})
            text.encode()
        except TemplateError as error:
            raise RowError("template_error", f"--template: {error.message}") from None
        except Exception as error:  # whatever an expression over arbitrary columns may raise concerns this row alone
            raise RowError("template_error", f"--template: {type(error).__name__}: {error}") from None
        return text

    return render


def template_draft(columns: object, render: Render, raw: bool) -> Draft:
    """The draft of one row under a template; a bare string is a row with the one column `text`. Raises RowError."""
    if type(columns) is str:
        columns = {"text": columns}
    if not isinstance(columns, dict):
        raise RowError("invalid_row", f"the row is {json_type(columns)}, it must be an object")
    params, extra = split_params_column(columns)
    text = render(columns)
    if not text:
        raise RowError("empty_prompt", "the template gave an empty text")
    prompt = TextPrompt(text) if raw else ChatPrompt([{"role": "user", "content": text}])
    return Draft(prompt, params, extra)
