"""The flat batch's index arithmetic, as plain integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.request import GREEDY, RequestId


def run(tokens, start, blocks, logits=Logits.NONE, index=0):
    samples = logits is not Logits.NONE
    return ScheduledSequence(RequestId(index), tuple(tokens), start, tuple(blocks), 1000, GREEDY, samples, logits)


def plan(*sequences):
    return ScheduledBatch(tuple(sequences), sum(len(s.tokens) for s in sequences))


def test_a_mixed_batch_by_hand():
    batch = plan(
        run([7], 4, [5, 2], Logits.LAST),
        run([1, 2, 3], 2, [0, 9], Logits.ALL),
        run([8, 8], 0, [3], Logits.NONE),
        run([4, 6], 3, [1, 7], Logits.LAST),
    )
    flat = flatten(batch, 4)
    assert flat.input_ids == [7, 1, 2, 3, 8, 8, 4, 6]
    assert flat.position_ids == [4, 2, 3, 4, 0, 1, 3, 4]
    assert flat.slot_mapping == [8, 2, 3, 36, 12, 13, 7, 28]
    assert flat.query_starts == [0, 1, 4, 6, 8]
    assert flat.context_lens == [5, 5, 2, 5]
    assert flat.block_tables == [(5, 2), (0, 9), (3,), (1, 7)]
    assert flat.logit_rows == [0, 1, 2, 3, 7]
    assert flat.logit_starts == [0, 1, 4, 4, 5]
    assert (flat.sampling, flat.sample_rows) == ([0, 1, 3], [0, 3, 4])
    assert (flat.num_tokens, flat.num_sequences) == (8, 4)


def test_single_tokens_some_without_logits():
    flat = flatten(plan(run([7], 4, [5, 2], Logits.LAST), run([3], 0, [1]), run([9], 1, [4], Logits.ALL)), 4)
    assert flat.logit_rows == [0, 2]
    assert flat.logit_starts == [0, 1, 1, 2]
    assert (flat.sampling, flat.sample_rows) == ([0, 2], [0, 1])


def test_nothing_planned_is_an_empty_flat_batch():
    flat = flatten(ScheduledBatch((), 0), 16)
    assert flat.input_ids == flat.logit_rows == flat.context_lens == []
    assert flat.query_starts == [0]


def test_a_table_that_does_not_cover_the_run_is_an_error():
    with pytest.raises(IndexError):
        flatten(plan(run([1, 2], 3, [0])), 4)


@st.composite
def plans(draw):
    """Plans whose tables share blocks only before the runs, as a prefix cache shares them."""
    block_size = draw(st.integers(1, 5))
    only_single = draw(st.booleans())
    next_block, sequences = draw(st.integers(0, 3)), []
    for i in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 12))
        length = 1 if only_single else draw(st.integers(1, 9))
        num_own = (start + length - 1) // block_size - start // block_size + 1
        own = draw(st.permutations(range(next_block, next_block + num_own)))
        next_block += num_own
        table = [draw(st.integers(0, 40)) for _ in range(start // block_size)] + list(own)
        sequences.append(run(range(i * 100, i * 100 + length), start, table, draw(st.sampled_from(list(Logits))), i))
    return plan(*sequences), block_size


@settings(max_examples=150, deadline=None)
@given(plans())
def test_lengths_agree_and_slots_are_unique(drawn):
    batch, block_size = drawn
    flat = flatten(batch, block_size)
    assert len(flat.input_ids) == len(flat.position_ids) == len(flat.slot_mapping) == batch.num_tokens == flat.query_starts[-1]
    assert len(set(flat.slot_mapping)) == batch.num_tokens
    assert len(flat.query_starts) == len(flat.logit_starts) == len(flat.context_lens) + 1
    assert flat.logit_rows == sorted(set(flat.logit_rows)) and len(flat.logit_rows) == flat.logit_starts[-1]
    for i, sequence in enumerate(batch.sequences):
        own = slice(flat.query_starts[i], flat.query_starts[i + 1])
        assert tuple(flat.input_ids[own]) == sequence.tokens
        assert flat.position_ids[own] == list(range(sequence.start, sequence.end))
        assert flat.slot_mapping[own] == [
            sequence.block_ids[p // block_size] * block_size + p % block_size for p in flat.position_ids[own]
        ]
        wanted = {Logits.NONE: [], Logits.LAST: [own.stop - 1], Logits.ALL: list(range(own.start, own.stop))}
        assert flat.logit_rows[flat.logit_starts[i] : flat.logit_starts[i + 1]] == wanted[sequence.logits]
    assert flat.sampling == [i for i, s in enumerate(batch.sequences) if s.samples]
    assert [flat.logit_rows[r] for r in flat.sample_rows] == [flat.query_starts[i + 1] - 1 for i in flat.sampling]
