"""What memory there is, and what a step takes at its peak: measured once, so that the KV cache can have the rest.

    free once the weights are loaded   | KV cache ..................... | peak of a full step | reserve |

The arithmetic (`cache_bytes`) is apart from the asking.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from contbatch_cli import machine
from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.request import RequestId, SamplingParams
from contbatch_cli.errors import UsageError
from contbatch_cli.model.splitting import Executes

RESERVE = {"cpu": 0.1, "cuda": 0.03}
"""The part of the free memory that is nobody's: fragments, libraries' workspaces, and on a CPU the rest of the machine."""


class CacheMemory(NamedTuple):
    """Bytes that the KV cache may take, and the sum in words."""

    num_bytes: int
    reason: str


def left_for_cache(
    make_runner: Callable[[int], Executes], device: torch.device, token_budget: int, seats: int, block_size: int
) -> CacheMemory:
    """What a step of that budget and so many seats leaves at its peak: such a step is run, in a cache of its own.

    `make_runner` makes the runner, with a cache of a number of blocks, beside which there is none yet. Raises UsageError when
    nothing is left.
    """
    step = full_step(token_budget, seats, block_size)
    peak = step_peak(make_runner(num_step_blocks(step)), step, device)
    release_unused(device)
    return cache_bytes(free_bytes(device), peak, device.type)


def cache_bytes(free_bytes: int, peak_bytes: int, kind: str) -> CacheMemory:
    """What is left of `free_bytes` (weights loaded, no cache yet) after a step's peak and the reserve.

    Raises UsageError when that is nothing.
    """
    reserve = int(free_bytes * RESERVE[kind])
    left = free_bytes - peak_bytes - reserve
    parts = f"{_gib(free_bytes)} free on {kind} - {_gib(peak_bytes)} for a full step - {_gib(reserve)} reserve"
    if left <= 0:
        raise UsageError(f"cache: no memory is left for the KV cache: {parts}; lower scheduler.token_budget")
    return CacheMemory(left, f"{_gib(left)} = {parts}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor could take; of a GPU what the driver has free, and what torch's own pool holds unused."""
    if device.type != "cuda":
        return machine.free_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def measure_peak(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `step` held at once beyond what was held before it.

    On CUDA torch's allocator counts them. On a CPU it is the growth of the process's peak resident size, which Linux lets us reset;
    elsewhere, growth below an earlier peak does not show.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = _reset_peak_resident()
    step()
    return max(_peak_resident() - before, 0)


def step_peak(runner: Executes, batch: ScheduledBatch, device: torch.device) -> int:
    """The peak of a step that `runner`'s cache holds, once the libraries have taken their workspaces."""
    runner.execute(batch)
    return measure_peak(lambda: runner.execute(batch), device)


def _reset_peak_resident() -> int:
    """The process's peak resident bytes from here on; reset to the present size where the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak_resident()


def _peak_resident() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def full_step(token_budget: int, seats: int, block_size: int) -> ScheduledBatch:
    """The largest step that the scheduler may plan: `seats` sampled runs that share the budget, one of them as long as it can be.

    Block tables are dense, so a cache of `num_step_blocks` blocks holds it.
    """
    seats = min(seats, token_budget)
    lengths = [1] * (seats - 1) + [token_budget - seats + 1]
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50)
    sequences: list[ScheduledSequence] = []
    first = 0
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        table = tuple(range(first, first + count))
        sequences.append(ScheduledSequence(RequestId(row), (0,) * length, 0, table, length, sampling, True, Logits.LAST))
        first += count
    return ScheduledBatch(tuple(sequences), token_budget)


def num_step_blocks(batch: ScheduledBatch) -> int:
    """The blocks that a `full_step` needs."""
    return 1 + max(max(sequence.block_ids) for sequence in batch.sequences)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or a CPU. (torch's CPU allocator raises a plain RuntimeError.)"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def release_unused(device: torch.device) -> None:
    """Give what was freed back, so that it is there for others and no smaller step is refused over fragments.

    On CUDA torch keeps it; on a CPU the C library does, of which GNU's can be told to let go.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
