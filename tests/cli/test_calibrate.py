from __future__ import annotations

from pathlib import Path

import pytest

from contbatch_cli.cli.calibrate import StepLimits, calibration_batches, fit, loop_costs, measure, report_lines, store
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, SequenceResult
from contbatch_cli.cost_model import CostModel, shape_of
from contbatch_cli.data.model_files import read_json
from contbatch_cli.errors import EngineError

TRUTH = CostModel("t", False, ((1, 0.02), (32, 0.03), (512, 0.3)), ((1, 0.004), (64, 0.02)), 2e-5, 3e-8, 1e-9)


class SlowRunner:
    """Takes the time of a known cost model, on its own clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self.now += TRUTH.step_s(batch)
        return BatchResult([SequenceResult((1,) if sequence.samples else ()) for sequence in batch.sequences])


@pytest.mark.parametrize("num_blocks", [64, 1024])
def test_batches_are_plans_that_the_cache_holds(num_blocks: int) -> None:
    batches = calibration_batches(StepLimits(num_blocks, 16, 512, 2048), with_unsampled=True)
    assert len(batches) > 20
    for batch in batches:
        assert 0 < batch.num_tokens <= 512
        assert batch.num_tokens == sum(len(sequence.tokens) for sequence in batch.sequences)
        blocks = [block for sequence in batch.sequences for block in sequence.block_ids]
        assert len(blocks) == len(set(blocks)) and max(blocks) < num_blocks
        for sequence in batch.sequences:
            assert len(sequence.block_ids) * 16 >= sequence.end
    assert any(shape_of(batch).num_samples == 0 for batch in batches)
    assert all(
        shape_of(batch).num_samples
        for batch in calibration_batches(StepLimits(num_blocks, 16, 512, 2048), with_unsampled=False)
    )


def test_the_fit_to_measured_steps_tells_their_times(tmp_path: Path) -> None:
    runner = SlowRunner()
    batches = calibration_batches(StepLimits(1024, 16, 512, 2048), with_unsampled=True)
    measured = measure(batches, runner, lambda: runner.now)
    cost = fit(measured, loop_costs(lambda: 0.0), "measured")
    for step in measured:
        assert cost.shape_s(step.shape) == pytest.approx(TRUTH.shape_s(step.shape), rel=0.1)
    store(tmp_path / "a" / "c.json", cost)
    assert CostModel.from_dict(read_json(tmp_path / "a" / "c.json") or {}) == cost
    assert any("off by" in line for line in report_lines(cost, measured))


def test_the_time_limit_holds_and_too_little_is_an_error() -> None:
    runner = SlowRunner()
    batches = calibration_batches(StepLimits(1024, 16, 512, 2048), with_unsampled=True)
    measure(batches, runner, lambda: runner.now, limit_s=15)
    assert runner.now < 15.5
    with pytest.raises(EngineError, match="too slow"):
        measure(batches, runner, lambda: runner.now, limit_s=0.5)


def test_the_loop_costs_little() -> None:
    costs = loop_costs()
    assert 0 < costs.step_s + costs.run_s < 0.01
