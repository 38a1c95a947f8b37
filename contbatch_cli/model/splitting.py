"""Out of memory in a step: run it in pieces, in plan order, and go on. No row is lost and no result changes its place.

    plan    | A | B | C C C C |        piece 1  | A | B |        piece 2  | C C C C |        or down to  | C C |  and  | C C |

In plan order, because a row may read a block that an earlier row of the same step fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from contbatch_cli.core.batch import BatchResult, Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import without_drafts
from contbatch_cli.errors import EngineError


class Executes(Protocol):
    def execute(self, batch: ScheduledBatch) -> BatchResult: ...


class SplittingRunner:
    """A runner that leaves out drafts and then halves what does not fit into memory, down to one token.

    `is_out_of_memory` tells that error from others, which pass through; `free_memory` is called before each further attempt. A piece is
    run again from its beginning: it writes the same keys and values to the same slots. `num_splits` counts the halvings.
    """

    def __init__(
        self,
        runner: Executes,
        is_out_of_memory: Callable[[BaseException], bool],
        free_memory: Callable[[], object] = lambda: None,
    ) -> None:
        self.runner = runner
        self.num_splits = 0
        self._is_out_of_memory = is_out_of_memory
        self._free_memory = free_memory

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Raises EngineError, with numbers, when one token alone does not fit."""
        message = self._try(batch)
        if isinstance(message, BatchResult):
            return message
        if batch.num_drafts:
            return self.execute(without_drafts(batch))
        if batch.num_tokens == 1:
            end = batch.sequences[0].end
            raise EngineError(
                f"out of memory in a step of 1 token that ends a context of {end:,}: {message}; lower cache.memory"
            )
        # Outside of the handler, whose traceback would keep the failed attempt's tensors alive.
        self._free_memory()
        self.num_splits += 1
        first, second = halves(batch)
        return joined(batch, first, self.execute(first), self.execute(second))

    def _try(self, batch: ScheduledBatch) -> BatchResult | str:
        """The result, or what the error says when memory ran out."""
        try:
            return self.runner.execute(batch)
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
            return str(error).splitlines()[0] if str(error) else type(error).__name__


def halves(batch: ScheduledBatch) -> tuple[ScheduledBatch, ScheduledBatch]:
    """Two pieces of a plan of at least two tokens, the first with about half of them, between two runs or within its only run.

    What the plan says about other requests (preempted, admitted, released) goes with the first piece.
    """
    sequences = batch.sequences
    if len(sequences) == 1:
        head, tail = split_run(sequences[0], len(sequences[0].tokens) // 2)
        return _piece(batch, [head]), ScheduledBatch((tail,), len(tail.tokens))
    count, taken = 1, len(sequences[0].tokens)
    while count < len(sequences) - 1 and taken + len(sequences[count].tokens) <= batch.num_tokens // 2:
        taken += len(sequences[count].tokens)
        count += 1
    return _piece(batch, sequences[:count]), ScheduledBatch(sequences[count:], batch.num_tokens - taken)


def _piece(batch: ScheduledBatch, sequences: Sequence[ScheduledSequence]) -> ScheduledBatch:
    return batch._replace(sequences=tuple(sequences), num_tokens=sum(len(sequence.tokens) for sequence in sequences))


def split_run(sequence: ScheduledSequence, length: int) -> tuple[ScheduledSequence, ScheduledSequence]:
    """A run as two: the first `length` tokens, which do not sample, and the rest."""
    head = sequence._replace(
        tokens=sequence.tokens[:length],
        samples=False,
        logits=Logits.ALL if sequence.logits is Logits.ALL else Logits.NONE,
        next_token=sequence.tokens[length] if sequence.logits is Logits.ALL else None,
    )
    return head, sequence._replace(tokens=sequence.tokens[length:], start=sequence.start + length)


def joined(batch: ScheduledBatch, first: ScheduledBatch, head: BatchResult, tail: BatchResult) -> BatchResult:
    """The results of both pieces as the whole plan's; a run that was split gets its parts' results together."""
    if len(batch.sequences) > 1:
        return BatchResult([*head.results, *tail.results])
    assert len(first.sequences) == 1
    before, after = head.results[0], tail.results[0]
    return BatchResult([_merged(before, after)])


def _merged(before: SequenceResult, after: SequenceResult) -> SequenceResult:
    return after._replace(
        prompt_logprobs=(*before.prompt_logprobs, *after.prompt_logprobs),
        error=before.error if after.error is None else after.error,
    )
