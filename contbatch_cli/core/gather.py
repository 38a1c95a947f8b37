"""Gather: a plan's runs become one flat batch of plain integers, ready to be moved to a device.

Shape legend: T tokens of the step, S sequences, L logit rows.

    sequences   | A: 1 token | B: 3 tokens   | C: 1 token |      S = 3, T = 5
    query_starts  0            1               4            5
"""

from __future__ import annotations

from typing import NamedTuple

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence


class FlatBatch(NamedTuple):
    """One iteration's tokens side by side, without padding. The lists are not to be changed.

    `input_ids`, `position_ids` and `slot_mapping` have length T; `slot_mapping` says where each token's key and value go:
    `block_ids[place // block_size] * block_size + place % block_size`, no slot twice in a step, `place` being the position
    counted from where the sequence's table begins. `query_starts` has length S + 1: sequence i owns the flat tokens
    `query_starts[i]` to `query_starts[i + 1]`. `context_lens[i]` tokens of sequence i, counted from where its table begins, are
    in the cache once the step's keys and values are written, its own last token being the newest. `block_tables[i]` covers
    them. `logit_rows` (length L) are the flat tokens that need the LM head, ascending; `logit_starts` (S + 1) says which of
    those rows are whose. `sampling` are the sequences that sample, and `sample_rows` where in `logit_rows` the tokens that do
    stand: each one's last known token, and the drafts behind it.
    """

    input_ids: list[int]
    position_ids: list[int]
    slot_mapping: list[int]
    query_starts: list[int]
    context_lens: list[int]
    block_tables: list[tuple[int, ...]]
    logit_rows: list[int]
    logit_starts: list[int]
    sampling: list[int]
    sample_rows: list[int]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


def flatten(batch: ScheduledBatch, block_size: int) -> FlatBatch:
    """The flat batch of a plan, its sequences in the plan's order."""
    sequences = batch.sequences
    if batch.num_tokens == len(sequences):
        return _flatten_single_tokens(sequences, block_size)
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    for sequence in sequences:
        positions.extend(range(sequence.start, sequence.end))
        first = sequence.block_start
        slots.extend(_slots(sequence.block_ids, sequence.start - first, sequence.end - first, block_size))
        query_starts.append(len(positions))
    logit_rows, logit_starts = _logit_rows(sequences, query_starts)
    sampling = [i for i, sequence in enumerate(sequences) if sequence.samples]
    ends = [(logit_starts[i + 1], sequences[i].num_drafts) for i in sampling]
    return FlatBatch(
        input_ids=[token for sequence in sequences for token in sequence.tokens],
        position_ids=positions,
        slot_mapping=slots,
        query_starts=query_starts,
        context_lens=[sequence.end - sequence.block_start for sequence in sequences],
        block_tables=[sequence.block_ids for sequence in sequences],
        logit_rows=logit_rows,
        logit_starts=logit_starts,
        sampling=sampling,
        sample_rows=[row for end, num_drafts in ends for row in range(end - 1 - num_drafts, end)],
        block_size=block_size,
    )


def flatten_windows(batch: ScheduledBatch, flat: FlatBatch) -> FlatBatch:
    """The flat batch of the same plan for the layers whose sequences have a table of their own, `window`."""
    slots: list[int] = []
    lengths: list[int] = []
    tables: list[tuple[int, ...]] = []
    for sequence in batch.sequences:
        assert sequence.window is not None, f"{sequence.request_id} has no table for the layers with a window"
        table, first = sequence.window
        slots.extend(_slots(table, sequence.start - first, sequence.end - first, flat.block_size))
        lengths.append(sequence.end - first)
        tables.append(table)
    return flat._replace(slot_mapping=slots, context_lens=lengths, block_tables=tables)


def _flatten_single_tokens(sequences: tuple[ScheduledSequence, ...], block_size: int) -> FlatBatch:
    """The same for runs of one token each: most steps of most jobs, so each list is one comprehension."""
    starts = [sequence.start for sequence in sequences]
    places = [sequence.start - sequence.block_start for sequence in sequences]
    tables = [sequence.block_ids for sequence in sequences]
    rows = [i for i, sequence in enumerate(sequences) if sequence.logits]
    logit_starts = list(range(len(sequences) + 1))
    if len(rows) != len(sequences):
        _, logit_starts = _logit_rows(sequences, logit_starts)
    sampling = [i for i, sequence in enumerate(sequences) if sequence.samples]
    return FlatBatch(
        input_ids=[sequence.tokens[0] for sequence in sequences],
        position_ids=starts,
        slot_mapping=[
            table[place // block_size] * block_size + place % block_size for table, place in zip(tables, places, strict=True)
        ],
        query_starts=list(range(len(sequences) + 1)),
        context_lens=[place + 1 for place in places],
        block_tables=tables,
        logit_rows=rows,
        logit_starts=logit_starts,
        sampling=sampling,
        sample_rows=[logit_starts[i] for i in sampling],
        block_size=block_size,
    )


def _slots(block_ids: tuple[int, ...], start: int, end: int, block_size: int) -> list[int]:
    """The slots of positions `start` to `end`, block by block."""
    slots: list[int] = []
    while start < end:
        index, offset = divmod(start, block_size)
        stop = min(end, start - offset + block_size)
        first = block_ids[index] * block_size + offset
        slots.extend(range(first, first + stop - start))
        start = stop
    return slots


def _logit_rows(sequences: tuple[ScheduledSequence, ...], query_starts: list[int]) -> tuple[list[int], list[int]]:
    """`logit_rows` and `logit_starts` of a flat batch."""
    rows: list[int] = []
    starts = [0]
    for i, sequence in enumerate(sequences):
        if sequence.logits is Logits.LAST:
            rows.append(query_starts[i + 1] - 1)
        elif sequence.logits is Logits.ALL:
            rows.extend(range(query_starts[i], query_starts[i + 1]))
        starts.append(len(rows))
    return rows, starts
