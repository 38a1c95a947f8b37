from __future__ import annotations

import json
import random

import pytest

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.request import GREEDY, RequestId
from contbatch_cli.cost_model import (
    CostModel,
    MeasuredStep,
    ModelShape,
    StepShape,
    device_figures,
    fit_cost_model,
    interpolate,
    nonnegative_least_squares,
    roofline,
    shape_of,
)
from contbatch_cli.errors import UsageError
from tests.fake_runs import FakeJob, reports

SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
TRUTH = CostModel(
    "t", False, ((1, 0.02), (8, 0.021), (64, 0.04), (256, 0.12)), ((1, 0.004), (64, 0.02)), 2e-5, 3e-8, 1e-9, 1e-8
)


def test_interpolation_meets_the_points_and_goes_on_behind_the_last() -> None:
    curve = ((1.0, 2.0), (3.0, 4.0), (4.0, 8.0))
    assert [interpolate(curve, x) for x in (0, 1, 2, 3, 3.5, 4, 5)] == [2, 2, 3, 4, 6, 8, 12]
    assert interpolate(((5.0, 1.5),), 99) == 1.5


def test_the_shape_counts_what_a_plan_reads_and_computes() -> None:
    for report in reports(FakeJob.drawn(1, 10, token_budget=16)):
        shape = shape_of(report.batch)
        runs = report.batch.sequences
        assert shape.num_tokens == sum(len(run.tokens) for run in runs)
        assert shape.num_samples == sum(run.samples for run in runs)
        pairs = [sum(position + 1 for position in range(run.start, run.end)) for run in runs]
        assert shape.decode_context + shape.prefill_pairs == sum(pairs)
        assert shape.decode_context == sum(p for p, run in zip(pairs, runs, strict=True) if len(run.tokens) == 1)
    assert shape_of(ScheduledBatch((), 0)) == StepShape(0, 0, 0, 0, 0)


def test_a_common_prefix_is_counted_for_all_but_one() -> None:
    tables = [(0, 1, 2, 9), (0, 1, 2, 8), (0, 1, 7, 3, 4), (5, 1, 2), (0, 1, 2, 6)]
    runs = [
        ScheduledSequence(RequestId(i), (1,), 16 * len(table) - 1, table, 9, GREEDY, True, Logits.LAST)
        for i, table in enumerate(tables)
    ]
    assert shape_of(ScheduledBatch(tuple(runs), 5)).shared_context == 3 * 2 * 16
    assert shape_of(ScheduledBatch(tuple(runs[:2]), 2)).shared_context == 3 * 16
    assert shape_of(ScheduledBatch((runs[0], runs[3]), 2)).shared_context == 0
    long = runs[1]._replace(tokens=(1, 1, 1), start=runs[1].start - 2)
    assert shape_of(ScheduledBatch((runs[0], long), 4)).shared_context == 0, "a prompt's attention is arithmetic"


def drawn_steps(noise: float) -> list[MeasuredStep]:
    rng = random.Random(3)
    steps = []
    for _ in range(150):
        decodes, prefill = rng.choice([0, 1, 4, 16, 64]), rng.choice([0, 2, 16, 60, 190])
        samples = decodes + rng.choice([0, 1])
        tokens = max(decodes + prefill, 1)
        context = decodes * rng.randint(1, 500)
        shared = rng.choice([0, context // 2])
        shape = StepShape(tokens, decodes + 1, samples, context, prefill * rng.randint(1, 400), shared)
        steps.append(MeasuredStep(shape, TRUTH.shape_s(shape) * (1 + rng.uniform(-noise, noise))))
    return steps


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_finds_the_model_that_made_the_steps(noise: float) -> None:
    fitted = fit_cost_model(drawn_steps(noise), (1, 8, 64, 256), (1, 64), "fitted")
    assert not fitted.is_estimate
    for step in drawn_steps(0.0):
        assert fitted.shape_s(step.shape) == pytest.approx(step.seconds, rel=0.01 + noise)


def test_least_squares_keeps_to_what_is_not_negative() -> None:
    assert nonnegative_least_squares([[1, 0], [0, 1], [1, 1]], [1, -1, 0]) == pytest.approx([0.5, 0])
    assert nonnegative_least_squares([[2, 0], [0, 3]], [4, 9]) == pytest.approx([2, 3])


def test_a_stored_model_is_read_back() -> None:
    assert CostModel.from_dict(json.loads(json.dumps(TRUTH.as_dict()))) == TRUTH
    with pytest.raises(UsageError, match="calibrate"):
        CostModel.from_dict({"source": "x"})


def test_the_shape_of_known_models() -> None:
    shape = ModelShape.from_config(SMOL)
    assert shape.layer_parameters + shape.lm_head_parameters == pytest.approx(134.5e6, rel=0.01)
    gpt2 = ModelShape.from_config({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    assert gpt2.layer_parameters + gpt2.lm_head_parameters == pytest.approx(124e6, rel=0.02)
    with pytest.raises(UsageError, match="vocab_size"):
        ModelShape.from_config({k: v for k, v in SMOL.items() if k != "vocab_size"})


def test_an_estimate_is_bound_by_memory_at_one_token_and_by_arithmetic_at_many() -> None:
    device = device_figures("cpu", 2)
    cost = roofline(ModelShape.from_config(SMOL), device, 4, 4)
    assert cost.is_estimate and "estimate" in cost.source
    one, many = StepShape(1, 1, 1, 100, 0), StepShape(1024, 1, 1, 0, 1024 * 512)
    assert 0.02 < cost.shape_s(one) < 0.06
    assert roofline(ModelShape.from_config(SMOL), device, 4, 2).shape_s(one) < 0.7 * cost.shape_s(one)
    apart, shared = (StepShape(64, 64, 64, 64 * 1000, 0, num_shared) for num_shared in (0, 63 * 900))
    assert cost.shape_s(shared) < 0.7 * cost.shape_s(apart)
    assert cost.shape_s(many) > 1024 * 2 * 106e6 / device.flops
    assert device_figures("NVIDIA H200").bytes_per_s > device_figures("NVIDIA A100-SXM4").bytes_per_s
