"""The loop: schedule -> execute -> update, one iteration at a time. A generator; whoever consumes it sees every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from contbatch_cli.core.batch import BatchResult, ScheduledBatch
from contbatch_cli.core.request import Request


class Runner(Protocol):
    """Executes a plan. Holds nothing that a plan cannot rebuild."""

    def execute(self, batch: ScheduledBatch) -> BatchResult: ...


class Clock(Protocol):
    """Seconds since any fixed moment, monotonic."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Everything that a table, a trace or a metric ever sees of one iteration. Times in seconds since the run began."""

    iteration: int
    batch: ScheduledBatch
    finished: tuple[Request, ...]
    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    token_budget: int
    start_s: float
    elapsed_s: float
