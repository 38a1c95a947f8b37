"""Windowed layers over a pool of blocks that is far smaller than the rows: every backend, packed and deterministic models too."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from contbatch_cli.core.request import SamplingParams
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.deterministic import TiledModel
from contbatch_cli.model.packing import pack_model
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
    tiled = TiledModel(model, 4)
    tiled.get_output_embeddings = model.get_output_embeddings
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
