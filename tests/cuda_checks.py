"""Checks of the CUDA engine as plain functions, for `pytest -m cuda` and for the benchmark, which runs where pytest is not.

Each raises AssertionError, or returns a line about what it found. On a CPU they run through Triton's interpreter. Models are made here
from a config with random weights; rows are token ids; nothing is fetched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import Request, RequestId, SamplingParams, TokenLogprob
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.model.attention import ATTENTION_NAME, AttentionVariant, backend_named
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.memory import cache_bytes, free_bytes, full_step, is_out_of_memory, num_step_blocks, step_peak
from contbatch_cli.model.probe import layers_of
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler
from contbatch_cli.model.splitting import SplittingRunner

TINY = Qwen3Config(
    vocab_size=257,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TIE = 1e-4


class Row(NamedTuple):
    prompt_ids: list[int]
    num_new: int


class Built(NamedTuple):
    model: Any
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def random(cls, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Built:
        """A model with random weights, made on its device."""
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return cls(model, tuple(call.shape for call in layers_of(model, device)), dtype, device)

    def runner(self, num_blocks: int, block_size: int, attention: str = "cuda") -> ModelRunner:
        """A runner whose cache is full of NaN."""
        cache = KVCache(self.layers, num_blocks, block_size, self.dtype, self.device)
        cache.fill(float("nan"))
        sampler = Sampler(self.model.config.vocab_size, self.device)
        return ModelRunner(self.model, cache, backend_named(attention), sampler, self.device)


class Recorded:
    """A runner that calls `watch(batch)` after each step."""

    def __init__(self, runner: Any, watch: Callable[[ScheduledBatch], None]) -> None:
        self.runner, self.watch = runner, watch

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        result: BatchResult = self.runner.execute(batch)
        self.watch(batch)
        return result


def drawn_rows(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    return [
        Row([rng.randrange(vocab_size) for _ in range(rng.randint(shortest, longest))], rng.randint(shortest, longest))
        for _ in range(count)
    ]


def blocks_for(rows: Sequence[Row], block_size: int) -> int:
    return sum(-(-(len(row.prompt_ids) + row.num_new) // block_size) for row in rows)


def run_job(runner: Any, rows: Sequence[Row], budget: int, seats: int, num_blocks: int, block_size: int) -> list[list[int]]:
    """The project's scheduler over `runner`: each row's greedy output."""
    scheduler = StallFreeScheduler(KVCacheManager(num_blocks, block_size), budget, seats, standard_stop_rule)
    requests = [
        Request.from_prompt(RequestId(i), row.prompt_ids, SamplingParams(max_tokens=row.num_new, ignore_eos=True))
        for i, row in enumerate(rows)
    ]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
    return [request.output_ids for request in requests]


def check_kernels(device: torch.device, sizes: Sequence[int] = (64, 80, 128, 256)) -> str:
    """Each type and head size, with and without window, soft cap and sinks, against the oracle."""
    from contbatch_cli.model.attention import cuda, reference

    worst = 0.0
    for dtype in TOLERANCE:
        for size in sizes:
            shape = LayerShape(8, 2, size, size)
            probe = cuda.Probe.make(shape, dtype, device, 16)
            slots = probe.plan.slots.long()
            key, value = (tensor.flatten(0, 1)[slots] for tensor in probe.layer)
            oracle = reference.prepare(probe.plan.flat, device)
            for window, softcap, sinks in ((None, None, None), (17, None, None), (None, 5.0, torch.randn(8, device=device))):
                variant = AttentionVariant(size**-0.5, window, softcap, sinks)
                expected = reference.attend(probe.query, key, value, probe.layer, oracle, variant)
                output = cuda.attend(probe.query, key, value, probe.layer, probe.plan, variant)
                difference = float((output.float() - expected.float()).abs().max())
                assert difference <= TOLERANCE[dtype], f"{dtype}, head size {size}, {variant}: off by {difference:.2g}"
                worst = max(worst, difference / TOLERANCE[dtype])
    return f"{len(TOLERANCE) * len(sizes) * 3} kernel cases agree with the oracle, the worst at {worst:.0%} of its tolerance"


@torch.inference_mode()
def check_golden_tokens(device: torch.device, count: int = 24, longest: int = 60) -> str:
    """float32: the engine's tokens in mixed batches against the model's own eager attention, each row alone."""
    built = Built.random(TINY, torch.float32, device)
    rows = drawn_rows(count, 1, longest, TINY.vocab_size)
    num_blocks = blocks_for(rows, 16)
    answers = {budget: run_job(built.runner(num_blocks, 16), rows, budget, 16, num_blocks, 16) for budget in (64, 4096)}
    built.model.set_attn_implementation("eager")
    ties = 0
    for outputs in answers.values():
        ties += sum(_is_tie(built.model, row, output, device) for row, output in zip(rows, outputs, strict=True))
    assert ties <= 2 * count // 50, f"{ties} of {2 * count} rows differ at a near tie"
    return f"{2 * count} rows equal to eager attention by tokens, {ties} of them up to a near tie"


def _is_tie(model: Any, row: Row, output: Sequence[int], device: torch.device) -> bool:
    """False for a row that equals the oracle's, which is fed the row's own tokens; True where it leaves it at a near tie."""
    ids = torch.tensor([[*row.prompt_ids, *output[:-1]]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 :]
    assert len(output) == row.num_new == logits.shape[0]
    for position, token in enumerate(output):
        gap = float(logits[position].max() - logits[position, token])
        if gap > 0:
            assert gap < TIE, f"token {position} of a row of {len(row.prompt_ids)} prompt tokens is {gap:.2g} below the best"
            return True
    return False


class _Keeping:
    """A sampler that takes the likeliest tokens and keeps the logits [S, V] of each step."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> list[SequenceResult]:
        self.logits.append(logits.clone())
        return [SequenceResult((token,)) for token in logits.argmax(-1).tolist()]

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing is kept by request."""

    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: Sequence[int], num_top: int, start: int = 0
    ) -> Sequence[TokenLogprob]:
        raise AssertionError("no row asks for them")


def check_half_precision(device: torch.device, dtype: torch.dtype = torch.bfloat16, count: int = 32) -> str:
    """Each row's first logits with the kernels against those with the oracle's attention, in the same type."""
    built = Built.random(TINY, dtype, device)
    rows = [row._replace(num_new=1) for row in drawn_rows(count, 1, 60, TINY.vocab_size)]
    num_blocks = blocks_for(rows, 16)
    found: list[torch.Tensor] = []
    for attention in ("cuda", "reference"):
        runner = built.runner(num_blocks, 16, attention)
        runner.sampler = keeping = _Keeping()
        run_job(runner, rows, 4096, count, num_blocks, 16)
        found.append(torch.cat(keeping.logits))
    ours, oracle = found
    difference = float((ours - oracle).abs().max() / oracle.abs().max())
    assert difference < 0.05, f"{dtype}: logits are off by {difference:.1%} of the largest"
    same = int((ours.argmax(-1) == oracle.argmax(-1)).sum())
    assert same >= 0.75 * count, f"{dtype}: only {same} of {count} first tokens agree"
    return f"{dtype}: logits within {difference:.2%} of the largest, {same} of {count} first tokens agree with the oracle"


def check_memory(device: torch.device) -> str:
    """The peak of a full step is found, and a cache sized by it leaves room to run that step."""
    built = Built.random(TINY, torch.float32, device)
    step = full_step(2048, 64, 16)
    num_blocks = num_step_blocks(step)
    runner = built.runner(num_blocks, 16)
    peak = step_peak(runner, step, device)
    assert peak > 64 * TINY.vocab_size * 4, f"a step of {step.num_tokens} tokens cannot peak at {peak:,} bytes"
    memory = cache_bytes(free_bytes(device), peak, "cuda")
    return f"peak of a step of {step.num_tokens:,} tokens {peak:,} bytes; cache {memory.reason}"


def check_out_of_memory(device: torch.device) -> str:
    """With the process held to too little memory for the step, it runs in pieces and gives the same tokens."""
    built = Built.random(TINY, torch.float32, device)
    rows = [Row([7 * i % 251 for i in range(700 + j)], 2) for j in range(24)]
    num_blocks = blocks_for(rows, 16)
    expected = run_job(built.runner(num_blocks, 16), rows, 16384, 24, num_blocks, 16)
    runner = SplittingRunner(built.runner(num_blocks, 16), is_out_of_memory, torch.cuda.empty_cache)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 24 * 2**20) / total, device)
    try:
        outputs = run_job(runner, rows, 16384, 24, num_blocks, 16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert runner.num_splits > 0, "the step fitted after all: nothing was tried"
    assert outputs == expected, "tokens changed with the pieces"
    return f"{runner.num_splits} steps split for want of memory, the tokens unchanged"


def check_choice(device: torch.device) -> str:
    """Which kernels plain layers run on here."""
    from contbatch_cli.model.attention import cuda

    shapes = {size: LayerShape(16, 8, size, size) for size in (64, 128)}
    return ", ".join(f"head size {size}: {cuda.choice(shape, torch.bfloat16, device, 16)}" for size, shape in shapes.items())


CHECKS = (check_kernels, check_golden_tokens, check_half_precision, check_memory, check_out_of_memory, check_choice)
