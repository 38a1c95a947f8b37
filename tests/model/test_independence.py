"""A row's tokens and log-probabilities depend on its prompt, settings and seed alone.

The oracle of seeded rows is our own engine, the row alone, batch size 1, prefix cache off. A sampled token may differ only where
the two candidates' scores (logit / temperature + noise) are a near tie; such rows are counted like near ties of greedy ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from contbatch_cli.core.noise import gumbel
from contbatch_cli.core.request import Request, SamplingParams
from contbatch_cli.model.attention import ATTENTION_NAME
from contbatch_cli.model.kv_cache import LayerShape
from tests.model import default_model
from tests.model.tiny import (
    VOCAB_SIZE,
    Setting,
    draw_rows,
    draw_setting,
    gpt2_config,
    llama_config,
    random_model,
    run_rows,
    shapes_of,
)
from tests.oracle import GAP, ROWS_PER_NEAR_TIE

Row = tuple[list[int], SamplingParams]


def draw_params(rng: random.Random, vocab_size: int, max_tokens: int) -> SamplingParams:
    """Settings of every kind, most rows with several of them."""

    def sometimes(draw: Callable[[], Any], otherwise: Any) -> Any:
        return draw() if rng.random() < 0.3 else otherwise

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        seed=rng.getrandbits(64),
        top_k=sometimes(lambda: rng.randint(1, 40), 0),
        top_p=sometimes(lambda: rng.uniform(0.3, 0.99), 1.0),
        min_p=sometimes(lambda: rng.uniform(0.01, 0.3), 0.0),
        presence_penalty=sometimes(lambda: rng.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(lambda: rng.uniform(-1, 1), 0.0),
        repetition_penalty=sometimes(lambda: rng.uniform(0.8, 1.5), 1.0),
        logit_bias=sometimes(lambda: ((rng.randrange(vocab_size), 2.0), (rng.randrange(vocab_size), -100.0)), ()),
        bad_words=sometimes(lambda: ((rng.randrange(vocab_size),), (rng.randrange(vocab_size), rng.randrange(vocab_size))), ()),
        logprobs=sometimes(lambda: rng.randint(0, 5), None),
        min_tokens=sometimes(lambda: min(3, max_tokens), 0),
        eos_token_ids=(2, 5),
    )


def alone(model: Any, shapes: list[LayerShape], row: Row, block_size: int = 16) -> Request:
    prompt, params = row
    num_blocks = -(-(len(prompt) + params.max_tokens) // block_size)
    setting = Setting(len(prompt) + params.max_tokens, 1, block_size, num_blocks, prefix_caching=False)
    return run_rows(model, shapes, [row], setting).requests[0]


class Agreement:
    """Counts rows whose tokens differ at a near tie, and collects those that differ otherwise."""

    def __init__(self) -> None:
        self.num_rows = self.num_near_ties = 0
        self.failures: list[str] = []

    def add(self, name: str, got: Request, wanted: Request, model: Any) -> None:
        self.num_rows += 1
        if got.output_ids == wanted.output_ids:
            return
        pairs = zip(got.output_ids, wanted.output_ids, strict=False)
        place = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        assert place is not None, f"{name}: {got.num_output_tokens} tokens, alone {wanted.num_output_tokens}"
        gap = self._gap(wanted, place, got.output_ids[place], model)
        if gap < GAP:
            self.num_near_ties += 1
        else:
            self.failures.append(f"{name}: token {place} differs, gap {gap:.2g} ({wanted.sampling})")

    def _gap(self, wanted: Request, place: int, token: int, model: Any) -> float:
        """By plain logits and noise: filters and penalties only ever remove or shift both runs' candidates alike."""
        known = wanted.token_ids[: wanted.num_prompt_tokens + place]
        other = wanted.output_ids[place]
        logits = logits_of(model, known)[-1]
        temperature = wanted.sampling.temperature
        difference = float(logits[other] - logits[token])
        if temperature == 0.0:
            return abs(difference)
        noise = [gumbel(wanted.sampling.seed, wanted.request_id.sample, len(known), one) for one in (other, token)]
        return abs(difference / temperature + noise[0] - noise[1])

    def check(self, name: str) -> None:
        print(f"{name}: {self.num_rows} rows, {self.num_near_ties} near ties")
        assert not self.failures, self.failures[:5]
        assert self.num_near_ties <= -(-self.num_rows // ROWS_PER_NEAR_TIE)


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Float32 logits [tokens, V] of a plain forward pass."""
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


TINY = {"llama": llama_config, "gpt2": gpt2_config}


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models."""
    wanted = torch.get_num_threads()
    torch.set_num_threads(1 if "tiny" in request.node.name else wanted)
    yield
    torch.set_num_threads(wanted)


@pytest.mark.parametrize("name", sorted(TINY))
def test_tiny_rows_of_all_settings_equal_each_row_alone(name: str) -> None:
    model = random_model(TINY[name]())
    shapes = shapes_of(model)
    rng = random.Random(name)
    rows = [(ids, draw_params(rng, VOCAB_SIZE, params.max_tokens)) for ids, params in draw_rows(rng, 20, 24, 16)]
    wanted = [alone(model, shapes, row) for row in rows]
    agreement, num_preemptions = Agreement(), 0
    for number in range(25):
        setting = draw_setting(rng, max(len(ids) + params.max_tokens for ids, params in rows))
        order = rng.sample(range(len(rows)), len(rows))
        ran = run_rows(model, shapes, [rows[row] for row in order], setting)
        num_preemptions += ran.num_preemptions
        for place, row in enumerate(order):
            agreement.add(f"setting {number}, row {row}", ran.requests[place], wanted[row], model)
    assert num_preemptions > 20
    agreement.check(f"{name}, 25 settings, {num_preemptions} preemptions")


@pytest.mark.slow
def test_rows_of_all_settings_equal_each_row_alone_on_the_default_model() -> None:
    loaded, shapes = default_model.loaded(), default_model.shapes()
    rng = random.Random(7)
    rows = [
        (ids, draw_params(rng, loaded.vocab_size, min(params.max_tokens, 8)))
        for ids, params in default_model.short_rows(12, longest_prompt=24, most_tokens=8, seed=3)
    ]
    wanted = [alone(loaded.model, shapes, row) for row in rows]
    agreement = Agreement()
    for number in range(25):
        setting = replace(draw_setting(rng, 40, block_size=16), num_blocks=rng.choice([3, 4, 60]), is_rash=True)
        order = rng.sample(range(len(rows)), len(rows))
        ran = run_rows(loaded.model, shapes, [rows[row] for row in order], setting)
        for place, row in enumerate(order):
            agreement.add(f"setting {number}, row {row}", ran.requests[place], wanted[row], loaded.model)
    agreement.check("default model, 25 settings")


@pytest.mark.parametrize("budget", [5, 300])
def test_logprobs_are_those_of_a_full_forward_pass(budget: int) -> None:
    """Within 1e-4, of the prompt too when it is computed in chunks."""
    loaded, shapes = default_model.loaded(), default_model.shapes()
    rows = [
        (ids, replace(params, logprobs=3, prompt_logprobs=2, max_tokens=6))
        for ids, params in default_model.short_rows(6, longest_prompt=32, seed=9)
    ]
    scored = [(ids, replace(params, max_tokens=0)) for ids, params in rows[:2]]
    ran = run_rows(loaded.model, shapes, [*rows, *scored], Setting(budget, 4, 16, 60))
    for request in ran.requests.values():
        expected = torch.log_softmax(logits_of(loaded.model, request.token_ids), -1)
        entries = [*request.prompt_logprobs, *request.logprobs]
        assert len(request.prompt_logprobs) == request.num_prompt_tokens - 1
        assert len(entries) == request.num_tokens - 1
        for place, entry in enumerate(entries):
            assert entry.token_id == request.token_ids[place + 1]
            assert abs(entry.logprob - float(expected[place, entry.token_id])) < 1e-4
            best = expected[place].topk(max(len(entry.top), 1)).values
            assert all(abs(logprob - float(best[rank])) < 1e-4 for rank, (_, logprob) in enumerate(entry.top))


def test_unseeded_rows_differ_and_a_run_repeats_from_its_seed() -> None:
    loaded, shapes = default_model.loaded(), default_model.shapes()
    ids = default_model.tokenizer().encode("Once upon a time")
    rows = [(ids, SamplingParams(max_tokens=8, temperature=1.0, seed=seed)) for seed in range(6)]
    first = run_rows(loaded.model, shapes, rows, Setting(64, 6, 16, 20)).outputs
    again = run_rows(loaded.model, shapes, rows, Setting(64, 6, 16, 20)).outputs
    assert first == again
    assert len({tuple(output) for output in first.values()}) > 3
