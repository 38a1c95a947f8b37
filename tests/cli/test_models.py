"""`contbatch models` and `models pull`, as commands."""

import os

import pytest
from typer.testing import CliRunner

from contbatch_cli.cli.models import app
from contbatch_cli.data.model_store import cached_entry
from tests.data.default_model import DEFAULT_MODEL, default_model_dir


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_an_empty_cache_lists_what_can_be_fetched(empty_cache):
    lines = run().stdout.splitlines()
    assert lines[0] == "Built in:" and lines[1].startswith(f"  {DEFAULT_MODEL}  not cached (93 MB to fetch")
    assert lines[-1] == f"Nothing is cached in {empty_cache / 'models'}."


def test_the_cache_is_listed_with_sizes_and_origins(empty_cache):
    path = cached_entry(
        "tiny-0123", "/data/tiny.gguf", lambda out: (out / "x").write_bytes(bytes(2_000_000)), lambda line: None
    )
    assert "       2 MB  tiny-0123  from /data/tiny.gguf" in run().stdout
    os.truncate(path / "x", 5)
    assert "tiny-0123  damaged: it is made again" in run().stdout


def test_pull_prints_the_directory():
    default_model_dir()
    result = run("pull", DEFAULT_MODEL)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{default_model_dir()}\n", "")
    assert f"  {DEFAULT_MODEL}  cached      SmolLM2-135M-Instruct" in run().stdout
