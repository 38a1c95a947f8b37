"""Windowed layers over a pool of blocks that is far smaller than the rows: every backend, packed and deterministic models too."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace

import pytest

from contbatch_cli import build
from contbatch_cli.config_files import load_config
from contbatch_cli.core.request import SamplingParams
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.core.windowed_cache import window_span
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.deterministic import TiledModel
from contbatch_cli.model.packing import pack_model
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import write_model
from tests.model.test_families import config_of
from tests.model.tiny import VOCAB_SIZE, Setting, managers, one_thread, random_model, run_rows, shapes_of, windows_of
from tests.oracle import Comparison, greedy_alone

__all__ = ["one_thread"]

FAMILIES = ["Mistral", "Gemma 2", "GPT-OSS", "Qwen2"]
BACKENDS = ["reference", "cpu", "cpu_native"]
SETTINGS = [
    Setting(token_budget=3, max_batch_size=3, block_size=1, num_blocks=70, is_rash=True),
    Setting(token_budget=7, max_batch_size=7, block_size=3, num_blocks=30, is_rash=True),
    Setting(token_budget=16, max_batch_size=4, block_size=4, num_blocks=40),
]


def long_rows(seed):
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 11, 40]))], SamplingParams(max_tokens=rng.choice([4, 30])))
        for _ in range(8)
    ]


def oracles_of(model, rows):
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return [greedy_alone(plain, prompt, params.max_tokens) for prompt, params in rows]


def check(name, model, rows, oracles, backend, shapes, windows):
    comparison = Comparison()
    for setting in SETTINGS:
        ran = run_rows(model, shapes, rows, replace(setting, backend=backend), windows=windows)
        for i, oracle in enumerate(oracles):
            comparison.add(f"{setting} row {i}", ran.outputs[i], oracle)
    comparison.check(f"{name}, {backend}")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_backend_over_few_blocks(name):
    model = random_model(config_of(name))
    rows, shapes, windows = long_rows(name), shapes_of(model), windows_of(model)
    oracles = oracles_of(model, rows)
    longest = max(len(prompt) + params.max_tokens - 1 for prompt, params in rows)
    for setting in SETTINGS:
        _, num_blocks, pool = managers(setting, windows)
        few = num_blocks if pool is None else pool.num_blocks
        assert few < 0.6 * longest / setting.block_size, "the pool holds a whole row"
    for backend in BACKENDS:
        check(name, model, rows, oracles, backend, shapes, windows)


@pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels need a C compiler")
@pytest.mark.parametrize("name", ["Mistral", "Qwen2"])
def test_layers_swapped_for_kernels(name):
    model = random_model(config_of(name))
    rows, shapes, windows = long_rows(name), shapes_of(model), windows_of(model)
    oracles = oracles_of(model, rows)
    assert pack_model(model, "cpu_native").num_layers == 2
    check(name, model, rows, oracles, "cpu_native", shapes, windows)


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2"])
def test_tiles_of_a_deterministic_model(name):
    """Bitwise the same logits whether blocks are given back or not."""
    model = random_model(config_of(name))
    rows, shapes, windows = long_rows(name), shapes_of(model), windows_of(model)
    tiled = TiledModel(model, (4,))
    tiled.get_input_embeddings = model.get_input_embeddings
    scored = [(prompt, SamplingParams(max_tokens=params.max_tokens, logprobs=0)) for prompt, params in rows]
    found = []
    for kept in (None, windows):
        for setting in SETTINGS:
            ran = run_rows(tiled, shapes, scored, replace(setting, backend="deterministic"), windows=kept)
            found.append([[one.logprob for one in request.logprobs] for request in ran.requests.values()])
    assert all(one == found[0] for one in found[1:])


def test_a_pool_of_its_own_is_smaller_than_the_other():
    model = random_model(config_of("Gemma 2"))
    _, num_blocks, pool = managers(SETTINGS[0], windows_of(model))
    assert pool.layers == {0} and pool.num_blocks < num_blocks
    assert windows_of(random_model(config_of("Llama"))) is None


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2"])
def test_a_whole_job_through_the_composition_root(tmp_path, name):
    """Sizes, preparation, cache, model and scheduler as `generate` wires them: rows that are many times as long as the window."""
    model = random_model(config_of(name))
    write_model(tmp_path)
    (tmp_path / "config.json").unlink()
    model.save_pretrained(tmp_path)
    rows = [(prompt, SamplingParams(max_tokens=params.max_tokens)) for prompt, params in long_rows(name) for _ in range(2)]
    lines = [json.dumps({"prompt_token_ids": ids, "max_tokens": params.max_tokens, "ignore_eos": True}) for ids, params in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    effective = load_config(
        None, [f"model.name={tmp_path}", "scheduler.token_budget=8", "cache.block_size=2", "model.device=cpu"]
    )
    text_model = build.open_model(effective.config.model)
    inputs = build.Inputs((str(tmp_path / "rows.jsonl"),), InputOptions())
    job = build.prepare_job(
        effective, inputs, text_model, DeviceMemory("cpu", 1 << 30), lambda fault: pytest.fail(fault.message)
    )
    executor = build.build_executor(job)
    engine = build.build_engine(job, executor.runner, standard_stop_rule, lambda: 0.0)
    ran = [request for report in engine.run() for request in (*report.finished, *report.duplicates)]
    comparison = Comparison()
    for request in ran:
        index = request.request_id.row
        comparison.add(f"row {index}", request.output_ids, oracles_of(model, [rows[index]])[0])
    comparison.check(name)
    assert len(ran) == len(rows)
    size = 8 * window_span(5, 8, 2)
    if name == "Mistral":
        assert job.sizes.num_blocks <= size and "for the last 5 tokens of each row" in build.header_lines(job, executor)[2]
    else:
        assert job.sizes.num_window_blocks == size < job.sizes.num_blocks
        assert f"{size} for 1 of 2 layers with a window of 5" in build.header_lines(job, executor)[2]
