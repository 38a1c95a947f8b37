"""The scheduler's invariants over drawn workloads, with a shadow memory, failing steps and `check()` after every step."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contbatch_cli.cli.batch_run import collector_at_rest
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, SequenceResult
from contbatch_cli.core.forecast import OutputLengths
from contbatch_cli.core.kv_cache_manager import KVCacheManager, chain_hash
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.core.request import FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.windowed_cache import GroupedKVCacheManager, WindowedKVCacheManager, window_span
from tests.core.shadow import EOS, ShadowRunner, StepFailed, next_token, stop_rule, text_alone


class Optimist(OutputLengths):
    """An estimate that is far too low, so that rows have to be preempted."""

    def remaining(self, request: Request) -> int:
        return 1


class World:
    """A scheduler, its requests and a shadow runner; `step` plans, checks, runs and checks again."""

    def __init__(
        self,
        policy: str,
        kv: KVCacheManager | GroupedKVCacheManager,
        token_budget: int,
        max_batch_size: int,
        draft_tokens: int = 0,
    ) -> None:
        self.kv = kv
        self.scheduler = POLICIES[policy](kv, token_budget, max_batch_size, stop_rule, draft_tokens)
        self.is_stall_free = policy == "stall_free"
        self.requests: dict[RequestId, Request] = {}
        self.runner = ShadowRunner(kv, self.requests)
        self.finished: list[Request] = []
        self.num_preemptions = 0
        self.num_failures = 0

    def add(self, prompt: list[int], adapter: str | None = None, **sampling: object) -> None:
        params = SamplingParams(eos_token_ids=(EOS,), **sampling)  # type: ignore[arg-type]
        request = Request.from_prompt(RequestId(len(self.requests)), prompt, params, adapter)
        self.requests[request.request_id] = request
        if self.scheduler.fits(request):
            self.scheduler.add_request(request)
        else:
            self.finished.append(request)

    def step(self, fail_after: int | None = None) -> ScheduledBatch:
        decoding = [request.request_id for request in self.scheduler.running if request.is_prefill_done]
        oldest = self.scheduler.running[0].request_id if self.scheduler.running else None
        batch = self.scheduler.schedule_next_batch()
        self.kv.check()
        self._check_batch(batch, decoding, oldest)
        try:
            result = self.runner.execute(batch, fail_after)
        except StepFailed:
            self.num_failures += 1
            self.scheduler.abort(batch)
        else:
            self.num_preemptions += len(batch.preempted)
            self._finish(self.scheduler.update(batch, result))
        self.scheduler.check()
        return batch

    def _check_batch(self, batch: ScheduledBatch, decoding: list[RequestId], oldest: RequestId | None) -> None:
        ids = [sequence.request_id for sequence in batch.sequences]
        assert ids, "an empty batch while there is work"
        assert batch.num_tokens == sum(len(sequence.tokens) for sequence in batch.sequences) <= self.scheduler.token_budget
        assert len(set(ids)) == len(ids) <= self.scheduler.seats
        assert batch.num_drafts == sum(sequence.num_drafts for sequence in batch.sequences)
        assert not (batch.num_drafts and self.scheduler.waiting), "drafts while a request waits"
        assert not set(ids) & set(batch.preempted), "planned and preempted in one step"
        assert oldest not in batch.preempted, "the oldest was preempted"
        assert not (batch.admitted and batch.preempted), "admitted in a step that preempted"
        unfinished = [i for i, sequence in enumerate(batch.sequences) if sequence.end < self.requests[ids[i]].num_tokens]
        assert unfinished in ([], [len(ids) - 1]), "a part-done prefill that is not last"
        for pool in self.runner.pools:
            slots = [pool.slot(s, position) for s in batch.sequences for position in range(s.start, s.end)]
            assert len(set(slots)) == len(slots), "a slot is written twice"
        if self.is_stall_free:
            assert set(decoding) <= set(ids) | set(batch.preempted), "a decode was left out"

    def _finish(self, finished: list[Request]) -> None:
        for request in finished:
            assert request.output_ids == text_alone(request), f"{request.request_id} has another text"
            self.finished.append(request)

    def run(self, rng: random.Random | None = None, failure_rate: float = 0.0) -> int:
        """All iterations to the end; how many there were."""
        iterations = 0
        while self.scheduler.has_work():
            fails = rng is not None and rng.random() < failure_rate
            self.step(rng.randrange(self.scheduler.seats + 1) if rng and fails else None)
            iterations += 1
        return iterations

    def check_end(self) -> None:
        assert Counter(request.request_id for request in self.finished) == Counter(self.requests.keys())
        assert self.kv.num_free == self.kv.num_blocks and not self.kv.tables


def grouped_cache(num_blocks: int, block_size: int, window: int, token_budget: int, wanted: int) -> GroupedKVCacheManager:
    """Two pools, that of the windows with `wanted` blocks or the fewest with which every row that fits the other fits it too."""
    fewest = min(num_blocks, window_span(window, token_budget, block_size))
    windowed = WindowedKVCacheManager(max(fewest, wanted), block_size, window, token_budget)
    return GroupedKVCacheManager(KVCacheManager(num_blocks, block_size, prefix_caching=False), windowed)


def draw_world(seed: int, kind: str = "plain") -> tuple[World, random.Random]:
    """A workload with shared prefixes, equal rows, cache from tight to ample, and now and then a hash that always collides."""
    rng = random.Random(seed)
    hasher = (lambda *_: 0) if rng.random() < 0.1 else chain_hash
    block_size = rng.choice([1, 2, 3, 4, 16])
    num_blocks = max(rng.choice([rng.randint(20, 80), rng.randint(60, 800)]) // block_size, 2)
    caching, policy, token_budget = rng.random() < 0.8, rng.choice(list(POLICIES)), rng.randint(1, 40)
    window = rng.choice([1, 2, rng.randint(3, 30)])
    kv: KVCacheManager | GroupedKVCacheManager
    if kind == "plain":
        kv = KVCacheManager(num_blocks, block_size, caching, hasher)
    elif kind == "windowed":
        span = window_span(window, token_budget, block_size)
        kv = WindowedKVCacheManager(rng.randint(max(span // 2, 2), 2 * span), block_size, window, token_budget)
    else:
        kv = grouped_cache(num_blocks, block_size, window, token_budget, rng.randint(1, num_blocks))
    world = World(policy, kv, token_budget, rng.randint(1, 12), rng.choice([0, 8, 24]))
    if rng.random() < 0.5:
        world.scheduler.lengths = Optimist()
    stems = [[rng.randrange(VOCABULARY_OF_PROMPTS) for _ in range(rng.randint(1, 24))] for _ in range(3)]
    for _ in range(rng.randint(1, 24)):
        stem = rng.choice(stems)[: rng.randint(1, 24)]
        prompt = stem + [rng.randrange(VOCABULARY_OF_PROMPTS) for _ in range(rng.randint(0, 6))]
        scored = 0 if rng.random() < 0.1 else None
        world.add(
            prompt,
            rng.choice([None, None, "a", "bc"]),
            max_tokens=rng.randint(0, 20),
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=scored,
        )
    return world, rng


VOCABULARY_OF_PROMPTS = 2


def run_drawn(seed: int, kind: str = "plain") -> World:
    world, rng = draw_world(seed, kind)
    world.run(rng, failure_rate=0.1)
    world.check_end()
    return world


def test_drawn_workloads_keep_every_invariant() -> None:
    worlds = [run_drawn(seed) for seed in range(400)]
    assert sum(world.num_preemptions for world in worlds) > 50, "the workloads do not press on the cache"
    assert sum(world.num_failures for world in worlds) > 500
    assert sum(request.num_cached_tokens > 0 for world in worlds for request in world.finished) > 200
    assert sum(world.runner.num_accepted for world in worlds) > 200, "hardly a draft was right"
    assert sum(world.runner.num_drafts - world.runner.num_accepted for world in worlds) > 200, "hardly a draft was wrong"


@pytest.mark.parametrize("kind", ["windowed", "grouped"])
def test_drawn_workloads_with_windows_keep_every_invariant(kind: str) -> None:
    worlds = [run_drawn(seed, kind) for seed in range(400 if kind == "windowed" else 200)]
    assert sum(world.num_preemptions for world in worlds) > 15, "the workloads do not press on the cache"
    assert sum(world.num_failures for world in worlds) > 300
    ran = [request for world in worlds for request in world.finished if request.output_ids]
    assert len(ran) > 1_000
    if kind == "windowed":
        longest = max(request.max_num_tokens / world.kv.num_blocks / world.kv.block_size for world in worlds for request in ran)
        assert longest > 2, "no row was longer than the cache"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("plain", 10_000), ("windowed", 2_000), ("grouped", 2_000)])
def test_thousands_of_drawn_workloads_keep_every_invariant(kind: str, count: int) -> None:
    for seed in range(1_000, 1_000 + count):
        run_drawn(seed, kind)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive at any time, steps succeed or fail at any point."""

    world: World

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        token_budget=st.integers(1, 16),
        seats=st.integers(1, 8),
        window=st.none() | st.integers(1, 8),
        draft_tokens=st.sampled_from([0, 8]),
    )
    def start(
        self,
        policy: str,
        num_blocks: int,
        block_size: int,
        caching: bool,
        token_budget: int,
        seats: int,
        window: int | None,
        draft_tokens: int,
    ) -> None:
        kv: KVCacheManager | GroupedKVCacheManager = KVCacheManager(num_blocks, block_size, caching)
        if window is not None:
            kv = grouped_cache(num_blocks, block_size, window, token_budget, 1)
        self.world = World(policy, kv, token_budget, seats, draft_tokens)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),
        adapter=st.sampled_from([None, "a"]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, adapter: str | None, ignore_eos: bool) -> None:
        self.world.add(prompt, adapter, max_tokens=max_tokens, ignore_eos=ignore_eos)

    @precondition(lambda self: self.world.scheduler.has_work())
    @rule(fail_after=st.none() | st.integers(0, 8))
    def step(self, fail_after: int | None) -> None:
        self.world.step(fail_after)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.check_end()


SchedulerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def ample_world(policy: str = "stall_free", token_budget: int = 8, seats: int = 4, num_blocks: int = 1000) -> World:
    return World(policy, KVCacheManager(num_blocks, 4), token_budget, seats)


def test_decodes_come_first_then_the_part_done_prefill_then_new_requests() -> None:
    world = ample_world(token_budget=8, seats=4)
    world.add([1], max_tokens=10, ignore_eos=True)
    world.step()
    world.add([0] * 12, max_tokens=4, ignore_eos=True)
    world.add([1, 0, 1], max_tokens=4, ignore_eos=True)
    first = world.step()
    assert [(s.request_id.row, s.start, len(s.tokens)) for s in first.sequences] == [(0, 1, 1), (1, 0, 7)]
    assert [s.samples for s in first.sequences] == [True, False]
    second = world.step()
    assert [(s.request_id.row, s.start, len(s.tokens)) for s in second.sequences] == [(0, 2, 1), (1, 7, 5), (2, 0, 2)]
    third = world.step()
    assert [(s.request_id.row, s.start, len(s.tokens)) for s in third.sequences] == [(0, 3, 1), (1, 12, 1), (2, 2, 1)]


def test_running_decodes_move_in_every_iteration_beside_a_long_prompt() -> None:
    world = ample_world(token_budget=64, seats=8, num_blocks=4000)
    for _ in range(4):
        world.add([1], max_tokens=200, ignore_eos=True)
    world.step()
    world.add([0] * 4000, max_tokens=1)
    for _ in range(60):
        batch = world.step()
        assert [s.request_id.row for s in batch.sequences if s.is_decode] == [0, 1, 2, 3]
        assert batch.num_tokens == 64


def test_prefill_first_keeps_decodes_waiting_and_static_fills_no_seat_before_the_batch_is_through() -> None:
    prefill_first = ample_world("prefill_first")
    prefill_first.add([1], max_tokens=10, ignore_eos=True)
    prefill_first.step()
    prefill_first.add([0] * 12, max_tokens=4)
    assert [s.request_id.row for s in prefill_first.step().sequences] == [1]
    static = ample_world("static", seats=2)
    for max_tokens in (2, 6, 3):
        static.add([1, 0], max_tokens=max_tokens, ignore_eos=True)
    static.run()
    assert [request.request_id.row for request in static.finished] == [0, 1, 2]


def test_the_youngest_are_preempted_and_keep_their_place_in_line() -> None:
    world = World("stall_free", KVCacheManager(9, 1, prefix_caching=False), 9, 4)
    for row in range(3):
        world.add([row % 2, 1], max_tokens=6)
    world.scheduler.lengths = Optimist()
    for request in world.requests.values():
        object.__setattr__(request.sampling, "eos_token_ids", ())
    batch = world.step()
    assert len(batch.sequences) == 3
    while not batch.preempted:
        batch = world.step()
    assert [request_id.row for request_id in batch.preempted] == [2]
    assert world.scheduler.waiting[0].request_id.row == 2
    world.run()
    world.check_end()
    assert world.requests[RequestId(2)].num_recomputed_tokens > 0


def test_a_row_that_fails_leaves_the_others_alone_and_its_blocks_unknown() -> None:
    world = ample_world(token_budget=32)
    world.add([0] * 9, max_tokens=4)
    world.add([1] * 9, max_tokens=4)
    batch = world.scheduler.schedule_next_batch()
    good = next_token([1] * 9, None)
    finished = world.scheduler.update(batch, BatchResult([SequenceResult(error="non-finite"), SequenceResult((good,))]))
    assert [(request.request_id.row, request.finish and request.finish.reason) for request in finished] == [
        (0, FinishReason.ERROR)
    ]
    assert world.kv.lookup([0] * 9).block_ids == ()
    assert len(world.kv.lookup([1] * 9).block_ids) == 2
    world.scheduler.check()


def test_rows_that_start_together_compute_their_common_prefix_once() -> None:
    world = ample_world(token_budget=4096, seats=32)
    prefix = [random.Random(0).randrange(2) for _ in range(256)]
    for row in range(32):
        world.add([*prefix, *(int(bit) for bit in f"{row:032b}")], max_tokens=1)
    batch = world.step()
    assert len(batch.sequences) == 32
    assert batch.num_tokens <= 256 + 32 * 33


def test_a_scored_row_computes_its_whole_prompt_though_another_holds_it() -> None:
    world = ample_world(token_budget=64)
    world.add([0] * 20, max_tokens=3)
    world.step()
    world.add([0] * 20, max_tokens=0, prompt_logprobs=0)
    batch = world.step()
    assert batch.sequences[-1].start == 0 and len(batch.sequences[-1].tokens) == 20
    world.run()
    scored = world.requests[RequestId(1)]
    assert scored.finish is not None and scored.finish.reason is FinishReason.LENGTH and not scored.output_ids


def _median_iteration_s(num_running: int, num_rows: int, num_iterations: int) -> float:
    """Scheduler time of an iteration, schedule and update, with `num_running` decodes."""
    scheduler = StallFreeScheduler(KVCacheManager(num_running * 40, 16), max(2048, num_running), num_running, stop_rule)
    for row in range(num_rows):
        prompt = [row, *range(119)]
        scheduler.add_request(Request.from_prompt(RequestId(row), prompt, SamplingParams(max_tokens=300, eos_token_ids=(-1,))))
    times = []
    for _ in range(num_iterations):
        start = time.perf_counter()
        batch = scheduler.schedule_next_batch()
        planned = time.perf_counter()
        result = BatchResult([SequenceResult((3,)) if sequence.samples else SequenceResult() for sequence in batch.sequences])
        executed = time.perf_counter()
        scheduler.update(batch, result)
        times.append(planned - start + time.perf_counter() - executed)
    return statistics.median(times[num_iterations // 2 :])


@pytest.mark.slow
def test_scheduling_cost_is_small_and_linear() -> None:
    """Bounds: 0.5 ms with 32 of 1,000 requests running, 6 ms with 1,024, and no more than 1.3 times as much per request.

    As a job runs it, with the collector at rest. In rounds, since the host may be slow for some seconds: the best times must be
    small, the middle round linear.
    """
    few_s, many_s, growth = [], [], []
    for _ in range(7):
        with collector_at_rest():
            few, some, many = (_median_iteration_s(*sizes, 200) for sizes in ((32, 1000), (128, 128), (1024, 1024)))
        few_s.append(few)
        many_s.append(many)
        growth.append(many / 1024 / (some / 128))
        print(f"scheduling: {few * 1e3:.3f} ms at 32, {some * 1e3:.3f} ms at 128, {many * 1e3:.3f} ms at 1,024 running")
    assert min(few_s) < 0.5e-3
    assert min(many_s) < 6e-3
    assert statistics.median(growth) <= 1.3, growth
