"""The main promise on the default model: tokens equal to each row alone through `generate`, in float32."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace

import pytest

from contbatch_cli.core.request import SamplingParams
from tests.model.default_model import WORKLOADS, Row, answers, packed, shapes, short_rows, workload
from tests.model.tiny import Ran, Setting, run_rows
from tests.oracle import Comparison, OracleRow


@functools.cache
def job() -> tuple[list[Row], list[OracleRow]]:
    rows = short_rows(64)
    return rows, answers(rows)


def run(rows: list[Row], setting: Setting) -> Ran:
    """As the product runs them on this machine: compiled kernels where there is a compiler."""
    return run_rows(packed().model, shapes(), rows, replace(setting, backend=packed().attention_choice))


def compare(name: str, ran: Ran, oracle: list[OracleRow]) -> None:
    comparison = Comparison()
    for row, answer in enumerate(oracle):
        comparison.add(f"row {row}", ran.outputs[row], answer)
    comparison.check(name)


@pytest.mark.parametrize(("token_budget", "seats"), [(4096, 32), (64, 32)])
def test_64_rows_equal_generate(token_budget: int, seats: int) -> None:
    rows, oracle = job()
    compare(f"budget {token_budget}, {seats} seats", run(rows, Setting(token_budget, seats, 16, 300)), oracle)


@pytest.mark.parametrize(("token_budget", "seats"), [(1, 1), (7, 3), (64, 1), (4096, 3)])
def test_six_rows_equal_generate_under_odd_settings(token_budget: int, seats: int) -> None:
    rows, oracle = job()
    ran = run(rows[:6], Setting(token_budget, seats, 16, 100))
    assert all(plan.num_tokens <= token_budget and len(plan.sequences) <= seats for plan in ran.plans)
    compare(f"budget {token_budget}, {seats} seats", ran, oracle[:6])


@pytest.mark.parametrize(
    "setting",
    [
        Setting(64, 32, 16, 24, prefix_caching=False, is_rash=True),
        Setting(64, 32, 16, 24, prefix_caching=True, is_rash=True),
        Setting(256, 32, 4, 2000, prefix_caching=True),
    ],
    ids=["preempted", "preempted, prefix cache", "huge, prefix cache"],
)
def test_cache_size_prefix_cache_and_order_of_rows_do_not_show(setting: Setting) -> None:
    rows, oracle = job()
    order = list(range(24))
    random.Random(1).shuffle(order)
    ran = run([rows[row] for row in order], setting)
    assert (ran.num_preemptions > 0) == (setting.num_blocks < 100)
    compare(str(setting), ran, [oracle[row] for row in order])


@pytest.mark.slow
def test_the_rows_of_w1_equal_their_reference() -> None:
    lines = (WORKLOADS / "w1.reference.jsonl").read_text(encoding="utf-8").splitlines()
    reference = [json.loads(line)["token_ids"] for line in lines]
    rows = workload("w1", len(reference))
    ran = run(rows, Setting(512, 64, 16, 1200))
    differing = [row for row, token_ids in enumerate(reference) if ran.outputs[row] != token_ids]
    comparison = Comparison()
    for row, answer in zip(differing, answers([rows[row] for row in differing]), strict=True):
        comparison.add(f"row {row}", ran.outputs[row], answer)
    print(f"w1: {len(reference) - len(differing)} of {len(reference)} rows identical to the reference")
    assert not comparison.failures, comparison.failures
    assert len(comparison.near_ties) <= 1, comparison.near_ties


@pytest.mark.slow
def test_w2_computes_the_shared_prefix_once() -> None:
    rows = workload("w2")
    ran = run([(prompt, SamplingParams(max_tokens=1)) for prompt, _ in rows], Setting(4096, 32, 16, 2000))
    computed = sum(plan.num_tokens for plan in ran.plans)
    print(f"w2: {computed:,} prompt tokens computed of {sum(len(prompt) for prompt, _ in rows):,}")
    assert computed <= 256 + 32 * 33
