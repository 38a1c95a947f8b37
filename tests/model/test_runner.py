"""The runner's border: results in the plan's order, prompt log-probabilities, and nothing kept between steps."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LlamaConfig

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.model.attention import ATTENTION_NAME, backend_named
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler
from tests.model.tiny import CPU, VOCAB_SIZE, Setting, one_thread, random_model, run_rows, shapes_of

__all__ = ["one_thread"]

PROMPT = [5, 17, 3, 88, 41, 5, 9, 60, 2, 33, 71]
SCORED = SamplingParams(max_tokens=4, prompt_logprobs=2)


@functools.cache
def model_and_shapes():
    model = random_model(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    return model, shapes_of(model)


def eager_logprobs(ids):
    model, _ = model_and_shapes()
    model.set_attn_implementation("eager")
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    return torch.log_softmax(logits.float(), dim=-1)


def runner_of(num_blocks=20, block_size=4):
    model, shapes = model_and_shapes()
    cache = KVCache(shapes, num_blocks, block_size, torch.float32, CPU)
    cache.fill(float("nan"))
    return ModelRunner(model, cache, backend_named("cpu"), Sampler(VOCAB_SIZE), CPU)


def sequence(row, tokens, start, blocks, logits, samples, sampling=GREEDY, next_token=None):
    return ScheduledSequence(
        RequestId(row), tuple(tokens), start, blocks, len(PROMPT), sampling, samples, logits, next_token=next_token
    )


def batch_of(*sequences):
    return ScheduledBatch(sequences, sum(len(s.tokens) for s in sequences))


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_prompt_logprobs_do_not_depend_on_the_chunks(budget):
    model, shapes = model_and_shapes()
    rows = [(PROMPT, SCORED), (PROMPT[:1], SCORED), (PROMPT[:6], SamplingParams(max_tokens=6))]
    ran = run_rows(model, shapes, rows, Setting(budget, 3, 4, 20))
    wanted = eager_logprobs(PROMPT)
    found = ran.requests[0].prompt_logprobs
    assert [entry.token_id for entry in found] == PROMPT[1:]
    for place, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(wanted[place, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == wanted[place].topk(2).indices.tolist()
    assert ran.requests[1].prompt_logprobs == ran.requests[2].prompt_logprobs == []
    assert ran.outputs[0] == run_rows(model, shapes, rows[:1], Setting(64, 1, 16, 9)).outputs[0]


def test_a_scored_prompt_that_asks_for_no_tokens():
    model, shapes = model_and_shapes()
    ran = run_rows(model, shapes, [(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))], Setting(5, 1, 4, 20))
    assert ran.outputs[0] == [] and len(ran.requests[0].prompt_logprobs) == len(PROMPT) - 1


def test_results_stand_in_the_plans_order():
    """A run that samples after one that does not, and a scored one between."""
    result = runner_of().execute(
        batch_of(
            sequence(0, PROMPT[:3], 0, (1,), Logits.NONE, False),
            sequence(1, PROMPT[:5], 0, (2, 3), Logits.ALL, False, SCORED, next_token=PROMPT[5]),
            sequence(2, PROMPT, 0, (4, 5, 6), Logits.LAST, True),
        )
    )
    logprobs = eager_logprobs(PROMPT)
    assert [len(r.token_ids) for r in result.results] == [0, 0, 1]
    assert result.results[2].token_ids == (int(logprobs[-1].argmax()),)
    assert [entry.token_id for entry in result.results[1].prompt_logprobs] == PROMPT[1:6]
    assert result.results[0] == SequenceResult()


def test_a_step_without_logits_is_run():
    runner = runner_of()
    nothing = runner.execute(batch_of(sequence(0, PROMPT[:7], 0, (0, 1), Logits.NONE, False)))
    assert nothing.results == [SequenceResult()]
    done = runner.execute(batch_of(sequence(0, PROMPT[7:], 7, (0, 1, 2), Logits.LAST, True)))
    assert done.results[0].token_ids == (int(eager_logprobs(PROMPT)[-1].argmax()),)
    assert (runner.num_forward_passes, runner.num_forward_tokens) == (2, len(PROMPT))


def test_a_plan_executed_twice_gives_the_same():
    """A retried step writes the same slots again: nothing is kept but the cache."""
    runner = runner_of()
    first = batch_of(sequence(0, PROMPT[:7], 0, (0, 1), Logits.NONE, False))
    second = batch_of(sequence(0, PROMPT[7:], 7, (0, 1, 2), Logits.LAST, True))
    runner.execute(first)
    runner.execute(first)
    assert runner.execute(second) == runner.execute(second)


def test_a_row_that_reads_an_unwritten_slot_fails_alone():
    """NaN in the cache shows as an error of the one row whose plan is wrong."""
    result = runner_of().execute(
        batch_of(
            sequence(0, PROMPT[7:], 7, (0, 1, 2), Logits.LAST, True),
            sequence(1, PROMPT, 0, (4, 5, 6), Logits.LAST, True),
        )
    )
    assert result.results[0].error is not None and "non_finite_logits" in result.results[0].error
    assert result.results[1].token_ids == (int(eager_logprobs(PROMPT)[-1].argmax()),)


def test_a_scored_prompt_with_an_unwritten_slot_fails_alone():
    result = runner_of().execute(
        batch_of(
            sequence(0, PROMPT[7:9], 7, (0, 1, 2), Logits.ALL, False, SCORED, next_token=PROMPT[9]),
            sequence(1, PROMPT[:2], 0, (4,), Logits.ALL, False, SCORED, next_token=PROMPT[2]),
        )
    )
    assert result.results[0].error is not None and "non_finite_logits: prompt position 7" in result.results[0].error
    assert [entry.token_id for entry in result.results[1].prompt_logprobs] == PROMPT[1:3]


class ForgettingSampler(Sampler):
    """Remembers what it was told to forget."""

    def __init__(self):
        super().__init__(VOCAB_SIZE)
        self.forgotten = []

    def forget(self, request_ids):
        self.forgotten += request_ids


def test_the_sampler_forgets_the_requests_that_a_plan_releases():
    runner = runner_of()
    runner.sampler = ForgettingSampler()
    step = batch_of(sequence(0, PROMPT, 0, (4, 5, 6), Logits.LAST, True))
    runner.execute(step._replace(released=(RequestId(7), RequestId(8, 1))))
    runner.execute(step)
    assert runner.sampler.forgotten == [RequestId(7), RequestId(8, 1)]


def test_every_request_of_a_run_but_the_last_is_forgotten_in_it():
    """The scheduler tells of a request in the plan after the one that ended it."""
    runner = runner_of()
    runner.sampler = ForgettingSampler()
    scheduler = StallFreeScheduler(KVCacheManager(20, 4), 8, 2, standard_stop_rule)
    for row, length in enumerate((2, 5, 3, 9)):
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        scheduler.add_request(Request.from_prompt(RequestId(row), PROMPT[: row + 1], sampling))
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
    assert sorted(runner.sampler.forgotten) == [RequestId(0), RequestId(1), RequestId(2)]
