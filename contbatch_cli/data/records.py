"""Output records: one line of strict JSON for each row, in the contract's shape or in OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contbatch_cli.core.request import FinishReason, Request, TokenLogprob
from contbatch_cli.data.rows import OpenAIEnvelope, Row, RowFault

LOWEST_LOGPROB = -9999.0
"""What stands for the logarithm of zero, as in OpenAI's own records."""
ERROR_CODES = frozenset(
    {
        "invalid_json",
        "invalid_encoding",
        "invalid_row",
        "duplicate_id",
        "unknown_parameter",
        "invalid_parameter",
        "empty_prompt",
        "no_chat_template",
        "template_error",
        "prompt_too_long",
        "exceeds_kv_cache",
        "non_finite_logits",
        "replica_lost",
        "cancelled",
    }
)
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_string = json.encoder.encode_basestring
_UNUSUAL_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Completion(NamedTuple):
    """One finished sample: its request, its text without what stopped it, and its reasoning where the model marked one."""

    request: Request
    text: str
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What records carry on demand. `token_bytes` gives the bytes of a token id, for log-probabilities.

    `model` and `created` (seconds since 1970) stand in OpenAI-shaped lines; `several_inputs` adds `file`.
    """

    token_bytes: Callable[[int], bytes]
    model: str = ""
    created: int = 0
    several_inputs: bool = False
    token_ids: bool = False


def row_record(
    row: Row, completions: Sequence[Completion], options: RecordOptions, metrics: Mapping[str, Any] | None = None
) -> bytes:
    """The line of a row whose samples have all finished, in sample order. `metrics` is added when given.

    A sample that failed makes the whole row an error record; one that was cancelled makes it a cancelled one.
    """
    for completion in completions:
        finish = completion.request.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            return fault_record(_failed(row, finish.message), options)
        if finish is not None and finish.reason is FinishReason.CANCELLED:
            return cancelled_record(row, finish.message or "cancelled", options)
    if row.openai is not None:
        return json_line(_openai_line(row, row.openai, completions, options))
    if metrics is None and _is_plain(row, completions, options):
        return _line(_plain(row, completions[0]))
    return json_line(_native(row, completions, options, metrics))


def fault_record(fault: RowFault, options: RecordOptions) -> bytes:
    """The line of a row that could not be run."""
    return _error_line(fault, "error", options)


def cancelled_record(row: Row, message: str, options: RecordOptions) -> bytes:
    """The line of a row that a limit set by the user stopped."""
    fault = RowFault(row.index, row.id, row.line, row.file, "cancelled", message, row.row_hash, row.extra, row.openai)
    return _error_line(fault, "cancelled", options)


def json_line(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 with its newline. Strict: raises ValueError for NaN and Infinity.

    U+0085, U+2028 and U+2029 are escaped, so that readers that split text at them see one line too; half a surrogate pair,
    which UTF-8 cannot carry, becomes U+FFFD.
    """
    return _line(_encode(record))


def _line(text: str) -> bytes:
    if text.isascii():
        return text.encode() + b"\n"
    for end, escaped in _UNUSUAL_ENDS.items():
        if end in text:
            text = text.replace(end, escaped)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode() + b"\n"


def _failed(row: Row, message: str | None) -> RowFault:
    """The fault of a row that failed while it ran; the engine's message begins with its code and a colon."""
    code, colon, rest = (message or "").partition(": ")
    if not colon or code not in ERROR_CODES:
        code, rest = "non_finite_logits", message or "the model's logits are not finite"
    placed = f"row {row.index}: {rest}"
    return RowFault(row.index, row.id, row.line, row.file, code, placed, row.row_hash, row.extra, row.openai)


def _is_plain(row: Row, completions: Sequence[Completion], options: RecordOptions) -> bool:
    """Whether the record has nothing but what every record has."""
    first = completions[0]
    request = first.request
    on_demand = options.token_ids or options.several_inputs or request.sampling.logprobs is not None
    return not (on_demand or row.extra or len(completions) > 1 or first.reasoning is not None or request.prompt_logprobs)


def _plain(row: Row, completion: Completion) -> str:
    """The JSON of `_native` for a plain record, in a third of the time: most records of a big job are plain."""
    request = completion.request
    finish = request.finish
    assert finish is not None, f"row {request.request_id.row} has not finished"
    id = _encode_string(row.id) if isinstance(row.id, str) else "null" if row.id is None else row.id
    stop_reason = "null" if finish.stop_reason is None else _encode(finish.stop_reason)
    return (
        f'{{"index":{row.index},"id":{id},"text":{_encode_string(completion.text)},"finish_reason":"{finish.reason.value}",'
        f'"stop_reason":{stop_reason},"usage":{{"prompt_tokens":{request.num_prompt_tokens},'
        f'"completion_tokens":{request.num_output_tokens},"cached_tokens":{request.num_cached_tokens}}},'
        f'"error":null,"row_hash":"{row.row_hash}"}}'
    )


def _native(
    row: Row, completions: Sequence[Completion], options: RecordOptions, metrics: Mapping[str, Any] | None
) -> dict[str, Any]:
    first = completions[0]
    record: dict[str, Any] = {"index": row.index, "id": row.id}
    if options.several_inputs:
        record["file"] = row.file
    record.update(_outcome(first))
    record["usage"] = _usage(completions)
    record["error"] = None
    record["row_hash"] = row.row_hash
    record.update(_details(first, options))
    if first.request.prompt_logprobs:
        record["prompt_logprobs"] = _prompt_logprobs(first.request, options)
    if metrics is not None:
        record["metrics"] = dict(metrics)
    if len(completions) > 1:
        record["choices"] = [
            {"index": number, **_outcome(one), **_details(one, options)} for number, one in enumerate(completions)
        ]
    if row.extra:
        record["extra"] = row.extra
    return record


def _outcome(completion: Completion) -> dict[str, Any]:
    finish = completion.request.finish
    assert finish is not None, f"row {completion.request.request_id.row} has not finished"
    outcome: dict[str, Any] = {"text": completion.text}
    if completion.reasoning is not None:
        outcome["reasoning"] = completion.reasoning
    outcome["finish_reason"] = finish.reason.value
    outcome["stop_reason"] = finish.stop_reason
    return outcome


def _details(completion: Completion, options: RecordOptions) -> dict[str, Any]:
    request = completion.request
    details: dict[str, Any] = {}
    if options.token_ids:
        details["token_ids"] = request.output_ids
    if request.sampling.logprobs is not None:
        details["logprobs"] = {"content": [_token(one, options) for one in request.logprobs]}
    return details


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    """The prompt counts once, however many samples there are; so do its cached tokens (those of the first sample)."""
    first = completions[0].request
    return {
        "prompt_tokens": first.num_prompt_tokens,
        "completion_tokens": sum(one.request.num_output_tokens for one in completions),
        "cached_tokens": first.num_cached_tokens,
    }


def _token(entry: TokenLogprob, options: RecordOptions) -> dict[str, Any]:
    """OpenAI's shape of one token of `content`."""
    top = [_token_logprob(token, logprob, options) for token, logprob in entry.top]
    return {**_token_logprob(entry.token_id, entry.logprob, options), "top_logprobs": top}


def _token_logprob(token_id: int, logprob: float, options: RecordOptions) -> dict[str, Any]:
    raw = options.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


def _prompt_logprobs(request: Request, options: RecordOptions) -> list[dict[str, Any] | None]:
    """One entry for each prompt token, null for those before the first that has a log-probability."""
    missing = request.num_prompt_tokens - len(request.prompt_logprobs)
    return [None] * missing + [_token(entry, options) for entry in request.prompt_logprobs]


def _error_line(fault: RowFault, finish_reason: str, options: RecordOptions) -> bytes:
    error = {"code": fault.code, "message": fault.message}
    if fault.openai is not None:
        return json_line(_openai_envelope(fault, fault.openai, None, error))
    record: dict[str, Any] = {"index": fault.index, "id": fault.id}
    if options.several_inputs:
        record["file"] = fault.file
    record.update(line=fault.line, text=None, finish_reason=finish_reason, stop_reason=None, usage=None, error=error)
    record["row_hash"] = fault.row_hash
    if fault.extra:
        record["extra"] = fault.extra
    return json_line(record)


def _openai_envelope(
    row: Row | RowFault, envelope: OpenAIEnvelope, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{row.row_hash}{row.index:08x}",
        "custom_id": envelope.custom_id,
        "response": response,
        "error": error,
        "index": row.index,
        "row_hash": row.row_hash,
    }


def _openai_line(
    row: Row, envelope: OpenAIEnvelope, completions: Sequence[Completion], options: RecordOptions
) -> dict[str, Any]:
    is_chat = envelope.kind == "chat"
    make_choice = _chat_choice if is_chat else _text_choice
    usage = _usage(completions)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.row_hash}{row.index:08x}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": options.created,
        "model": options.model,
        "choices": [make_choice(number, one, options) for number, one in enumerate(completions)],
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        },
    }
    response = {"status_code": 200, "request_id": f"req_{row.row_hash}{row.index:08x}", "body": body}
    return _openai_envelope(row, envelope, response, None)


def _chat_choice(number: int, completion: Completion, options: RecordOptions) -> dict[str, Any]:
    outcome = _outcome(completion)
    message = {"role": "assistant", "content": outcome["text"], "refusal": None}
    if completion.reasoning is not None:
        message["reasoning_content"] = completion.reasoning
    return {
        "index": number,
        "message": message,
        "logprobs": _details(completion, options).get("logprobs"),
        "finish_reason": outcome["finish_reason"],
        "stop_reason": outcome["stop_reason"],
    }


def _text_choice(number: int, completion: Completion, options: RecordOptions) -> dict[str, Any]:
    outcome = _outcome(completion)
    request = completion.request
    return {
        "index": number,
        "text": outcome["text"],
        "logprobs": None if request.sampling.logprobs is None else _text_logprobs(request.logprobs, options),
        "finish_reason": outcome["finish_reason"],
        "stop_reason": outcome["stop_reason"],
    }


def _text_logprobs(entries: Sequence[TokenLogprob], options: RecordOptions) -> dict[str, Any]:
    """The completions API's shape; `text_offset` counts characters of the tokens' own texts."""
    tokens, offsets, offset = [], [], 0
    for entry in entries:
        token = _token_logprob(entry.token_id, entry.logprob, options)["token"]
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
    top = [{one["token"]: one["logprob"] for one in _token(entry, options)["top_logprobs"]} for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }
