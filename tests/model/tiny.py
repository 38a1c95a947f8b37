"""Tiny random models, and rows run through our own scheduler and runner."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig
from transformers import logging as transformers_logging

from contbatch_cli.core.batch import BatchResult, ScheduledBatch
from contbatch_cli.core.kv_cache_manager import KVCacheManager, PrefixHit
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.core.windowed_cache import GroupedKVCacheManager, WindowedKVCacheManager, window_span
from contbatch_cli.model.attention import ATTENTION_NAME, backend_named
from contbatch_cli.model.kv_cache import KVCache, LayerShape, WindowPool
from contbatch_cli.model.lora import Adapters
from contbatch_cli.model.probe import layers_of
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler
from contbatch_cli.sizing import LayerWindows

CPU = torch.device("cpu")
VOCAB_SIZE = 96
transformers_logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tests of tiny models, where a second thread has nothing to do but wait."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def llama_config() -> LlamaConfig:
    """Two layers of Llama: rotary positions, two query heads a kv head."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )


def gpt2_config() -> GPT2Config:
    """Two layers of GPT-2: learned positions, which show a shift that rotary ones hide."""
    return GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=4096)


@dataclass(frozen=True)
class Setting:
    """How a job is run: none of it may show in the tokens."""

    token_budget: int
    max_batch_size: int
    block_size: int
    num_blocks: int
    prefix_caching: bool = True
    backend: str = "cpu"
    is_rash: bool = False


class RashScheduler(StallFreeScheduler):
    """Starts a request as soon as its known tokens fit, without a look ahead, so that running ones lose their blocks often."""

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        return self.kv.has_room(len(request.token_ids), hit)


@dataclass
class Ran:
    """What a job gave, and its plans."""

    outputs: dict[int, list[int]]
    requests: dict[int, Request]
    runner: ModelRunner
    plans: list[ScheduledBatch] = field(default_factory=list)
    results: list[BatchResult] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())


def random_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """A model with weights large enough for attention, position and window to decide tokens."""
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.4 * parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def shapes_of(model: Any) -> list[LayerShape]:
    return [call.shape for call in layers_of(model, CPU)]


def draw_setting(rng: random.Random, longest: int, **fixed: Any) -> Setting:
    """A setting under which a row of `longest` tokens just fits, or a few more do: rows are preempted in half of them."""
    block_size = fixed.get("block_size") or rng.choice([1, 3, 16])
    fewest = -(-longest // block_size)
    drawn = {
        "token_budget": rng.choice([rng.randint(1, 8), rng.randint(8, 40), 64, 300]),
        "max_batch_size": rng.choice([1, 3, 8, 8, 32, 32]),
        "block_size": block_size,
        "num_blocks": fewest + rng.choice([0, 0, rng.randint(0, fewest), 4 * fewest]),
        "prefix_caching": rng.random() < 0.5,
        "is_rash": rng.random() < 0.7,
    }
    return Setting(**{**drawn, **fixed})


def run_rows(
    model: Any,
    shapes: Sequence[LayerShape],
    rows: Sequence[tuple[list[int], SamplingParams]],
    setting: Setting,
    owners: Sequence[str | None] | None = None,
    adapters: Adapters | None = None,
    windows: LayerWindows | None = None,
) -> Ran:
    """Every row to its end, the cache full of NaN at the start; scheduler and block manager check themselves after each
    step. `owners` are the rows' adapters; with `windows` these layers give back what they cannot read."""
    manager, num_blocks, pool = managers(setting, windows)
    cache = KVCache(shapes, num_blocks, setting.block_size, torch.float32, CPU, pool)
    cache.fill(float("nan"))
    vocab_size = model.get_input_embeddings().num_embeddings
    runner = ModelRunner(model, cache, backend_named(setting.backend), Sampler(vocab_size), CPU, adapters)
    policy = RashScheduler if setting.is_rash else StallFreeScheduler
    scheduler = policy(manager, setting.token_budget, setting.max_batch_size, standard_stop_rule)
    names = owners or [None] * len(rows)
    requests = {i: Request.from_prompt(RequestId(i), ids, params, names[i]) for i, (ids, params) in enumerate(rows)}
    for request in requests.values():
        scheduler.add_request(request)
    ran = Ran({}, requests, runner)
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        result = runner.execute(batch)
        scheduler.update(batch, result)
        scheduler.check()
        ran.plans.append(batch)
        ran.results.append(result)
    ran.outputs.update({i: request.output_ids for i, request in requests.items()})
    assert manager.blocks_used == 0
    return ran


def managers(
    setting: Setting, windows: LayerWindows | None
) -> tuple[KVCacheManager | GroupedKVCacheManager, int, WindowPool | None]:
    """The bookkeeping, its blocks, and the pool of the layers with a window: hardly more than one row needs at its longest."""
    num_blocks, size = setting.num_blocks, setting.block_size
    if windows is None:
        return KVCacheManager(num_blocks, size, setting.prefix_caching), num_blocks, None
    few = min(num_blocks, window_span(windows.window, setting.token_budget, size) + num_blocks % 4)
    own = WindowedKVCacheManager(few, size, windows.window, setting.token_budget)
    if windows.are_all:
        return own, few, None
    full = KVCacheManager(num_blocks, size, prefix_caching=False)
    return GroupedKVCacheManager(full, own), num_blocks, WindowPool(windows.layers, few)


def windows_of(model: Any) -> LayerWindows | None:
    """The layers of a tiny model that see a window."""
    calls = layers_of(model, CPU)
    windows = {i: w for i, call in enumerate(calls) if (w := call.variant.sliding_window) is not None}
    return LayerWindows(max(windows.values()), frozenset(windows), len(calls)) if windows else None


def draw_rows(
    rng: random.Random, num_rows: int, longest_prompt: int, max_tokens: int
) -> list[tuple[list[int], SamplingParams]]:
    """Greedy rows of many lengths; some share a prefix, so that the prefix cache has something to find."""
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(longest_prompt // 2)]
    rows = []
    for _ in range(num_rows):
        start = shared[: rng.randint(1, len(shared))] if rng.random() < 0.4 else []
        longest = rng.choice([longest_prompt // 4, longest_prompt])
        rest = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max(1, longest - len(start))))]
        rows.append((start + rest, SamplingParams(max_tokens=rng.choice([1, rng.randint(1, max_tokens), max_tokens]))))
    return rows
