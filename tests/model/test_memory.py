"""Sizing of the KV cache from free memory and a step's peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from contbatch_cli import build, machine
from contbatch_cli.config_files import load_config
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.data.rows import RowFault
from contbatch_cli.errors import UsageError
from contbatch_cli.model import memory
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.memory import (
    cache_bytes,
    full_step,
    is_out_of_memory,
    measure_peak,
    num_step_blocks,
    release_unused,
)
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import write_model, write_rows
from tests.model.tiny import llama_config, random_model

CPU = torch.device("cpu")
GIB = 2**30


def test_the_cache_takes_what_a_step_leaves():
    left = cache_bytes(100 * GIB, 7 * GIB, "cuda")
    assert left.num_bytes == 90 * GIB
    assert left.reason == "90.00 GiB = 100.00 GiB free on cuda - 7.00 GiB for a full step - 3.00 GiB reserve"
    message = r"2.00 GiB free on cpu - 1.90 GiB for a full step - 0.20 GiB reserve; lower scheduler.token_budget"
    with pytest.raises(UsageError, match=message):
        cache_bytes(2 * GIB, int(1.9 * GIB), "cpu")


PEAK = """
import torch
from contbatch_cli.model.memory import measure_peak
torch.ones(40 * 2**20)
peaks = [measure_peak(step, torch.device("cpu")) for step in (lambda: torch.ones(16 * 2**20).sum(), lambda: None)]
assert 60 * 2**20 < peaks[0] < 80 * 2**20 and peaks[1] < 2**20, peaks
"""


def test_the_peak_of_a_step_is_seen_after_it_is_gone():
    """64 MiB held for a moment, after an earlier and higher peak; in a process that holds nothing else."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("budget", "seats", "block_size"), [(64, 8, 16), (7, 3, 1), (5, 5, 4), (4, 9, 16), (1, 1, 1), (300, 1, 16)]
)
def test_a_full_step_is_full(budget, seats, block_size):
    batch = full_step(budget, seats, block_size)
    assert sum(len(sequence.tokens) for sequence in batch.sequences) == batch.num_tokens == budget
    assert len(batch.sequences) == min(seats, budget) and all(sequence.samples for sequence in batch.sequences)
    blocks = [block for sequence in batch.sequences for block in sequence.block_ids]
    assert sorted(blocks) == list(range(num_step_blocks(batch)))
    assert all(len(sequence.block_ids) * block_size >= sequence.end for sequence in batch.sequences)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A tiny Llama with weights and a tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("memory") / "model")
    config = llama_config()
    config.vocab_size = 259
    random_model(config).save_pretrained(directory)
    return directory


def prepared(model_dir: Path, rows: list[int], free: int, *settings: str) -> tuple[build.Job, list[RowFault]]:
    """A job of rows of so many prompt tokens, four of which are looked at before the run, and its faults so far."""
    path, faults = model_dir.parent / "rows.jsonl", []
    write_rows(
        path, [{"prompt_token_ids": [k + 1] * count, "max_tokens": 1, "ignore_eos": True} for k, count in enumerate(rows)]
    )
    effective = load_config(None, [f"model.name={model_dir}", "model.device=cpu", "scheduler.window=4", *settings])
    text_model = build.open_model(effective.config.model)
    inputs = build.Inputs((str(path),), InputOptions())
    return build.prepare_job(effective, inputs, text_model, DeviceMemory("cpu", free), faults.append), faults


BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 16
"""Two layers, keys and values, two heads of 8 in float32, 16 tokens."""


def test_the_cache_follows_what_was_measured(model_dir):
    """Down to the largest row that was let in; rows that are read later and do not fit are faults. Up where the job can use it."""
    job, faults = prepared(model_dir, [160, 16, 16, 16, 16, 200, 150], 40 * BLOCK_BYTES)
    assert job.sizes.num_blocks == 20 and "GiB free" in job.sizes.reasons["cache.num_blocks"]
    less = build.with_measured_memory(job, DeviceMemory("cpu", 40 * BLOCK_BYTES, 7 * BLOCK_BYTES, "7 blocks are left"))
    assert (less.sizes.num_blocks, less.sizes.reasons["cache.num_blocks"]) == (10, "7 blocks are left")
    engine = build.build_engine(less, build.build_executor(less).runner, standard_stop_rule, lambda: 0.0)
    finished = [request.num_prompt_tokens for report in engine.run() for request in report.finished]
    assert sorted(finished) == [16, 16, 16, 16, 150, 160]
    assert [(fault.index, fault.code) for fault in faults] == [(5, "exceeds_kv_cache")]
    more = build.with_measured_memory(job, DeviceMemory("cpu", 0, 1 << 30, "plenty"))
    assert more.sizes.num_blocks > 100 and more.sizes.reasons["cache.num_blocks"] == "all that the job can use"


def test_what_is_left_bounds_the_memory_that_was_set(model_dir):
    job, _ = prepared(model_dir, [16], 1 << 30, f"cache.memory={30 * BLOCK_BYTES // 1024}KiB")
    for left, num_blocks in ((50, 30), (20, 20)):
        measured = DeviceMemory("cpu", 1 << 30, left * BLOCK_BYTES, "measured")
        assert build.with_measured_memory(job, measured).sizes.num_blocks == num_blocks


def test_a_job_whose_cache_is_measured(model_dir, monkeypatch):
    """As on a GPU, here with a CPU's counters: the step is run, and what it leaves becomes the cache of the job that is run.

    The step of a tiny model finds room in what the process once freed, so that its peak may not show: 128 MiB are held beside it,
    which the C library always maps anew.
    """
    monkeypatch.setattr(build, "takes_measured_memory", lambda job, loaded: True)
    monkeypatch.setattr(memory, "measure_peak", lambda step, device: measure_peak(lambda: (torch.ones(2**25), step()), device))
    job, _ = prepared(model_dir, [16, 16], 1 << 30)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 10 * GIB)
    executor = build.build_executor(job)
    assert executor.job is not None and executor.job.memory.free_bytes == 10 * GIB
    left = 9 * GIB - executor.job.memory.cache_bytes
    assert 120 * 2**20 < left < 200 * 2**20 and "for a full step" in executor.job.memory.cache_reason
    engine = build.build_engine(executor.job, executor.runner, standard_stop_rule, lambda: 0.0)
    assert sum(len(report.finished) for report in engine.run()) == 2


def test_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch")) and not is_out_of_memory(ValueError("DefaultCPUAllocator: "))
    release_unused(CPU)


def test_a_cache_that_no_memory_holds_is_refused_with_numbers():
    with pytest.raises(UsageError, match=r"the KV cache, 1,000,000,000,000,000 blocks of 65,536 bytes, .*cache\.num_blocks"):
        KVCache([LayerShape(8, 8, 64, 64)], 10**15, 16, torch.float32, CPU)
