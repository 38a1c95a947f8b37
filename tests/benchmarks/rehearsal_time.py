"""How well a rehearsal tells the time: predicted against measured makespan and p99 ITL on four jobs, median of three runs.

    python tests/benchmarks/rehearsal_time.py [--runs 3] [--skip-calibration]

Run it on an idle machine. Each job runs for real with `generate --trace`, then is rehearsed with that run's own output lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from contbatch_cli.metrics import Metrics, MetricsSnapshot
from contbatch_cli.trace import read_trace

JOBS: dict[str, tuple[int, int, tuple[int, int], tuple[int, int], list[str]]] = {
    "decode-heavy": (32, 0, (8, 64), (64, 128), []),
    "prefill-heavy": (32, 0, (128, 512), (4, 24), ["--set", "scheduler.token_budget=128"]),
    "small cache": (32, 0, (32, 200), (16, 96), ["--set", "cache.num_blocks=96", "--set", "scheduler.max_batch_size=16"]),
    "shared prefix": (48, 1200, (8, 64), (32, 96), []),
}
"""Rows, tokens that all begin with, range of prompt lengths beyond these, range of output lengths, options."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip-calibration", action="store_true")
    arguments = parser.parse_args()
    if not arguments.skip_calibration:
        contbatch("calibrate")
    print(f"{'job':<14} {'makespan':>9} {'rehearsed':>9} {'off':>6}   {'p99 ITL':>8} {'rehearsed':>9} {'off':>6}")
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate(JOBS):
            compare(name, number, Path(directory), arguments.runs)


def compare(name: str, number: int, directory: Path, runs: int) -> None:
    rows = write_rows(directory / f"{number}.jsonl", name, number)
    options = [*JOBS[name][-1], "--set", "output.token_ids=true"]
    measured = [run(rows, options, directory) for _ in range(runs)]
    output = directory / "out.jsonl"
    rehearsed = directory / "rehearsed.jsonl"
    rehearsed.write_text(contbatch("inspect-schedule", str(rows), *options, "--output-lengths", f"@{output}", "--json"))
    predicted = figures(rehearsed)
    makespan = median(figure.elapsed_s for figure in measured)
    itl = median(figure.itl_p99_s or 0.0 for figure in measured)
    told = predicted.itl_p99_s or 0.0
    first = f"{name:<14} {makespan:8.2f}s {predicted.elapsed_s:8.2f}s {predicted.elapsed_s / makespan - 1:+6.1%}"
    print(f"{first}   {itl:7.3f}s {told:8.3f}s {told / itl - 1:+6.1%}", flush=True)


def write_rows(path: Path, name: str, seed: int) -> Path:
    num_rows, num_shared, prompts, outputs, _ = JOBS[name]
    rng = random.Random(seed)
    shared = [rng.randint(100, 40_000) for _ in range(num_shared)]
    with path.open("w") as file:
        for _ in range(num_rows):
            ids = [*shared, *(rng.randint(100, 40_000) for _ in range(rng.randint(*prompts)))]
            file.write(json.dumps({"prompt_token_ids": ids, "max_tokens": rng.randint(*outputs), "ignore_eos": True}) + "\n")
    return path


def run(rows: Path, options: list[str], directory: Path) -> MetricsSnapshot:
    trace = directory / "trace.jsonl"
    contbatch("generate", str(rows), *options, "--trace", str(trace), "-q", "--overwrite", "-o", str(directory / "out.jsonl"))
    return figures(trace)


def figures(trace: Path) -> MetricsSnapshot:
    metrics = Metrics()
    for iteration in read_trace(trace)[1]:
        metrics.observe_trace(iteration)
    return metrics.snapshot()


def contbatch(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "contbatch_cli", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
