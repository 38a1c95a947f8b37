"""Text of a growing list of tokens: never half a character, never shrinking, equal in the end to decoding the whole list.

Two ways, by the kind of tokenizer. Where decoding is joining bytes (byte-level BPE), bytes go through an incremental UTF-8
decoder. Elsewhere the last few tokens are decoded again with each new one, and what they add is the new text: the prefix-offset
method of Hugging Face's text-generation-inference and vLLM. Both cost the same for each token however long the text is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.data.tokenizer import Tokenizer, fallback_byte

_REPLACEMENT = "\ufffd"


class _TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def pending(self) -> str: ...


class IncrementalDetokenizer:
    """Tokens in, text out, as soon as it is certain."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream: _TextStream = _ByteStream(tokenizer) if tokenizer.is_byte_level else _PrefixStream(tokenizer)
        self._pieces: list[str] = []
        self._is_finished = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it made certain, often its own, empty within a character."""
        assert not self._is_finished, "pushed after finish"
        if self._tokenizer.is_skipped(token_id, self._skip_special_tokens):
            return ""
        return self._keep(self._stream.push(token_id))

    def pending(self) -> str:
        """What `finish` would add if the text ended here."""
        return "" if self._is_finished else self._stream.pending()

    def finish(self) -> str:
        """End the text; returns what was held back. A character that the end cuts off comes out as U+FFFD."""
        rest = self._keep(self.pending())
        self._is_finished = True
        return rest

    @property
    def text(self) -> str:
        """All text so far; after `finish` it equals `tokenizer.decode` of all tokens."""
        return "".join(self._pieces)

    def _keep(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


class _ByteStream:
    """Byte-level tokens: text is the UTF-8 of the joined bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def pending(self) -> str:
        held, _ = self._decoder.getstate()
        return bytes(held).decode("utf-8", errors="replace")


class _PrefixStream:
    """Any other decoder. `_ids[:_num_read]` have given their text; they stay as the context in which later ones are decoded.

    Within a run of single-byte tokens nothing is certain: if the run turns out to be invalid, all of it, valid parts too,
    decodes to U+FFFD. So a run is held until a token of another kind follows, and is decoded once then.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_read = 0
        self._read_text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        self._read_text = self._decode()
        return text

    def pending(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        return self._decode()[len(self._read_text) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _is_byte(self, token_id: int) -> bool:
        piece = self._tokenizer.backend.id_to_token(token_id)
        return self._tokenizer.has_byte_fallback and piece is not None and fallback_byte(piece) is not None


class StopStrings:
    """Finds stop strings in text that arrives in pieces, wherever the pieces are cut.

    The match that is complete first wins, and of those that end together the longest: so the outcome depends on the text alone,
    not on how it was cut. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str, is_armed: bool = True) -> str:
        """Add text; returns what can be shown. After a match, which sets `matched`, that is what stands before it.

        Not armed, matches that complete in this text are passed over and shown.
        """
        assert self.matched is None, "pushed after a match"
        buffer = self._held + text
        found = self._earliest(buffer) if is_armed else None
        if found is not None:
            self.matched, self._held = found[1], ""
            return buffer[: found[0]]
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def find(self, text: str) -> str | None:
        """The stop string that would match if `text` came next. Changes nothing."""
        found = self._earliest(self._held + text)
        return found[1] if found is not None else None

    def flush(self) -> str:
        """The end of the text: what was held back is shown after all."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, buffer: str) -> tuple[int, str] | None:
        """Start and string of the match that ends first; the buffer holds the beginning of any match that ends in it."""
        matches = [(start + len(stop), start, stop) for stop in self.stops if (start := buffer.find(stop)) >= 0]
        return min(matches)[1:] if matches else None

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of the buffer that is a beginning, not all, of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        sizes = range(min(longest, len(buffer)), 0, -1)
        return next((n for n in sizes if any(len(stop) > n and stop.startswith(buffer[-n:]) for stop in self.stops)), 0)


@dataclass(slots=True)
class _RowText:
    """The text of one request with stop strings: which of its tokens are in it, and what can be shown."""

    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    num_tokens: int = 0
    shown: list[str] = field(default_factory=list)

    def push(self, token_id: int, min_tokens: int) -> None:
        """Add an output token. A stop string that is complete before `min_tokens` tokens are out does not count."""
        self.num_tokens += 1
        is_armed = self.num_tokens >= min_tokens
        text = self.detokenizer.push(token_id)
        self._show(text, is_armed)
        pending = self.detokenizer.pending() if is_armed and self.stops.matched is None else ""
        if pending and not pending.endswith(_REPLACEMENT) and self.stops.find(pending):
            self._show(self.detokenizer.finish(), is_armed)

    def finish(self) -> str:
        """The final text, cut before the stop string when there was one."""
        if self.stops.matched is None:
            self._show(self.detokenizer.finish(), is_armed=False)
            self.shown.append(self.stops.flush())
        return "".join(self.shown)

    def _show(self, text: str, is_armed: bool) -> None:
        if text:
            self.shown.append(self.stops.push(text, is_armed))


class StopStringRule:
    """A stop rule `(request) -> Finish | None` for stop strings in the generated text, and the source of its final text.

    The state of a request is kept by its id and rebuilt from its output ids when it is absent, so preemption and a moved
    request lose nothing. Rows without stop strings have none and cost one comparison a token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._rows: dict[RequestId, _RowText] = {}

    def __call__(self, request: Request) -> Finish | None:
        """Ask after each new token of a request."""
        if not request.sampling.stop:
            return None
        matched = self._advance(request, request.num_output_tokens).stops.matched
        return Finish(FinishReason.STOP, matched) if matched is not None else None

    def text(self, request: Request) -> str:
        """The final text of a finished request: cut before the stop string, without the token that ended it (EOS, stop id)."""
        num_tokens = request.num_output_tokens - _ends_by_token(request)
        if not request.sampling.stop:
            ids = request.token_ids[request.num_prompt_tokens : request.num_prompt_tokens + num_tokens]
            return self._tokenizer.decode(ids, self._skip_special_tokens)
        row = self._rows.get(request.request_id)
        if row is not None and row.num_tokens > num_tokens:
            self.forget(request.request_id)
        return self._advance(request, num_tokens).finish()

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept about a request."""
        self._rows.pop(request_id, None)

    def _advance(self, request: Request, num_tokens: int) -> _RowText:
        """The row's text with its first `num_tokens` output tokens in it, or up to its stop string."""
        row = self._rows.get(request.request_id)
        if row is None or row.num_tokens > num_tokens:
            detokenizer = IncrementalDetokenizer(self._tokenizer, self._skip_special_tokens)
            row = self._rows[request.request_id] = _RowText(detokenizer, StopStrings(request.sampling.stop))
        while row.num_tokens < num_tokens and row.stops.matched is None:
            row.push(request.token_ids[request.num_prompt_tokens + row.num_tokens], request.sampling.min_tokens)
        return row


def _ends_by_token(request: Request) -> bool:
    """Whether the last output token is what ended the request, and so no part of its text: EOS or a stop token id.

    A text that a grammar completed ends with a token of its own.
    """
    finish = request.finish
    if finish is None or finish.reason is not FinishReason.STOP or isinstance(finish.stop_reason, str):
        return False
    return finish.stop_reason is not None or request.token_ids[-1] in request.sampling.eos_token_ids
