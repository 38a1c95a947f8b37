"""A runner without a model that remembers what every cache slot holds, and so finds each read of a stale or foreign one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId

EOS = 7
VOCABULARY = 8


class StepFailed(Exception):
    """What the runner raises when it is told to fail."""


def next_token(prefix: Sequence[int], adapter: str | None) -> int:
    """A fixed function of all tokens so far: a text does not depend on anything else."""
    return random.Random(hash((tuple(prefix), len(adapter or "")))).randrange(VOCABULARY)


def stop_rule(request: Request) -> Finish | None:
    if request.token_ids[-1] in request.sampling.eos_token_ids and not request.sampling.ignore_eos:
        return Finish(FinishReason.STOP)
    if request.num_output_tokens >= request.sampling.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None


def text_alone(request: Request) -> list[int]:
    """The output that the request must have, computed token by token."""
    alone = Request.from_prompt(request.request_id, request.prompt_ids, request.sampling, request.adapter)
    while alone.num_output_tokens < alone.sampling.max_tokens:
        alone.token_ids.append(next_token(alone.token_ids, alone.adapter))
        if stop_rule(alone) is not None:
            break
    return alone.output_ids


class ShadowRunner:
    """Checks each plan against the requests it was made from, writes its slots, then reads every context slot by slot."""

    def __init__(self, block_size: int, requests: dict[RequestId, Request]) -> None:
        self.block_size = block_size
        self.requests = requests
        self.slots: dict[int, tuple[object, ...]] = {}
        self.num_computed_tokens = 0

    def execute(self, batch: ScheduledBatch, fail_after: int | None = None) -> BatchResult:
        """Runs the plan; with `fail_after`, writes that many of its sequences and raises StepFailed."""
        for sequence in batch.sequences[:fail_after]:
            self._write(sequence)
        if fail_after is not None:
            raise StepFailed
        for sequence in batch.sequences:
            self._read(sequence)
        self.num_computed_tokens += batch.num_tokens
        return BatchResult([self._sample(sequence) for sequence in batch.sequences])

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _content(self, sequence: ScheduledSequence, position: int) -> tuple[object, ...]:
        return (sequence.adapter, *self.requests[sequence.request_id].token_ids[: position + 1])

    def _write(self, sequence: ScheduledSequence) -> None:
        request = self.requests[sequence.request_id]
        assert list(sequence.tokens) == request.token_ids[sequence.start : sequence.end]
        for position in range(sequence.start, sequence.end):
            self.slots[self._slot(sequence, position)] = self._content(sequence, position)

    def _read(self, sequence: ScheduledSequence) -> None:
        for position in range(sequence.end):
            held = self.slots.get(self._slot(sequence, position))
            assert held == self._content(sequence, position), f"{sequence.request_id} reads {held} at {position}"

    def _sample(self, sequence: ScheduledSequence) -> SequenceResult:
        if not sequence.samples:
            return SequenceResult()
        return SequenceResult((next_token(self.requests[sequence.request_id].token_ids, sequence.adapter),))
