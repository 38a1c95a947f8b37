"""Neither the policy nor the order of the job shows in the tokens: a tiny model through queue, scheduler and engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from contbatch_cli.core.batch import BatchResult, ScheduledBatch
from contbatch_cli.core.job_order import ORDERS, JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.engine import InferenceEngine, Runner
from contbatch_cli.model.attention import backend_named
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler
from contbatch_cli.model.splitting import SplittingRunner
from tests.model.tiny import CPU, VOCAB_SIZE, draw_rows, llama_config, one_thread, random_model, shapes_of

__all__ = ["one_thread"]


class Outcome(NamedTuple):
    texts: list[list[int]]
    num_steps: int
    num_accepted: int


class ShortOfMemory:
    """A runner that has room for a few tokens only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        if batch.num_tokens > 4 or batch.num_drafts:
            raise MemoryError("no room")
        return self._runner.execute(batch)


class ListSource:
    is_live = False

    def __init__(self, requests: list[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self.is_exhausted = False

    def next_request(self, wait: bool) -> Request | None:
        request = next(self._requests, None)
        self.is_exhausted = request is None
        return request


def test_policies_and_orders_do_not_show() -> None:
    model = random_model(llama_config())
    shapes = shapes_of(model)
    rng = random.Random(4)
    rows: list[tuple[list[int], SamplingParams]] = []
    for number, (ids, params) in enumerate(draw_rows(rng, 30, 24, 12)):
        rows.append((ids, replace(params, temperature=rng.choice([0.0, 1.0]), seed=number)))
    rows += rows[:5]

    def run(policy: str, order: str, num_blocks: int, caching: bool) -> list[list[int]]:
        requests = [Request.from_prompt(RequestId(row), ids, params) for row, (ids, params) in enumerate(rows)]
        queue = JobQueue(ListSource(requests), window=12)
        queue.set_order(order)
        cache = KVCache(shapes, num_blocks, 4, torch.float32, CPU)
        cache.fill(float("nan"))
        runner = ModelRunner(model, cache, backend_named("cpu"), Sampler(VOCAB_SIZE), CPU)
        scheduler = POLICIES[policy](KVCacheManager(num_blocks, 4, caching), 20, 6, standard_stop_rule)
        reports = list(InferenceEngine(scheduler, runner, queue, lambda: 0.0).run())
        assert sum(len(report.finished) + len(report.duplicates) for report in reports) == len(rows)
        return [request.output_ids for request in requests]

    wanted = run("stall_free", "input", 200, False)
    for policy, order, num_blocks, caching in itertools.product(POLICIES, ORDERS, (10, 60), (False, True)):
        assert run(policy, order, num_blocks, caching) == wanted, (policy, order, num_blocks, caching)


def test_drafts_do_not_show() -> None:
    model = random_model(llama_config())
    shapes = shapes_of(model)
    rng = random.Random(5)
    few = tuple((token, 100.0) for token in (5, 6, 7))
    rows = [
        ([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))], SamplingParams(max_tokens=length, logit_bias=few))
        for length in (1, 2, 40, 60, 80, 90, 100, 120)
    ]
    rows += [(ids, replace(params, logprobs=1)) for ids, params in rows[3:6]]
    rows.append(([1, 2], SamplingParams(max_tokens=30, temperature=1.0, logit_bias=few)))

    def run(
        draft_tokens: int, num_blocks: int, runner_class: Callable[[ModelRunner], Runner] = lambda runner: runner
    ) -> Outcome:
        requests = [Request.from_prompt(RequestId(row), ids, params) for row, (ids, params) in enumerate(rows)]
        queue = JobQueue(ListSource(requests), window=12, merges_duplicates=False)
        queue.set_order("input")
        cache = KVCache(shapes, num_blocks, 4, torch.float32, CPU)
        cache.fill(float("nan"))
        runner = ModelRunner(model, cache, backend_named("cpu"), Sampler(VOCAB_SIZE), CPU)
        kv = KVCacheManager(num_blocks, 4)
        scheduler = StallFreeScheduler(kv, 40, 12, standard_stop_rule, draft_tokens)
        reports = list(InferenceEngine(scheduler, runner_class(runner), queue, lambda: 0.0).run())
        assert kv.num_free == num_blocks
        accepted = sum(sum(report.accepted_drafts.values()) for report in reports)
        logprobs = [[one.token_id for one in request.logprobs] for request in requests[8:11]]
        assert logprobs == [request.output_ids for request in requests[8:11]]
        return Outcome([request.output_ids for request in requests], len(reports), accepted)

    plain = run(0, 400)
    assert plain.num_accepted == 0
    for draft_tokens, num_blocks in ((8, 400), (40, 400), (16, 60)):
        drafted = run(draft_tokens, num_blocks)
        assert drafted.texts == plain.texts, (draft_tokens, num_blocks)
        assert drafted.num_accepted > 50, "hardly a draft was right"
        assert num_blocks < 400 or drafted.num_steps < plain.num_steps
    short = run(16, 400, lambda runner: SplittingRunner(ShortOfMemory(runner), lambda error: isinstance(error, MemoryError)))
    assert short.texts == plain.texts and short.num_accepted == 0
