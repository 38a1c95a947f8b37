"""Neither the policy nor the order of the job shows in the tokens: a tiny model through queue, scheduler and engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from contbatch_cli.core.job_order import ORDERS, JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.engine import InferenceEngine
from contbatch_cli.model.attention import backend_named
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler
from tests.model.tiny import CPU, VOCAB_SIZE, draw_rows, llama_config, one_thread, random_model, shapes_of

__all__ = ["one_thread"]


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
