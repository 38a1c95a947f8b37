"""A runner without a model that remembers what every cache slot holds, and so finds each read of a stale or foreign one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult, WindowTable
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.core.windowed_cache import GroupedKVCacheManager, WindowedKVCacheManager

EOS = 7
VOCABULARY = 8


class StepFailed(Exception):
    """What the runner raises when it is told to fail."""


def next_token(prefix: Sequence[int], adapter: str | None) -> int:
    """A fixed function of all tokens so far: a text does not depend on anything else. Half of the time the last two decide."""
    rng = random.Random(hash((tuple(prefix), len(adapter or ""))))
    if rng.random() < 0.5:
        rng = random.Random(hash(tuple(prefix[-2:])))
    return rng.randrange(VOCABULARY)


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


class Pool:
    """The slots of one group of layers, which see `window` tokens (None: all), and the table that a sequence has for them."""

    def __init__(self, block_size: int, window: int | None, has_own_table: bool) -> None:
        self.block_size = block_size
        self.window = window
        self.slots: dict[int, tuple[object, ...]] = {}
        self._has_own_table = has_own_table

    def table(self, sequence: ScheduledSequence) -> WindowTable:
        if not self._has_own_table:
            return WindowTable(sequence.block_ids, sequence.block_start)
        assert sequence.window is not None
        return sequence.window

    def slot(self, sequence: ScheduledSequence, position: int) -> int:
        table = self.table(sequence)
        index, offset = divmod(position - table.block_start, self.block_size)
        assert index >= 0, f"{sequence.request_id}: position {position} was given back, the table begins at {table.block_start}"
        return table.block_ids[index] * self.block_size + offset

    def first_read(self, sequence: ScheduledSequence) -> int:
        return 0 if self.window is None else max(sequence.start - self.window + 1, 0)


def pools_of(kv: KVCacheManager | GroupedKVCacheManager) -> list[Pool]:
    if isinstance(kv, GroupedKVCacheManager):
        return [Pool(kv.block_size, None, False), Pool(kv.block_size, kv.windowed.window, True)]
    return [Pool(kv.block_size, kv.window if isinstance(kv, WindowedKVCacheManager) else None, False)]


class ShadowRunner:
    """Checks each plan against the requests it was made from, writes its slots, then reads slot by slot what each layer may see."""

    def __init__(self, kv: KVCacheManager | GroupedKVCacheManager, requests: dict[RequestId, Request]) -> None:
        self.pools = pools_of(kv)
        self.requests = requests
        self.num_computed_tokens = 0
        self.num_drafts = 0
        self.num_accepted = 0

    def execute(self, batch: ScheduledBatch, fail_after: int | None = None) -> BatchResult:
        """Runs the plan; with `fail_after`, writes that many of its sequences and raises StepFailed."""
        for sequence in batch.sequences[:fail_after]:
            self._write(sequence)
        if fail_after is not None:
            raise StepFailed
        for sequence in batch.sequences:
            self._read(sequence)
        self.num_computed_tokens += batch.num_tokens
        self.num_drafts += batch.num_drafts
        return BatchResult([self._sample(sequence) for sequence in batch.sequences])

    def _content(self, sequence: ScheduledSequence, position: int) -> tuple[object, ...]:
        known = self.requests[sequence.request_id].token_ids[: min(position + 1, sequence.num_known)]
        return (sequence.adapter, *known, *sequence.tokens[sequence.num_known - sequence.start :][: position + 1 - len(known)])

    def _write(self, sequence: ScheduledSequence) -> None:
        request = self.requests[sequence.request_id]
        assert (
            list(sequence.tokens[: sequence.num_known - sequence.start])
            == request.token_ids[sequence.start : sequence.num_known]
        )
        assert len(request.token_ids) >= sequence.num_known
        for pool in self.pools:
            for position in range(sequence.start, sequence.end):
                pool.slots[pool.slot(sequence, position)] = self._content(sequence, position)

    def _read(self, sequence: ScheduledSequence) -> None:
        for pool in self.pools:
            for position in range(pool.first_read(sequence), sequence.end):
                held = pool.slots.get(pool.slot(sequence, position))
                assert held == self._content(sequence, position), f"{sequence.request_id} reads {held} at {position}"

    def _sample(self, sequence: ScheduledSequence) -> SequenceResult:
        if not sequence.samples:
            return SequenceResult()
        prefix, sampled = list(self.requests[sequence.request_id].token_ids), []
        for draft in (*sequence.tokens[len(sequence.tokens) - sequence.num_drafts :], None):
            sampled.append(next_token(prefix, sequence.adapter))
            if sampled[-1] != draft:
                break
            prefix.append(sampled[-1])
        self.num_accepted += len(sampled) - 1
        return SequenceResult(tuple(sampled))
