"""The rehearsal tells the truth: fed with a real run's output, it gives that run's trace, line for line, times aside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tests" / "workloads"
MIXED = ROOT / "prompts" / "mixed.jsonl"


def contbatch(*arguments: str) -> str:
    command = [sys.executable, "-m", "contbatch_cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def iterations(lines: str) -> list[dict[str, object]]:
    """The iterations of a trace without their times."""
    parsed = [json.loads(line) for line in lines.splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in parsed if "header" not in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (WORKLOADS / "w1.jsonl", []),
        (WORKLOADS / "w2.jsonl", []),
        (WORKLOADS / "w2.jsonl", ["cache.num_blocks=48", "cache.block_size=16", "scheduler.token_budget=96"]),
        (MIXED, ["cache.num_blocks=60", "scheduler.token_budget=64", "sampling.max_tokens=40"]),
        (MIXED, ["scheduler.policy=prefill_first", "scheduler.max_batch_size=7", "sampling.max_tokens=24"]),
    ],
    ids=["W1", "W2", "W2, few blocks", "mixed, few blocks", "mixed, prefill first"],
)
def test_the_rehearsal_of_a_run_is_its_trace(tmp_path: Path, rows: Path, settings: list[str]) -> None:
    output, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    options = [str(rows), "--limit", "24", "--set", "output.token_ids=true"]
    for setting in settings:
        options += ["--set", setting]
    contbatch("generate", *options, "-o", str(output), "--trace", str(trace), "-q")
    real = iterations(trace.read_text(encoding="utf-8"))
    rehearsed = iterations(contbatch("inspect-schedule", *options, "--json", "--output-lengths", f"@{output}"))
    num_hits = sum(run["start"] > 0 for line in real for run in line["scheduled"] if not run["is_decode"])  # type: ignore[attr-defined]
    num_preempted = sum(len(line["preempted"]) for line in real)  # type: ignore[arg-type]
    print(f"{rows.name} {settings}: {len(real)} iterations, {num_preempted} preempted, {num_hits} runs behind a prefix")
    assert real == rehearsed
