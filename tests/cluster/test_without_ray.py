"""What happens where Ray is not installed, and what is imported where it is not wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.scripted import write_model

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["ray"] = None
from contbatch_cli.cli.app import main
main()
"""


def contbatch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "rows.jsonl").write_text("".join(f'{{"prompt": "row {index}"}}\n' for index in range(8)))
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        *arguments,
        str(directory / "rows.jsonl"),
        "-m",
        str(write_model(directory / "m")),
    ]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180)


def test_replicas_without_ray_are_refused_in_one_line(tmp_path: Path) -> None:
    done = contbatch(tmp_path, "generate", "--replicas", "2")
    message = "contbatch: cluster.replicas: several engines need Ray: pip install 'contbatch[ray]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_rehearsal_of_replicas_needs_no_ray(tmp_path: Path) -> None:
    done = contbatch(tmp_path, "inspect-schedule", "--replicas", "3", "--plot", str(tmp_path / "plot.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line.startswith("note      replica ")]
    assert [line.split()[2] for line in lines] == ["0:", "1:", "2:"]
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"replica {number}" in drawn for number in range(3))


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    done = contbatch(tmp_path, "generate", "--replicas", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--replicas 0: must be " in done.stderr
