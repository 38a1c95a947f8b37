from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contbatch_cli.cli.calibrate import StepLimits, calibration_batches, fit, loop_costs, measure, report_lines, store
from contbatch_cli.cli.rehearsal import calibration_path, cost_model
from contbatch_cli.config_files import load_config
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, SequenceResult
from contbatch_cli.cost_model import CostModel, shape_of
from contbatch_cli.data.model_files import ModelInfo, read_json
from contbatch_cli.errors import EngineError
from tests.cli.scripted import write_model

TRUTH = CostModel("t", False, ((1, 0.02), (32, 0.03), (512, 0.3)), ((1, 0.004), (64, 0.02)), 2e-5, 3e-8, 1e-9, 1e-8)


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
        tables = [sequence.block_ids for sequence in batch.sequences]
        blocks = [block for table in tables for block in table]
        assert len(blocks) - len(set(blocks)) == shape_of(batch).shared_context / 16 and max(blocks) < num_blocks
        assert len({table[-1] for table in tables}) == len(tables)
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


def test_a_calibration_holds_for_its_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    info = ModelInfo.from_directory(write_model(tmp_path / "model"))
    config, two = load_config(None, []).config, load_config(None, ["cluster.replicas=2"]).config
    store(calibration_path(config, info, "cpu"), TRUTH)
    assert cost_model(config, info, "cpu") == TRUTH
    assert cost_model(two, info, "cpu").is_estimate, "each of two replicas has one of the two threads"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    estimate = cost_model(config, info, "cpu")
    assert estimate.is_estimate and "figures of 1 CPU core" in estimate.source
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cost_model(two, info, "cpu") == TRUTH


def test_threads_are_torchs() -> None:
    """The same number, found without importing it."""
    program = "import torch; from contbatch_cli.machine import num_threads; print(torch.get_num_threads(), num_threads())"
    for threads in ("1", "2", "no number"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        environment.pop("MKL_NUM_THREADS", None)
        told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        torchs, ours = told.stdout.split()
        assert torchs == ours and (not threads.isdecimal() or ours == threads)


def test_the_loop_costs_little() -> None:
    costs = loop_costs()
    assert 0 < costs.step_s + costs.run_s < 0.01
