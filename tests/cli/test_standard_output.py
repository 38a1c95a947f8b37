"""What becomes of a standard output that takes nothing more: a full disk, or a reader that went away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.scripted import command, write_model, write_rows

COMMANDS = [("--help",), ("--version",), ("config",), ("config", "--schema"), ("models",), ("generate", "--help")]


def _rehearsal(tmp_path: Path) -> tuple[str, ...]:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "hello", "max_tokens": 400, "ignore_eos": True}])
    model = write_model(tmp_path / "model")
    return ("inspect-schedule", str(rows), "-m", str(model), "--iterations", "1000")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line_and_status_3(tmp_path: Path) -> None:
    rehearsal = _rehearsal(tmp_path)
    for arguments in (*COMMANDS, rehearsal, (*rehearsal, "--json")):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (3, "contbatch: standard output: No space left on device\n"), arguments


@pytest.mark.skipif(sys.platform == "win32", reason="there is no shell to close it")
def test_a_closed_one_is_one_line_and_status_3(tmp_path: Path) -> None:
    rehearsal = _rehearsal(tmp_path)
    rehearsals = (rehearsal, (*rehearsal, "--json"), (*rehearsal, "--compare", "stall_free,static"))
    for arguments in (*COMMANDS, *rehearsals, ("generate", "--dry-run", *rehearsal[1:4])):
        done = _closed(arguments)
        assert (done.returncode, done.stderr) == (3, "contbatch: standard output is closed\n"), arguments


@pytest.mark.skipif(sys.platform == "win32", reason="there is no shell to close it")
def test_records_need_an_open_one_and_a_file_does_not(tmp_path: Path) -> None:
    run = ("generate", *_rehearsal(tmp_path)[1:4])
    done = _closed(run)
    assert (done.returncode, done.stderr) == (2, "contbatch: standard output is closed: use -o FILE\n")
    done = _closed((*run, "-o", str(tmp_path / "out.jsonl")))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 1


def _closed(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A run of the program with descriptor 1 closed."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    return subprocess.run([*shell, *command(*arguments)], stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows tell it otherwise")
def test_a_reader_that_went_away_is_status_141(tmp_path: Path) -> None:
    rehearsal = _rehearsal(tmp_path)
    for arguments in (("config",), rehearsal, (*rehearsal, "--json"), (*rehearsal, "--compare", "stall_free,static")):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = subprocess.run(command(*arguments), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (141, ""), arguments
