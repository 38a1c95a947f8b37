"""The replicas of a run in the terminal: a line for each, live or at the end of a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contbatch_cli.cli.figures import duration, three_figures
from contbatch_cli.cluster.cluster_engine import ReplicaState
from contbatch_cli.trace import TraceIteration
from contbatch_cli.units import counted

MOST_LINES = 8


def live_lines(states: Sequence[ReplicaState]) -> list[str]:
    """Rows, speed and cache of each replica; the first ones where there are many."""
    lines = [_live_line(state) for state in states[:MOST_LINES]]
    return [*lines, f"and {counted(len(states) - MOST_LINES, 'more replica')}"] if len(states) > MOST_LINES else lines


def _live_line(state: ReplicaState) -> str:
    if state.is_lost:
        return f"replica {state.replica}: lost, {counted(state.rows_done, 'row')} done"
    return (
        f"replica {state.replica}: {counted(state.rows_done, 'row')} done, {three_figures(state.recent_tokens_per_s)} tokens/s, "
        f"{state.num_running:,} running, {state.num_waiting:,} waiting, {state.blocks_used:,}/{counted(state.num_blocks, 'block')}"
    )


@dataclass(slots=True)
class _Totals:
    rows: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class ReplicaTotals:
    """Adds up a schedule by its replicas."""

    _totals: dict[int, _Totals] = field(default_factory=dict)

    def add(self, iteration: TraceIteration) -> None:
        if iteration.replica is None:
            return
        totals = self._totals.setdefault(iteration.replica, _Totals())
        totals.rows += sum(request_id.sample == 0 for request_id in iteration.finished)
        totals.tokens += sum(run.num_sampled for run in iteration.scheduled)
        totals.busy_s += iteration.elapsed_s
        totals.end_s = iteration.end_s

    def lines(self) -> list[str]:
        """One for each replica: its rows, its tokens, and how much of the makespan it was busy."""
        makespan_s = max((one.end_s for one in self._totals.values()), default=0.0)
        return [
            f"replica {replica}: {counted(one.rows, 'row')}, {counted(one.tokens, 'output token')}, done after {duration(one.end_s)}, "
            f"busy {one.busy_s / makespan_s if makespan_s else 0.0:.0%} of the makespan"
            for replica, one in sorted(self._totals.items())
        ]
