"""What crosses the border between scheduler and runner: frozen, picklable values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from contbatch_cli.core.request import RequestId, SamplingParams, TokenLogprob


class Logits(IntEnum):
    """Which positions of a run need the LM head."""

    NONE = 0
    LAST = 1
    ALL = 2


class WindowTable(NamedTuple):
    """A block table whose first block begins at position `block_start`; no token of the run reads anything before it."""

    block_ids: tuple[int, ...]
    block_start: int


class ScheduledSequence(NamedTuple):
    """The next run of uncomputed tokens of one request: positions `start` to `start + len(tokens)`.

    `block_ids` is the request's block table and covers the run's end; it begins at position `block_start`, 0 unless all layers see a
    window only. Where some do, `window` is the table for these. The run samples one token when `samples` is set, which
    is so exactly when its end is the last token known and the row asks for more. The last `num_drafts` tokens are guesses
    (`core/drafts.py`): such a run samples at its last known token and at each guess. `history` holds all tokens known, prompt
    first, where a logits processor needs them (`SamplingParams.needs_history`), `num_prompt_tokens` of them being the prompt.
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    samples: bool
    logits: Logits
    history: tuple[int, ...] | None = None
    adapter: str | None = None
    next_token: int | None = None
    """The known token that follows the run; only for a run that reports prompt log-probabilities and ends inside the prompt."""
    block_start: int = 0
    window: WindowTable | None = None
    num_drafts: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_known(self) -> int:
        """The end without drafts."""
        return self.start + len(self.tokens) - self.num_drafts

    @property
    def is_decode(self) -> bool:
        """A run of one known token that follows the prompt."""
        return len(self.tokens) - self.num_drafts == 1 and self.start >= self.num_prompt_tokens


sequence_of: Callable[[tuple[object, ...]], ScheduledSequence] = partial(tuple.__new__, ScheduledSequence)
"""From all of its fields in order, as `_make`, without a call in Python: there is one for each running request in each step."""


class ScheduledBatch(NamedTuple):
    """One iteration's plan. `preempted` lost their blocks in it; of `released` ids a runner may forget what it cached.

    `num_drafts` of the `num_tokens` tokens are guesses.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int
    preempted: tuple[RequestId, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    released: tuple[RequestId, ...] = ()
    num_drafts: int = 0


class SequenceResult(NamedTuple):
    """What one run gave: its sampled tokens (none when it does not sample, several behind drafts), or its row's own error."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


class BatchResult(NamedTuple):
    """One result for each of the batch's sequences, in the same order."""

    results: Sequence[SequenceResult]
