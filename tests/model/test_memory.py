"""Sizing of the KV cache from free memory and a step's peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from contbatch_cli.errors import UsageError
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.memory import (
    cache_bytes,
    full_step,
    is_out_of_memory,
    num_step_blocks,
    release_unused,
)

CPU = torch.device("cpu")
GIB = 2**30


def test_the_cache_takes_what_a_step_leaves():
    memory = cache_bytes(100 * GIB, 7 * GIB, "cuda")
    assert memory.num_bytes == 90 * GIB
    assert memory.reason == "90.00 GiB = 100.00 GiB free on cuda - 7.00 GiB for a full step - 3.00 GiB reserve"
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
