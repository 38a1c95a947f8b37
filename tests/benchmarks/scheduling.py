"""What the schedule is worth on the real model: the prefix cache on W2, and stall-free batching against prefill first.

    python tests/benchmarks/scheduling.py [--runs 3] [--threads N] [--only-stall-free]

Interleaved runs in one process over one loaded model; medians and ratios.

prefix cache    W2 (32 rows that share 256 tokens) with `cache.prefix_caching` on and off: wall time and prompt tokens computed.
stall-free      twelve short rows on eight seats, and a prompt of 4,000 tokens among them: the worst and the p99 inter-token
                latency under `stall_free` and `prefill_first`, at the same budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from contbatch_cli import build  # noqa: E402
from contbatch_cli.config_files import load_config  # noqa: E402
from contbatch_cli.core.stop import standard_stop_rule  # noqa: E402
from contbatch_cli.data.readers import InputOptions  # noqa: E402
from contbatch_cli.metrics import Metrics, MetricsSnapshot  # noqa: E402

W2 = ROOT / "tests" / "workloads" / "w2.jsonl"


class Variant(NamedTuple):
    """One way to run a job."""

    name: str
    settings: list[str]


class Jobs:
    """Runs of one file under several settings, by one loaded model and one cache."""

    def __init__(self, rows: Path, common: list[str]) -> None:
        self._inputs = build.Inputs((str(rows),), InputOptions())
        self._common = common
        self._executor = build.build_executor(self._prepare([]))

    def _prepare(self, settings: list[str]) -> build.Job:
        effective = load_config(assignments=["model.dtype=float32", *self._common, *settings])
        model = build.open_model(effective.config.model)
        memory = build.device_memory(effective.config, model)
        return build.prepare_job(effective, self._inputs, model, memory, lambda fault: sys.exit(fault.message))

    def run(self, settings: list[str]) -> tuple[float, MetricsSnapshot]:
        """Wall time in seconds, and the run's metrics."""
        engine = build.build_engine(self._prepare(settings), self._executor.runner, standard_stop_rule, time.monotonic)
        metrics = Metrics()
        began_s = time.monotonic()
        for report in engine.run():
            metrics.observe(report)
        return time.monotonic() - began_s, metrics.snapshot()

    def compare(self, variants: list[Variant], runs: int) -> dict[str, tuple[float, MetricsSnapshot]]:
        """Medians of interleaved runs, with the last run's metrics."""
        walls: dict[str, list[float]] = {variant.name: [] for variant in variants}
        last: dict[str, MetricsSnapshot] = {}
        for _ in range(runs):
            for variant in variants:
                wall_s, last[variant.name] = self.run(variant.settings)
                walls[variant.name].append(wall_s)
        return {name: (statistics.median(times), last[name]) for name, times in walls.items()}


def prefix_cache(runs: int) -> None:
    jobs = Jobs(W2, ["cache.num_blocks=800", "scheduler.max_batch_size=32"])
    found = jobs.compare([Variant(flag, [f"cache.prefix_caching={flag}"]) for flag in ("true", "false")], runs)
    for flag, (wall_s, metrics) in found.items():
        computed = metrics.prompt_tokens - metrics.cached_tokens
        print(f"W2, prefix cache {'on ' if flag == 'true' else 'off'}: {wall_s:6.2f} s, {computed:,} prompt tokens computed")
    print(f"W2, ratio: {found['false'][0] / found['true'][0]:.2f}")


def stall_free(runs: int, folder: Path) -> None:
    rows = [{"prompt_token_ids": [17 + row] * 16, "max_tokens": 40 + 10 * row, "ignore_eos": True} for row in range(12)]
    long = {"prompt_token_ids": [100 + i % 900 for i in range(4000)], "max_tokens": 8}
    job = folder / "long_prompts.jsonl"
    job.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:8], long, *rows[8:]]), encoding="utf-8")
    jobs = Jobs(job, ["scheduler.max_batch_size=8", "scheduler.token_budget=256", "scheduler.job_order=input"])
    found = jobs.compare([Variant(name, [f"scheduler.policy={name}"]) for name in ("stall_free", "prefill_first")], runs)
    for name, (wall_s, metrics) in found.items():
        p99_s, max_s = metrics.itl_p99_s or 0.0, metrics.itl_max_s or 0.0
        print(f"{name:<14} {wall_s:6.2f} s, ITL p99 {p99_s * 1e3:7.1f} ms, worst {max_s * 1e3:7.1f} ms")
    worst = {name: metrics.itl_max_s or 0.0 for name, (_, metrics) in found.items()}
    print(f"worst ITL, ratio: {worst['prefill_first'] / worst['stall_free']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only-stall-free", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    if not arguments.only_stall_free:
        prefix_cache(arguments.runs)
    with tempfile.TemporaryDirectory() as folder:
        stall_free(arguments.runs, Path(folder))


if __name__ == "__main__":
    main()
