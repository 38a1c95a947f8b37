"""The default model in two replicas on a local Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
TOPICS = ("rivers", "bread", "the moon", "bicycles", "winter", "glass", "bees", "maps", "salt", "clocks", "paper", "ships")


@pytest.mark.slow
def test_rows_of_two_replicas_are_those_that_run_alone(tmp_path: Path) -> None:
    """24 greedy and seeded rows; `--verify` runs each again alone, and a difference may be a near tie only, and but one."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"id": f"{topic}-{kind}", "prompt": f"A few words about {topic}:", "max_tokens": 24, **more}) + "\n"
            for topic in TOPICS
            for kind, more in (("greedy", {}), ("seeded", {"temperature": 0.8, "seed": 7}))
        ),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "contbatch_cli", "generate", str(rows), "--replicas", "2", "--verify", "24"]
    done = subprocess.run(
        [*command, "--set", "model.device=cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(record["index"] for record in records) == list(range(24))
    assert all(record["usage"]["completion_tokens"] > 0 for record in records)
    lines = done.stderr.splitlines()
    print(lines[-1])
    differing = [line for line in lines if line.startswith("verify ")]
    assert len(differing) <= 1 and all("near tie" in line for line in differing), differing
    assert lines[-1].startswith("verified  24 rows run again alone")
