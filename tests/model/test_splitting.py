"""Out of memory: a step runs in pieces and gives what it would have given whole."""

from __future__ import annotations

import random

import pytest

from contbatch_cli.core.batch import BatchResult, Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId, SamplingParams, TokenLogprob
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.errors import EngineError
from contbatch_cli.model.splitting import SplittingRunner, halves, split_run


class Exhausted(Exception):
    pass


class SmallRunner:
    """Runs out of memory above `capacity` tokens (drawn anew each time), after it has "computed" part of the step.

    It samples a function of all tokens it knows of a row, through a record of slots: it reads only what was written before.
    """

    def __init__(self, rng, capacities, block_size):
        self.rng, self.capacities, self.block_size = rng, capacities, block_size
        self.slots = {}
        self.executed = []
        self.num_failures = 0

    def execute(self, batch):
        assert batch.num_tokens == sum(len(sequence.tokens) for sequence in batch.sequences) > 0
        capacity = self.rng.choice(self.capacities)
        for sequence in batch.sequences:
            for position, token in enumerate(sequence.tokens, sequence.start):
                self.slots[sequence.block_ids[position // self.block_size], position % self.block_size] = token
        if batch.num_tokens > capacity:
            self.num_failures += 1
            raise Exhausted(f"{batch.num_tokens} tokens")
        self.executed.append(batch)
        return BatchResult([self._result(sequence) for sequence in batch.sequences])

    def _result(self, sequence):
        known = [self.slots[sequence.block_ids[p // self.block_size], p % self.block_size] for p in range(sequence.end)]
        sampled = (hash(tuple(known)) % 1000,) if sequence.samples else ()
        logprobs = ()
        if sequence.logits is Logits.ALL:
            following = [*sequence.tokens[1:], *([] if sequence.next_token is None else [sequence.next_token])]
            logprobs = tuple(TokenLogprob(token, -1.0 - sequence.start - i) for i, token in enumerate(following))
        return SequenceResult(sampled, prompt_logprobs=logprobs)


def splitting(runner):
    return SplittingRunner(runner, lambda error: isinstance(error, Exhausted))


def run_job(runner, block_size, seed):
    rng = random.Random(seed)
    kv = KVCacheManager(600 // block_size, block_size)
    scheduler = StallFreeScheduler(kv, 40, 8, standard_stop_rule)
    shared = [rng.randrange(1000) for _ in range(20)]
    requests = []
    for row in range(15):
        prompt = (shared if row % 2 else []) + [rng.randrange(1000) for _ in range(rng.randint(1, 50))]
        requests.append(
            Request.from_prompt(RequestId(row), prompt, SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True))
        )
        scheduler.add_request(requests[-1])
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
        scheduler.check()
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_lost_or_changed(seed):
    """A job with shared prefixes on a runner that fails at random, against the same job with memory enough."""
    block_size = random.Random(seed).choice([1, 4, 16])
    whole = run_job(SmallRunner(random.Random(0), [10**6], block_size), block_size, seed)
    small = SmallRunner(random.Random(seed), [1, 3, 9, 40], block_size)
    runner = splitting(small)
    assert run_job(runner, block_size, seed) == whole
    assert small.num_failures > 0 and runner.num_splits == small.num_failures


def sequence(row, tokens, start=0, samples=True, logits=Logits.LAST, next_token=None):
    return ScheduledSequence(
        RequestId(row), tuple(tokens), start, tuple(range(100)), 50, GREEDY, samples, logits, next_token=next_token
    )


def test_pieces_are_in_plan_order_and_cover_the_plan():
    plan = ScheduledBatch((sequence(0, [1]), sequence(1, [2]), sequence(2, range(9))), 11, admitted=(RequestId(2),))
    small = SmallRunner(random.Random(0), [4], 4)
    result = splitting(small).execute(plan)
    assert len(result.results) == 3
    executed = [(s.request_id.row, s.start, len(s.tokens), s.samples) for batch in small.executed for s in batch.sequences]
    assert executed == [(0, 0, 1, True), (1, 0, 1, True), (2, 0, 4, False), (2, 4, 2, False), (2, 6, 3, True)]
    assert [batch.admitted for batch in small.executed] == [(RequestId(2),), (), (), ()]


def test_prompt_logprobs_of_a_split_run_are_whole():
    run = sequence(0, range(10), start=5, samples=False, logits=Logits.ALL, next_token=77)
    plan = ScheduledBatch((run,), 10)
    whole = SmallRunner(random.Random(0), [100], 4)
    for position in range(5):
        whole.slots[position // 4, position % 4] = 0
    small = SmallRunner(random.Random(0), [3], 4)
    small.slots = dict(whole.slots)
    expected = whole.execute(plan).results[0]
    assert splitting(small).execute(plan).results[0].prompt_logprobs == expected.prompt_logprobs
    assert [entry.token_id for entry in expected.prompt_logprobs] == [*range(1, 10), 77]


def test_one_token_that_does_not_fit_is_an_error_with_numbers():
    plan = ScheduledBatch((sequence(0, [1], start=3), sequence(1, [2])), 2)
    with pytest.raises(EngineError, match="1 token that ends a context of 4: 1 tokens; lower cache.memory"):
        splitting(SmallRunner(random.Random(0), [0], 4)).execute(plan)


def test_other_errors_pass_through():
    class Broken:
        def execute(self, batch):
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        splitting(Broken()).execute(ScheduledBatch((sequence(0, [1, 2]),), 2))


def test_halves_are_never_empty():
    rng = random.Random(1)
    for _ in range(300):
        runs = tuple(sequence(row, range(rng.choice([1, 1, 1, rng.randint(1, 60)]))) for row in range(rng.randint(1, 6)))
        plan = ScheduledBatch(runs, sum(len(run.tokens) for run in runs))
        if plan.num_tokens > 1:
            pieces = halves(plan)
            assert all(piece.num_tokens == sum(len(run.tokens) for run in piece.sequences) > 0 for piece in pieces)
            assert sum(piece.num_tokens for piece in pieces) == plan.num_tokens


def test_a_split_run_keeps_what_the_row_asks_for():
    head, tail = split_run(sequence(0, range(7), start=2), 3)
    assert (head.start, head.end, head.samples, head.logits, head.next_token) == (2, 5, False, Logits.NONE, None)
    assert (tail.start, tail.end, tail.samples, tail.logits) == (5, 9, True, Logits.LAST)
