"""What Ray costs: the same job by one engine in this process and by one replica on a local Ray, turn about, the best of each.

    python tests/benchmarks/ray_overhead.py [--rows 64] [--repeats 3] [-m MODEL] [--threads N] [--step-s SECONDS]

With `--step-s` there is no model: each step sleeps for so long, which shows Ray's own part on a machine that others
use too. Times are of the run itself, from its first iteration to its last; starting Ray and loading come before it and are
shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Took(NamedTuple):
    """Seconds of the run and of the whole command."""

    run_s: float
    command_s: float


class Bench(NamedTuple):
    """Where a job is, and what runs it."""

    directory: Path
    model: str
    threads: int
    step_s: float | None


def write_rows(path: Path, rows: int) -> None:
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            prompt = [rng.randrange(256) for _ in range(rng.randint(20, 240))]
            row = {"prompt_token_ids": prompt, "max_tokens": rng.randint(20, 160), "ignore_eos": True}
            file.write(json.dumps(row) + "\n")


def measure(bench: Bench, more: list[str]) -> Took:
    trace = bench.directory / "trace.jsonl"
    program = "contbatch_cli" if bench.step_s is None else "tests.cluster.scripted"
    command = [sys.executable, "-m", program, "generate", str(bench.directory / "rows.jsonl"), "-m", bench.model, "-q"]
    command += ["-o", str(bench.directory / "out.jsonl"), "--overwrite", "--trace", str(trace), *more]
    began_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(bench.threads)}
    environment["SCRIPTED_STEP_S"] = str(bench.step_s or 0)
    subprocess.run(command, check=True, env=environment)
    command_s = time.monotonic() - began_s
    steps = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    return Took(max(step["start_s"] + step["elapsed_s"] for step in steps), command_s)


def scripted_model(directory: Path) -> str:
    sys.path.insert(0, str(ROOT))
    from tests.cli.scripted import write_model

    return str(write_model(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-m", "--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--step-s", type=float)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_rows(directory / "rows.jsonl", asked.rows)
        model = asked.model if asked.step_s is None else scripted_model(directory / "model")
        bench = Bench(directory, model, asked.threads, asked.step_s)
        none: list[Took] = []
        one: list[Took] = []
        for _ in range(asked.repeats):
            none.append(measure(bench, []))
            one.append(measure(bench, ["--replicas", "1"]))
            print(f"without Ray {none[-1]}, one replica {one[-1]}", flush=True)
    best_none, best_one = min(none), min(one)
    overhead = best_one.run_s / best_none.run_s - 1
    print(f"best runs: {best_none.run_s:.2f} s without Ray, {best_one.run_s:.2f} s with one replica: overhead {overhead:.1%}")


if __name__ == "__main__":
    main()
