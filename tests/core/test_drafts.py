"""Draft tokens: what is proposed, which runs carry them, and what stands of them."""

from __future__ import annotations

import pytest

from contbatch_cli.core.batch import BatchResult, Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import (
    MAX_DRAFTS,
    NgramDrafts,
    accepted,
    accepted_drafts,
    may_be_drafted,
    sampled_runs,
    without_drafts,
)
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId, SamplingParams, TokenLogprob
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule


def request_of(token_ids: list[int], num_prompt_tokens: int = 1) -> Request:
    return Request(RequestId(0), list(token_ids), num_prompt_tokens)


@pytest.mark.parametrize(
    ("token_ids", "most", "drafts"),
    [
        ([1], 3, ()),
        ([1, 2, 3, 4], 3, ()),
        ([1, 2, 3, 4, 1, 2], 1, (3,)),
        ([1, 2, 3, 4, 1, 2], 4, (3, 4, 1, 2)),
        ([1, 2, 9, 1, 2, 3, 0, 1, 2], 2, (3, 0)),
        ([1, 2, 3, 1, 2], 7, (3, 1, 2, 3, 1, 2, 3)),
        ([5, 6, 6], 3, ()),
        ([6, 6, 6], 3, (6, 6, 6)),
    ],
)
def test_what_followed_the_latest_equal_pair_is_proposed(token_ids: list[int], most: int, drafts: tuple[int, ...]) -> None:
    assert NgramDrafts().propose(request_of(token_ids), most) == drafts


def test_a_proposer_that_went_along_proposes_what_a_new_one_does() -> None:
    token_ids = [int(char) for char in "3141592653589793238462643383279502884197169399375105820974944592307816406286"]
    along = NgramDrafts()
    request = request_of(token_ids[:2])
    for token in token_ids[2:]:
        request.token_ids.append(token)
        if len(request.token_ids) % 3:
            assert along.propose(request, 4) == NgramDrafts().propose(request, 4)
    along.forget(request.request_id)
    assert along.propose(request, 4) == NgramDrafts().propose(request, 4)


def drafted(tokens: tuple[int, ...], num_drafts: int, sampling: SamplingParams = GREEDY) -> ScheduledSequence:
    return ScheduledSequence(RequestId(0), tokens, 10, (0, 1, 2, 3), 4, sampling, True, Logits.ALL, num_drafts=num_drafts)


def test_only_greedy_decodes_without_a_history_may_be_drafted() -> None:
    assert may_be_drafted(drafted((1,), 0))
    assert not may_be_drafted(drafted((1, 2), 0))
    assert not may_be_drafted(drafted((1,), 0, SamplingParams(temperature=0.5)))
    assert not may_be_drafted(drafted((1,), 0, SamplingParams(presence_penalty=0.5)))
    assert not may_be_drafted(drafted((1,), 0)._replace(start=3))


def test_a_run_with_drafts_is_sampled_as_if_it_ended_at_each_of_them() -> None:
    runs = sampled_runs(drafted((5, 6, 7), 2))
    assert [(run.tokens, run.end, run.num_drafts, run.is_decode) for run in runs] == [
        ((5,), 11, 0, True),
        ((5, 6), 12, 1, True),
        ((5, 6, 7), 13, 2, True),
    ]


@pytest.mark.parametrize(
    ("sampled", "taken"), [((6, 7, 8), (6, 7, 8)), ((6, 9, 8), (6, 9)), ((9, 7, 8), (9,)), ((6, 7, 7), (6, 7, 7))]
)
def test_drafts_stand_up_to_the_first_other_token(sampled: tuple[int, ...], taken: tuple[int, ...]) -> None:
    results = [SequenceResult((token,), (TokenLogprob(token, -0.5),)) for token in sampled]
    result = accepted(drafted((5, 6, 7), 2), results)
    assert result.token_ids == taken
    assert tuple(one.token_id for one in result.logprobs) == taken


def test_a_row_fails_by_its_first_token_only() -> None:
    fails = SequenceResult(error="non_finite_logits: here")
    good = SequenceResult((6,))
    assert accepted(drafted((5, 6, 7), 2), [fails, good, good]) == fails
    assert accepted(drafted((5, 6, 7), 2), [good, fails, good]).token_ids == (6,)


def test_a_plan_without_its_drafts() -> None:
    plain = drafted((4,), 0)._replace(request_id=RequestId(1))
    batch = ScheduledBatch((drafted((5, 6, 7), 2), plain), 4, num_drafts=2)
    bare = without_drafts(batch)
    assert [sequence.tokens for sequence in bare.sequences] == [(5,), (4,)]
    assert (bare.num_tokens, bare.num_drafts) == (2, 0)


def test_the_flat_batch_samples_behind_the_known_tokens_and_the_drafts() -> None:
    prefill = ScheduledSequence(RequestId(2), (1, 2, 3), 0, (7,), 5, GREEDY, False, Logits.NONE)
    scored = ScheduledSequence(RequestId(1), (1, 2), 0, (6,), 2, GREEDY, True, Logits.ALL)
    flat = flatten(ScheduledBatch((drafted((5, 6, 7), 2), scored, prefill), 8, num_drafts=2), 4)
    assert flat.sampling == [0, 1]
    assert flat.logit_rows == [0, 1, 2, 3, 4]
    assert flat.sample_rows == [0, 1, 2, 4]


def test_what_stood_is_counted_up_to_the_end_of_the_row() -> None:
    batch = ScheduledBatch((drafted((5, 6, 7), 2),), 3, num_drafts=2)
    result = BatchResult([SequenceResult((6, 7, 8))])
    assert accepted_drafts(batch, result, []) == {RequestId(0): 2}
    ended = request_of(list(range(12)))
    assert accepted_drafts(batch, result, [ended]) == {RequestId(0): 0}


def loop_scheduler(draft_tokens: int, num_rows: int, num_blocks: int = 64, budget: int = 64) -> StallFreeScheduler:
    """Rows whose text is a loop, so that everything can be drafted, their prompts computed."""
    scheduler = StallFreeScheduler(KVCacheManager(num_blocks, 4), budget, num_rows, standard_stop_rule, draft_tokens)
    for row in range(num_rows):
        scheduler.add_request(Request.from_prompt(RequestId(row), [1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=20)))
    batch = scheduler.schedule_next_batch()
    scheduler.update(batch, BatchResult([SequenceResult((1,))] * num_rows))
    return scheduler


@pytest.mark.parametrize(
    ("draft_tokens", "num_rows", "drafts"), [(16, 1, [7]), (16, 3, [4, 4, 5]), (4, 3, [0, 0, 1]), (3, 3, [])]
)
def test_drafts_are_dealt_out_evenly_up_to_the_limit(draft_tokens: int, num_rows: int, drafts: list[int]) -> None:
    batch = loop_scheduler(draft_tokens, num_rows).schedule_next_batch()
    assert [sequence.num_drafts for sequence in batch.sequences] == (drafts or [0] * num_rows)
    assert batch.num_drafts == sum(drafts) and batch.num_tokens == num_rows + sum(drafts)
    assert max(drafts, default=0) <= MAX_DRAFTS


def test_no_draft_goes_beyond_max_tokens_or_what_the_cache_has_left() -> None:
    scheduler = loop_scheduler(16, 1)
    request = scheduler.running[0]
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        (sequence,) = batch.sequences
        assert sequence.end <= request.max_num_tokens
        scheduler.update(batch, BatchResult([SequenceResult((*sequence.tokens[1:], 1 + sequence.end % 3))]))
        scheduler.check()
    assert request.num_output_tokens == 20 and request.output_ids == [1, 2, 3, *([1, 2, 3] * 6)][:20]
    tight = loop_scheduler(16, 1, num_blocks=7)
    assert [sequence.num_drafts for sequence in tight.schedule_next_batch().sequences] == [7]


def test_a_step_that_failed_leaves_nothing_of_its_drafts() -> None:
    scheduler = loop_scheduler(16, 2)
    batch = scheduler.schedule_next_batch()
    assert batch.num_drafts
    scheduler.abort(batch)
    scheduler.check()
    assert scheduler.schedule_next_batch().sequences == batch.sequences
