"""Draft tokens: guesses of how a request goes on, computed in one step with its newest token and kept as far as they are right.

The guesses are n-gram drafts ("prompt lookup decoding", Saxena 2023): what followed the last time that the two newest tokens stood
together in the request's own text. They are verified exactly. The step gives logits at the newest known token and at each draft;
a draft stands only if it is the very token that is sampled before it, so the text is the one without drafts:

    known    ... the cat sat . the cat            run      cat  sat  .   the
    drafts   sat . the                            sampled  sat  .   on           two drafts right, three new tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.request import Request, RequestId

MAX_DRAFTS = 7
"""For one request in one step: where the weights are read for few tokens, a step of 8 costs little more than one of 1."""


class _PairIndex:
    """Where each pair of neighbouring tokens last stood, taken in as far as it was asked about."""

    __slots__ = ("_behind", "_num_indexed")

    def __init__(self) -> None:
        self._behind: dict[tuple[int, int], int] = {}
        self._num_indexed = 1

    def behind_newest(self, token_ids: Sequence[int]) -> int | None:
        """The position behind the latest earlier place of the two newest tokens; None when there is none."""
        newest = len(token_ids) - 1
        for position in range(self._num_indexed, newest):
            self._behind[token_ids[position - 1], token_ids[position]] = position + 1
        self._num_indexed = max(newest, self._num_indexed)
        return self._behind.get((token_ids[newest - 1], token_ids[newest])) if newest else None


class NgramDrafts:
    """Proposes drafts. What it remembers of a request can be rebuilt from its tokens at any time."""

    def __init__(self) -> None:
        self._indexes: dict[RequestId, _PairIndex] = {}

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may come next; none when the two newest tokens are new as a pair.

        A continuation that reaches the end of what is known goes on with itself, as a loop in the text would.
        """
        index = self._indexes.setdefault(request.request_id, _PairIndex())
        source = index.behind_newest(request.token_ids)
        if source is None:
            return ()
        drafts = request.token_ids[source : source + most]
        period = len(drafts)
        return tuple(drafts[place % period] for place in range(most))

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._indexes.pop(request_id, None)


def may_be_drafted(sequence: ScheduledSequence) -> bool:
    """Whether a run may carry drafts: a greedy decode whose logits do not depend on a history that the drafts would change."""
    sampling = sequence.sampling
    return sequence.is_decode and sequence.samples and sampling.temperature == 0.0 and not sampling.needs_history


def sampled_runs(sequence: ScheduledSequence) -> tuple[ScheduledSequence, ...]:
    """A run that samples, once for each of its tokens that do: as if it ended there."""
    if not sequence.num_drafts:
        return (sequence,)
    first = len(sequence.tokens) - sequence.num_drafts
    lengths = range(first, len(sequence.tokens) + 1)
    return tuple(sequence._replace(tokens=sequence.tokens[:length], num_drafts=length - first) for length in lengths)


def accepted(sequence: ScheduledSequence, sampled: Sequence[SequenceResult]) -> SequenceResult:
    """The result of a run with drafts, from those of its `sampled_runs`: up to the first token that is not the draft behind it.

    A row that fails behind tokens that stand keeps these and fails in its next step, unless it has ended by then.
    """
    drafts = sequence.tokens[len(sequence.tokens) - sequence.num_drafts :]
    taken: list[SequenceResult] = []
    for place, result in enumerate(sampled):
        if result.error is not None:
            if not taken:
                return result
            break
        taken.append(result)
        if place == len(drafts) or result.token_ids[0] != drafts[place]:
            break
    token_ids = tuple(token for result in taken for token in result.token_ids)
    return SequenceResult(token_ids, tuple(logprob for result in taken for logprob in result.logprobs))


def without_drafts(batch: ScheduledBatch) -> ScheduledBatch:
    """The same plan with the tokens that are known only."""
    sequences = tuple(
        one._replace(tokens=one.tokens[: len(one.tokens) - one.num_drafts], num_drafts=0) if one.num_drafts else one
        for one in batch.sequences
    )
    return batch._replace(sequences=sequences, num_tokens=batch.num_tokens - batch.num_drafts, num_drafts=0)


def accepted_drafts(batch: ScheduledBatch, result: BatchResult, finished: Sequence[Request]) -> Mapping[RequestId, int]:
    """How many drafts became tokens of their requests, where there were any; `finished` are the requests that the step ended."""
    if not batch.num_drafts:
        return {}
    ends = {request.request_id: request.num_tokens for request in finished}
    counts: dict[RequestId, int] = {}
    for sequence, outcome in zip(batch.sequences, result.results, strict=True):
        if sequence.num_drafts:
            end = ends.get(sequence.request_id, sequence.num_known + len(outcome.token_ids))
            counts[sequence.request_id] = max(end - sequence.num_known - 1, 0)
    return counts
