"""The main promise: tokens equal to each row alone through `generate`, whatever the budget, the seats, the blocks.

RoPE hides a uniform shift of positions, so GPT-2 with its learned positions is here beside Llama.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from contbatch_cli.core.request import SamplingParams
from contbatch_cli.model.attention import ATTENTION_NAME
from tests.model.tiny import (
    VOCAB_SIZE,
    Setting,
    draw_rows,
    draw_setting,
    gpt2_config,
    llama_config,
    one_thread,
    random_model,
    run_rows,
    shapes_of,
)
from tests.oracle import Comparison, OracleRow, greedy_alone

__all__ = ["one_thread"]

CONFIGS = {"llama": llama_config, "gpt2": gpt2_config}
NUM_SETTINGS = 40
NUM_ROWS = 15


@functools.cache
def model_of(name):
    model = random_model(CONFIGS[name]())
    return model, shapes_of(model)


@functools.cache
def job_of(name):
    """Rows with the oracle's answers. Some end at an EOS id of theirs."""
    model, _ = model_of(name)
    rng = random.Random(name)
    model.set_attn_implementation("eager")
    job = []
    for prompt, params in draw_rows(rng, NUM_ROWS, 24, 16):
        oracle = greedy_alone(model, prompt, params.max_tokens)
        if rng.random() < 0.2:
            eos = rng.choice(oracle.token_ids)
            end = oracle.token_ids.index(eos) + 1
            oracle = OracleRow(oracle.token_ids[:end], oracle.logits[:end])
            params = SamplingParams(max_tokens=params.max_tokens, eos_token_ids=(eos,))
        job.append((prompt, params, oracle))
    model.set_attn_implementation(ATTENTION_NAME)
    return job


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_generate_under_drawn_settings(name):
    model, shapes = model_of(name)
    job = job_of(name)
    rows = [(prompt, params) for prompt, params, _ in job]
    longest = max(len(prompt) + params.max_tokens for prompt, params in rows)
    rng = random.Random(7)
    comparison, num_preemptions = Comparison(), 0
    for number in range(NUM_SETTINGS):
        setting = draw_setting(rng, longest, backend="reference" if number % 8 == 7 else "cpu")
        ran = run_rows(model, shapes, rows, setting)
        num_preemptions += ran.num_preemptions
        for i, (_, _, oracle) in enumerate(job):
            comparison.add(f"{setting} row {i}", ran.outputs[i], oracle)
    comparison.check(f"{name}, {NUM_SETTINGS} settings, {num_preemptions} preemptions")
    assert num_preemptions >= NUM_SETTINGS, "the settings were to make rows lose their blocks"


def test_one_forward_pass_an_iteration_without_padding():
    model, shapes = model_of("llama")
    rows = [(prompt, params) for prompt, params, _ in job_of("llama")]
    seen = []
    with torch.no_grad():
        hook = model.model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        ran = run_rows(model, shapes, rows, Setting(24, 8, 4, 60))
        hook.remove()
    assert ran.runner.num_forward_passes == len(ran.plans) == len(seen)
    assert [tuple(shape) for shape in seen] == [(1, plan.num_tokens) for plan in ran.plans]
    assert any(len({s.is_decode for s in plan.sequences}) == 2 for plan in ran.plans), "no mixed batch"


def test_the_lm_head_runs_on_sampled_rows_only():
    model, shapes = model_of("gpt2")
    rows = [(prompt, params) for prompt, params, _ in job_of("gpt2")]
    heads = []
    hook = model.lm_head.register_forward_hook(lambda _, args, output: heads.append(output.shape[1]))
    ran = run_rows(model, shapes, rows, Setting(16, 8, 4, 60))
    hook.remove()
    assert heads == [sum(s.samples for s in plan.sequences) for plan in ran.plans]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_chunked_long_prompt_beside_running_decodes(name):
    model, shapes = model_of(name)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (9, 5, 2000, 7)]
    rows = [(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts, (60, 50, 8, 20), strict=True)]
    ran = run_rows(model, shapes, rows, Setting(64, 8, 16, 200))
    chunks = [s for plan in ran.plans for s in plan.sequences if s.request_id.row == 2 and not s.is_decode]
    assert len(chunks) > 30
    mixed = [
        plan for plan in ran.plans if any(not s.is_decode for s in plan.sequences) and any(s.is_decode for s in plan.sequences)
    ]
    assert len(mixed) > 25
    model.set_attn_implementation("eager")
    comparison = Comparison()
    for i, (prompt, params) in enumerate(rows):
        comparison.add(f"row {i}", ran.outputs[i], greedy_alone(model, prompt, params.max_tokens))
    model.set_attn_implementation(ATTENTION_NAME)
    comparison.check(name)
