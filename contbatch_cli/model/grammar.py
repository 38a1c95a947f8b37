"""Structured output: which tokens a row's `response_format` allows next, by llguidance (the extra `grammar`).

A matcher follows one request through its grammar. It is derived state, cached by request id and brought up to date from the
request's own tokens, so that preemption, a changed plan or a full cache cost time and change nothing. A grammar is compiled once
for each distinct format; its matchers are copies of one.

Shapes: G rows with a grammar, R rows, V vocabulary of the logits. Masks are [G, W] int32, a bit for each allowed token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers
import torch
from torch import Tensor

from contbatch_cli.core.batch import ScheduledSequence
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.errors import RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_CACHED_MATCHERS = 2048
_COMPLETE = Finish(FinishReason.STOP)


@dataclass(slots=True, eq=False)
class _Follower:
    """A matcher and how many output tokens it has seen."""

    matcher: LLMatcher
    num_seen: int = 0


class GrammarMasks:
    """The masks of a batch, and the stop rule of rows whose text is complete.

    `to_grammar` turns a row's `response_format` into a grammar (`data/response_format.py`); `tokenizer_json` is the text of
    tokenizer.json. One instance serves one model. Raises ValueError when llguidance cannot read the tokenizer.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        to_grammar: Callable[[str], str],
        num_threads: int | None = None,
    ) -> None:
        import llguidance

        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        backend.no_padding()
        backend.no_truncation()
        ends = [token for token in eos_token_ids if 0 <= token < backend.get_vocab_size()]
        self._never_sampled: int | None = None
        if not ends:
            self._never_sampled = _add_end_token(backend)
            ends = [self._never_sampled]
        num_tokens = max(vocab_size, backend.get_vocab_size())
        self._new_matcher = llguidance.LLMatcher
        # Slices are sets of tokens that the library decides about at once; JSON's make masks several times cheaper.
        slices = llguidance.LLTokenizer.json_slices()
        self._tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=num_tokens, eos_token=ends, slices=slices)
        self._executor = llguidance.LLExecutor(num_threads)
        self._to_grammar = to_grammar
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._followers: OrderedDict[RequestId, _Follower] = OrderedDict()
        self._num_words = (num_tokens + 31) // 32
        self._masks = torch.empty(0, self._num_words, dtype=torch.int32)
        self._slots: dict[RequestId, int] = {}
        self._errors: dict[RequestId, str] = {}
        bits = torch.arange(256)[:, None] >> torch.arange(8)[None, :]
        # [256] int64, whose eight bytes are booleans: what a byte of a mask forbids.
        self._forbidden = bits.bitwise_and(1).logical_not().view(torch.int64)[:, 0]

    def prepare(self, rows: Iterable[ScheduledSequence]) -> None:
        """Computes the masks of a batch's rows, in parallel. Needs no logits: on a GPU it overlaps with the forward pass."""
        self._slots, self._errors = {}, {}
        work: list[tuple[LLMatcher, int]] = []
        for row in rows:
            if (response_format := row.sampling.response_format) is not None:
                assert row.history is not None, f"{row.request_id}: the plan lacks the row's history"
                try:
                    matcher = self._follow(row.request_id, response_format, row.history, row.num_prompt_tokens)
                except RowError as error:
                    self._errors[row.request_id] = f"{error.code}: {error.message}"
                    continue
                if matcher.is_error():
                    self._errors[row.request_id] = _message(matcher)
                else:
                    self._slots[row.request_id] = len(work)
                    work.append((matcher, len(work)))
        if len(work) > self._masks.shape[0]:
            self._masks = torch.empty(len(work), self._num_words, dtype=torch.int32)
        if work:
            self._executor.unsafe_compute_mask_ptr(work, self._masks.data_ptr(), self._num_words * 4, len(work))
        places = list(self._slots)
        self._errors.update((places[slot], _message(matcher)) for matcher, slot in work if matcher.is_error())
        while len(self._followers) > max(NUM_CACHED_MATCHERS, len(work)):
            self._followers.popitem(last=False)

    def apply(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> dict[int, str]:
        """Sets what the grammars forbid to -inf in `logits` [R, V], for rows that were prepared. Returns errors by place."""
        errors = {i: self._errors[row.request_id] for i, row in enumerate(rows) if row.request_id in self._errors}
        using = [i for i, row in enumerate(rows) if row.request_id in self._slots and i not in errors]
        if using:
            packed = self._masks[[self._slots[rows[i].request_id] for i in using]].view(torch.uint8).to(logits.device)
            self._forbidden = self._forbidden.to(logits.device)
            forbidden = self._forbidden[packed.int()].view(torch.bool)[:, : logits.shape[1]]
            if self._never_sampled is not None:
                forbidden[:, self._never_sampled :] = True
            if len(using) == len(rows):
                logits.masked_fill_(forbidden, float("-inf"))
            else:
                logits[using] = logits[using].masked_fill_(forbidden, float("-inf"))
        return errors

    def stop_rule(self, request: Request) -> Finish | None:
        """Ends a row whose text can only end: its last token completed it. So models without EOS end too, and no step is spent
        on an EOS that is sure. It comes before `min_tokens`: there is nothing that the row could go on with.
        """
        response_format = request.sampling.response_format
        if response_format is None:
            return None
        matcher = self._follow(request.request_id, response_format, request.token_ids, request.num_prompt_tokens)
        if not matcher.is_stopped() or matcher.is_error():
            return None
        self.forget([request.request_id])
        return _COMPLETE

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Drops the matchers of requests that are done."""
        for request_id in request_ids:
            self._followers.pop(request_id, None)

    def _follow(self, request_id: RequestId, response_format: str, token_ids: Sequence[int], num_prompt: int) -> LLMatcher:
        """The request's matcher, having seen all of its output; it may be in error."""
        num_output = len(token_ids) - num_prompt
        follower = self._followers.get(request_id)
        if follower is None or follower.num_seen > num_output:
            follower = self._followers[request_id] = _Follower(self._compile(response_format).deep_copy())
        self._followers.move_to_end(request_id)
        if follower.num_seen < num_output:
            follower.matcher.consume_tokens(list(token_ids[num_prompt + follower.num_seen :]))
            follower.num_seen = num_output
        return follower.matcher

    def _compile(self, response_format: str) -> LLMatcher:
        matcher = self._compiled.get(response_format)
        if matcher is None:
            matcher = self._new_matcher(self._tokenizer, self._to_grammar(response_format), log_level=0)
            self._compiled[response_format] = matcher
            if len(self._compiled) > NUM_CACHED_MATCHERS:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(response_format)
        return matcher


class LazyGrammarMasks:
    """GrammarMasks that are made, which takes up to a second, when the first row needs them."""

    def __init__(self, make: Callable[[], GrammarMasks]) -> None:
        self._make = make
        self._masks: GrammarMasks | None = None

    def _made(self) -> GrammarMasks:
        if self._masks is None:
            self._masks = self._make()
        return self._masks

    def prepare(self, rows: Sequence[ScheduledSequence]) -> None:
        if self._masks is not None or any(row.sampling.response_format is not None for row in rows):
            self._made().prepare(rows)

    def apply(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> dict[int, str]:
        return self._masks.apply(logits, rows) if self._masks is not None else {}

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        if self._masks is not None:
            self._masks.forget(request_ids)

    def stop_rule(self, request: Request) -> Finish | None:
        return self._made().stop_rule(request) if request.sampling.response_format is not None else None


def _add_end_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Gives the tokenizer of a model without EOS an id for the end of the text, above all of its own: the library needs one.

    A row never samples it. Its text ends where it is complete, or at its length.
    """
    name = "<|contbatch:end|>"
    tokenizer.add_special_tokens([name])
    token = tokenizer.token_to_id(name)
    assert token is not None
    return int(token)


def _message(matcher: LLMatcher) -> str:
    reason = matcher.get_error().split("<state>")[0]
    return f"invalid_parameter: response_format: {' '.join(reason.split())}"
