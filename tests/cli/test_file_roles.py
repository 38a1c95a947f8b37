"""No file that a command reads is written over, and what cannot be written is known before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contbatch_cli.cli.file_roles import NamedFile, refuse_shared
from contbatch_cli.errors import UsageError
from tests.cli.scripted import call, write_model, write_rows


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with rows, a model and a file for each option that reads one."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "hello", "max_tokens": 2}])
    (tmp_path / "config.yaml").write_text("sampling: {seed: 3}\n")
    (tmp_path / "template.j2").write_text("{{ prompt }}")
    (tmp_path / "lengths.jsonl").write_text('{"index": 0, "completion_tokens": 1}\n')
    return tmp_path


READ = ("rows.jsonl", "-c", "config.yaml", "--template", "@template.j2", "--chat-template", "template.j2", "-m", "model")


@pytest.mark.parametrize("victim", ["rows.jsonl", "config.yaml", "template.j2"])
@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_generate_writes_over_nothing_that_it_reads(job: Path, option: str, victim: str) -> None:
    before = Path(victim).read_text()
    done = call("generate", *READ, "--overwrite", option, os.path.join(".", victim))
    assert done.status == 2
    assert victim in done.errors and "is the same file as" in done.errors
    assert Path(victim).read_text() == before


@pytest.mark.parametrize("victim", ["rows.jsonl", "config.yaml", "template.j2", "lengths.jsonl"])
def test_inspect_schedule_writes_over_nothing_that_it_reads(job: Path, victim: str) -> None:
    before = Path(victim).read_text()
    done = call("inspect-schedule", *READ, "--output-lengths", "@lengths.jsonl", "--perfetto", victim)
    assert done.status == 2
    assert "is the same file as" in done.errors
    assert Path(victim).read_text() == before


def test_a_replayed_trace_is_not_written_over(job: Path) -> None:
    assert call("generate", "rows.jsonl", "-m", "model", "--trace", "run.trace.jsonl").status == 0
    before = Path("run.trace.jsonl").read_text()
    assert call("inspect-schedule", "--trace", "run.trace.jsonl", "--perfetto", "run.trace.jsonl").status == 2
    assert Path("run.trace.jsonl").read_text() == before


def test_two_outputs_of_one_name(job: Path) -> None:
    for beside in ("out.jsonl", "out.jsonl.meta.json", "out.jsonl.pending"):
        done = call("generate", "rows.jsonl", "-m", "model", "-o", "out.jsonl", "--trace", beside)
        assert done.status == 2 and "written too" in done.errors
    assert not Path("out.jsonl").exists()


def test_links_are_seen_through(job: Path) -> None:
    os.symlink("rows.jsonl", "soft.jsonl")
    os.link("rows.jsonl", "hard.jsonl")
    for name in ("soft.jsonl", "hard.jsonl"):
        with pytest.raises(UsageError, match=f"--plot {name}"):
            refuse_shared([NamedFile("the input", "rows.jsonl")], [NamedFile("--plot", name)])


def test_devices_may_be_shared() -> None:
    refuse_shared(
        [NamedFile("the input", "/dev/null")], [NamedFile("--trace", "/dev/null"), NamedFile("--output", "/dev/null")]
    )


@pytest.mark.parametrize(
    "name", [".", "..", "/", "", "folder", "folder/", "new/", "x" * 250, "x" * 300, "rows.jsonl/x", "no/x"]
)
def test_an_output_that_cannot_be_a_file_is_a_usage_error(job: Path, name: str) -> None:
    Path("folder").mkdir()
    before = set(os.listdir())
    for mode in ((), ("--overwrite",), ("--resume",)):
        done = call("generate", "rows.jsonl", "-m", "model", "-o", name, *mode)
        assert done.status == 2, done.errors
        assert done.errors.count("\n") == 1 and "Traceback" not in done.errors
    assert set(os.listdir()) == before


@pytest.mark.parametrize("option", ["--plot", "--perfetto"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_rehearsal(job: Path, option: str) -> None:
    Path("folder.svg").mkdir()
    for name, reason in (("no/x.svg", "there is no directory no"), ("folder.svg", "is a directory")):
        done = call("inspect-schedule", "rows.jsonl", "-m", "model", option, name)
        assert (done.status, done.output) == (2, b"")
        assert f"{option} {name}: {reason}" in done.errors


def test_inputs_of_a_rehearsal_that_cannot_be_read(job: Path) -> None:
    Path("folder").mkdir()
    Path("plain.gz").write_text("{}\n")
    for names, message in (
        (("folder",), "folder: is a directory"),
        (("-", "-"), "it is given twice"),
        (("plain.gz",), "plain.gz: is named .gz, but its content is not gzip"),
    ):
        done = call("inspect-schedule", *names, "-m", "model")
        assert done.status == 2 and message in done.errors and "Traceback" not in done.errors
