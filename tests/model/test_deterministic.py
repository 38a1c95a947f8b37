"""`engine.deterministic`: bitwise the same logits for a row under every setting, on tiny models and (slow) the default one."""

from __future__ import annotations

import functools
import hashlib
import random
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig

from contbatch_cli import build
from contbatch_cli.config import ModelConfig
from contbatch_cli.config_files import load_config
from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.data import model_store
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.errors import UsageError
from contbatch_cli.model import cpu_kernels, deterministic
from contbatch_cli.model.attention import ATTENTION_NAME, cpu, cpu_native
from contbatch_cli.model.attention import deterministic as backend
from contbatch_cli.model.deterministic import (
    BASE_ROWS,
    OTHER_ROWS,
    cut,
    make_deterministic,
    num_differing_rows,
    rows_are_independent,
    rows_for,
    thread_candidates,
)
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.loading import load_model
from contbatch_cli.model.packing import pack_model
from contbatch_cli.model.probe import layers_of
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import write_model, write_rows

needs_kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="no C compiler, or no OpenMP runtime")
CPU = torch.device("cpu")
SMALL = {"vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=52),
    "one_kv_head": LlamaConfig(**SMALL | {"num_key_value_heads": 1, "num_attention_heads": 1}, intermediate_size=50),
    "gpt2": GPT2Config(vocab_size=97, n_embd=36, n_layer=2, n_head=3, n_positions=256),
    "window": MistralConfig(**SMALL, intermediate_size=52, sliding_window=9, head_dim=16),
    "softcap": Gemma2Config(**SMALL, intermediate_size=52, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
}


def tiny(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=ATTENTION_NAME, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


class Recorder:
    """A sampler that takes the likeliest token and keeps a hash of each row's logits, by row and position."""

    def __init__(self):
        self.hashes = {}

    def sample(self, logits, sequences):
        results = []
        for row, sequence in zip(logits, sequences, strict=True):
            digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()
            place = (sequence.request_id.row, sequence.end)
            assert self.hashes.setdefault(place, digest) == digest, f"row and position {place} differ when computed again"
            results.append(SequenceResult((int(row.argmax()),)))
        return results

    def forget(self, request_ids):
        """Nothing is kept by request."""


class Setting(NamedTuple):
    budget: int
    seats: int
    block_size: int
    spare: float
    """Cache beyond the longest row's need, as a share of what all rows need: with little of it, rows are preempted."""
    prefix_caching: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Setting:
        budget, seats, block_size = rng.choice([3, 33, 64, 300]), rng.choice([1, 3, 17, 40]), rng.choice([1, 5, 16])
        return cls(budget, seats, block_size, rng.choice([0.05, 0.2, 1.0]), rng.random() < 0.6)


ALONE = Setting(1000, 1, 16, 1.0, False)


def run_job(model, layers, prompts, num_new, setting, attention=backend, dtype=torch.float32):
    """The project's own scheduler over the runner: a hash of each row's logits at each position, and the number of preemptions."""
    requests = [
        Request.from_prompt(RequestId(i), prompt, SamplingParams(max_tokens=num_new, ignore_eos=True)) for i, prompt in prompts
    ]
    needs = [-(-request.max_num_tokens // setting.block_size) for request in requests]
    num_blocks = max(needs) + int(setting.spare * sum(needs))
    kv = KVCacheManager(num_blocks, setting.block_size, setting.prefix_caching)
    scheduler = StallFreeScheduler(kv, setting.budget, setting.seats, standard_stop_rule)
    # No reserve for growth, so that a small cache does run full.
    kv.expected_peak = lambda _newcomer, _remaining: 0.0
    cache = KVCache(layers, num_blocks, setting.block_size, dtype, CPU)
    cache.fill(float("nan"))
    recorder = Recorder()
    runner = ModelRunner(model, cache, attention, recorder, CPU)
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
    return recorder.hashes, sum(request.num_preemptions for request in requests)


def drawn_prompts(seed, count, vocab, longest=60):
    """Rows 1, 2, 4, 5, ... begin with the same 24 tokens."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab) for _ in range(24)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [(i, prefix + prompt if i % 3 else prompt) for i, prompt in enumerate(prompts)]


def compare_settings(tiled, layers, prompts, num_new, settings, attention=backend):
    """Each row alone against all rows together under each setting; how many preemptions there were in all."""
    alone = {}
    for prompt in prompts:
        alone |= run_job(tiled, layers, [prompt], num_new, ALONE, attention)[0]
    assert len(alone) == num_new * len(prompts)
    preemptions = 0
    for setting in settings:
        together, count = run_job(tiled, layers, prompts, num_new, setting, attention)
        assert together.keys() == alone.keys()
        differing = [place for place in alone if together[place] != alone[place]]
        assert not differing, f"{len(differing)} of {len(alone)} differ: {setting}"
        preemptions += count
    return preemptions


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_are_bitwise_the_same(name):
    model = tiny(name)
    layers = [call.shape for call in layers_of(model, CPU)]
    tiled, _ = make_deterministic(model, layers, torch.float32)
    settings = [Setting.drawn(random.Random(seed)) for seed in range(6)]
    assert compare_settings(tiled, layers, drawn_prompts(0, 12, 97), 6, settings) > 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "one_kv_head", "window"])
def test_logits_of_a_model_that_runs_as_kernels_are_bitwise_the_same(name, dtype):
    """Weights of either length, on one thread and on two."""
    model = tiny(name).to(dtype).float()
    layers = [call.shape for call in layers_of(model, CPU)]
    assert pack_model(model, "cpu_native").is_whole
    settings = [Setting.drawn(random.Random(seed)) for seed in range(6)]
    assert compare_settings(model, layers, drawn_prompts(0, 12, 97), 6, settings, cpu_native) > 0


def test_without_it_they_are_not():
    """The same job on the plain model: were it equal too, the test above would show nothing."""
    model = tiny("llama")
    layers = [call.shape for call in layers_of(model, CPU)]
    settings = (Setting(1000, 12, 16, 1.0, False), Setting(12, 12, 16, 1.0, False))
    runs = [run_job(model, layers, drawn_prompts(0, 12, 97), 6, setting, attention=cpu)[0] for setting in settings]
    assert runs[0] != runs[1]


def test_the_tiles_compute_the_same_model():
    """Within rounding, the logits of the plain model, prompt positions included."""
    model = tiny("llama")
    layers = [call.shape for call in layers_of(model, CPU)]
    tiled, _ = make_deterministic(model, layers, torch.float32)
    ids = [random.Random(0).randrange(97) for _ in range(75)]
    collected = []
    for network, attention in ((model, cpu), (tiled, backend)):
        cache = KVCache(layers, 5, 16, torch.float32, CPU)
        runner = ModelRunner(network, cache, attention, Recorder(), CPU)
        sequence = ScheduledSequence(RequestId(0), tuple(ids), 0, (3, 1, 4, 0, 2), 75, GREEDY, True, Logits.ALL)
        runner._add_prompt_logprobs = lambda _sequences, _flat, logits, _results: collected.append(logits)
        runner.execute(ScheduledBatch((sequence,), 75))
    torch.testing.assert_close(collected[1], collected[0], atol=1e-4, rtol=1e-4)
    assert collected[0].shape == (75, 97)


def test_the_probe_finds_a_model_whose_rows_depend_on_their_place():
    model = tiny("llama")
    layers = [call.shape for call in layers_of(model, CPU)]
    assert num_differing_rows(model, layers, torch.float32) == 0
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda states: plain(states) * (1 + 1e-6 * torch.arange(BASE_ROWS).view(1, -1, 1))
    assert num_differing_rows(model, layers, torch.float32) > 0
    norm.forward = lambda states: plain(states) + 1e-6 * states.mean()
    assert num_differing_rows(model, layers, torch.float32) > 0
    threads = torch.get_num_threads()
    with pytest.raises(UsageError, match="of 32 equal rows"):
        make_deterministic(model, layers, torch.float32)
    assert torch.get_num_threads() == threads


def test_a_gpu_is_refused():
    """Nobody has run it there."""
    model = tiny("llama").to("meta")
    with pytest.raises(UsageError, match="needs model.device: cpu; it has not been tried on meta"):
        make_deterministic(model, [], torch.float32)


def test_experts_are_refused():
    config = MixtralConfig(**SMALL, intermediate_size=32, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    with pytest.raises(UsageError, match="mixtral routes tokens to 4 experts"):
        make_deterministic(model, [], torch.float32)


@pytest.mark.parametrize(("name", "runs_as_kernels"), [("llama", True), ("gpt2", False)])
def test_a_job_runs_as_kernels_or_in_tiles(name, runs_as_kernels, tmp_path):
    """As kernels where all layers do and the trial finds nothing; else in tiles, with the weights read anew."""
    directory = write_model(tmp_path / "model")
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict() | {"vocab_size": 259, "eos_token_id": 256})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    write_rows(tmp_path / "rows.jsonl", [{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}])

    def described() -> str:
        effective = load_config(None, [f"model.name={directory}", "model.device=cpu", "engine.deterministic=true"])
        inputs = build.Inputs((str(tmp_path / "rows.jsonl"),), InputOptions())
        text_model, memory = build.open_model(effective.config.model), DeviceMemory("cpu", 1 << 30)
        job = build.prepare_job(effective, inputs, text_model, memory, lambda fault: pytest.fail(fault.message))
        executor = build.build_executor(job)
        reports = build.build_engine(job, executor.runner, standard_stop_rule, lambda: 0.0).run()
        assert sum(len(report.finished) for report in reports) == 1
        return executor.description

    has_kernels = cpu_kernels.library() is not None
    assert ("layers native" in described()) is (runs_as_kernels and has_kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deterministic, "rows_are_independent", lambda loaded, token_budget: False)
        assert "deterministic: tiles of" in described()


@needs_kernels
def test_the_trial_finds_rows_that_depend_on_each_other(tmp_path):
    directory = write_model(tmp_path / "model")
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).save_pretrained(directory)
    loaded = load_model(directory, ModelConfig(device="cpu"))
    pack_model(loaded.model, "cpu_native")
    assert rows_are_independent(loaded, 512)
    norm = loaded.model.model.norm
    plain = norm.forward
    norm.forward = lambda states: plain(states) * (1 + 1e-6 * (states.shape[1] == 17))
    assert not rows_are_independent(loaded, 512) and rows_are_independent(loaded, 16)
    norm.forward = lambda states: plain(states) + 1e-3 * states.mean()
    assert not rows_are_independent(loaded, 512)


def test_a_size_that_disagrees_is_not_used():
    """A model whose norm rounds otherwise in tiles of 64 and more: rows agree within each size, and not across."""
    model = tiny("llama")
    layers = [call.shape for call in layers_of(model, CPU)]
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda states: plain(states) * (1 + 1e-6 * (states.shape[1] >= 64))
    assert set(make_deterministic(model, layers, torch.float32)[0].sizes) <= {16, 32, 48}
    norm.forward = plain
    assert BASE_ROWS in make_deterministic(model, layers, torch.float32)[0].sizes
    assert max(make_deterministic(model, layers, torch.float32, token_budget=50)[0].sizes) <= 50


def test_a_step_is_cut_into_the_largest_tiles_that_it_fills():
    assert cut(300, (16, 32, 256)) == [(0, 256, 256), (256, 288, 32), (288, 300, 16)]
    assert cut(5, (32,)) == [(0, 5, 32)]
    rng = random.Random(0)
    for _ in range(200):
        sizes = sorted({BASE_ROWS, *rng.sample(OTHER_ROWS, rng.randint(0, 5))})
        num_tokens = rng.randint(1, 700)
        tiles = cut(num_tokens, sizes)
        assert [tile.first for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])] and tiles[-1].stop == num_tokens
        assert all(tile.rows in sizes and tile.stop - tile.first <= tile.rows for tile in tiles)
        assert all(tile.stop - tile.first == tile.rows for tile in tiles[:-1])
        assert all(rows_for(count, sizes) >= count for count in range(1, tiles[0].rows + 1))


def test_threads_fall_back_to_powers_of_two():
    assert thread_candidates(1) == [1]
    assert thread_candidates(2) == [2, 1]
    assert thread_candidates(12) == [12, 8, 4, 2, 1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("way", [pytest.param("kernels", marks=needs_kernels), "tiles"])
def test_the_default_model_is_bitwise_the_same_under_ten_settings(way, request):
    """At one thread; takes several minutes."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    directory = model_store.resolve("smollm2-135m-instruct", None)
    loaded = load_model(directory, ModelConfig(device="cpu", dtype="float32"))
    if way == "tiles":
        model, attention = make_deterministic(loaded.model, loaded.layers, loaded.dtype)[0], backend
    else:
        assert pack_model(loaded.model, "cpu_native").is_whole
        model, attention = loaded.model, cpu_native
    settings = [
        Setting(33, 40, 16, 1.0, True),
        Setting(512, 64, 16, 1.0, False),
        *(
            Setting.drawn(random.Random(i))._replace(budget=budget)
            for i, budget in enumerate((17, 32, 48, 64, 100, 128, 256, 300))
        ),
    ]
    prompts = drawn_prompts(7, 64, loaded.vocab_size, longest=12)
    assert compare_settings(model, loaded.layers, prompts, 4, settings, attention) > 0
