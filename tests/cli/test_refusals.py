"""What is refused is refused in one line that names the option, its value and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contbatch_cli import build, machine
from contbatch_cli.config_files import load_config
from tests.cli.scripted import Done, call, write_model, write_rows


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"hello {k}", "max_tokens": 2} for k in range(3)])
    return tmp_path


def refused(*arguments: object) -> str:
    """The one line of a command that must not run."""
    done: Done = call(*arguments)
    assert (done.status, done.output) == (2, b""), done
    assert done.errors.startswith("contbatch: ") and done.errors.count("\n") == 1, done.errors
    return done.errors


@pytest.mark.parametrize(
    "option",
    [
        ("rows.jsonl",),
        ("-c", "rows.jsonl"),
        ("--set", "scheduler.token_budget=4"),
        ("-m", "model"),
        ("--policy", "static"),
        ("--compare", "static,stall_free"),
        ("--sweep", "scheduler.token_budget=4,5"),
        ("--output-lengths", "5"),
        ("--limit", "0"),
        ("--max-tokens", "0"),
        ("--seed", "0"),
        ("--template", ""),
        ("--raw",),
    ],
)
def test_a_replay_refuses_what_it_cannot_honour(job: Path, option: tuple[str, ...]) -> None:
    assert call("generate", "rows.jsonl", "-m", "model", "--trace", "run.jsonl").status == 0
    assert call("inspect-schedule", "--trace", "run.jsonl").status == 0
    name = option[0] if option[0].startswith("-") else "PROMPTS"
    assert f"leave {name} out" in refused("inspect-schedule", "--trace", "run.jsonl", *option)


def test_all_values_of_a_sweep_are_checked_first_and_the_option_is_named(job: Path) -> None:
    rehearse = ("inspect-schedule", "rows.jsonl", "-m", "model")
    assert "--sweep scheduler.token_budget=0: must be" in refused(*rehearse, "--sweep", "scheduler.token_budget=8,0")
    assert "--sweep scheduler.token_budgt=8: unknown key" in refused(*rehearse, "--sweep", "scheduler.token_budgt=8")
    assert "--set scheduler.token_budgt=8: unknown key" in refused(*rehearse, "--set", "scheduler.token_budgt=8")
    assert "exclude each other" in refused(*rehearse, "--policy", "static", "--compare", "static")


def test_files_of_the_wrong_kind(job: Path) -> None:
    Path("no.jsonl").write_text('{"header": {"version": 1}}\n{"iteration": 1}\n')
    Path("latin.j2").write_bytes(b"\xff")
    rehearse = ("inspect-schedule", "rows.jsonl", "-m", "model")
    for arguments, message in (
        ((*rehearse, "--output-lengths", "@rows.jsonl"), "--output-lengths @rows.jsonl, line 1: it should be a record"),
        (("inspect-schedule", "--trace", "no.jsonl"), "no.jsonl, line 2: no iteration of a trace: it has no 'scheduled'"),
        (("inspect-schedule", "--trace", "rows.jsonl"), "rows.jsonl, line 1: no trace"),
        ((*rehearse, "--chat-template", "absent.j2"), "--chat-template absent.j2: No such file or directory"),
        ((*rehearse, "--chat-template", "latin.j2"), "--chat-template latin.j2: not UTF-8 at byte 0"),
    ):
        line = refused(*arguments)
        assert message in line and "Error" not in line, line


def test_a_resume_that_is_refused_says_what_to_do(job: Path) -> None:
    run = ("generate", "rows.jsonl", "-m", "model", "-o", "out.jsonl")
    assert call(*run).status == 0
    assert "--overwrite starts anew" in refused(*run, "--resume", "--temperature", "1")
    write_rows(Path("rows.jsonl"), [{"prompt": "hello 0", "max_tokens": 2}])
    assert "--rerun-changed drops what is gone" in refused(*run, "--resume")
    assert call(*run, "--resume", "--rerun-changed").status == 0
    Path("out.jsonl.meta.json").unlink()
    assert "--overwrite starts anew" in refused(*run, "--resume")


def test_a_revision_of_what_has_none(job: Path) -> None:
    Path("some.gguf").write_bytes(b"GGUF")
    for name, kind in (("model", "a directory"), ("smollm2-135m-instruct", "a built-in name"), ("some.gguf", "a file")):
        for command in ("generate", "inspect-schedule"):
            line = refused(command, "rows.jsonl", "-m", name, "--set", "model.revision=v1")
            assert f"model {name!r}: is {kind} and has no revision 'v1'" in line
    assert "has no revision" in refused("models", "pull", "model", "--revision", "main")


def test_a_device_that_is_not_there(job: Path) -> None:
    import torch

    device = f"cuda:{torch.cuda.device_count()}"
    line = refused("generate", "rows.jsonl", "-m", "model", "--set", f"model.device={device}")
    assert f"model.device: '{device}' is not here" in line


def test_weights_of_adapters_are_not_free_for_the_cache(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 numbers of float32 in one, 500 in the other; files beside an adapter's own do not count."""
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 100_000)
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    write_tensors(Path("a"), "adapter_model.safetensors", {"x": 600, "y": 400})
    write_tensors(Path("b"), "adapter_model.safetensors", {"x": 500})
    write_tensors(Path("b"), "optimizer.safetensors", {"z": 9000})
    write_tensors(Path("model"), "model.safetensors", {"w": 2000})
    free = []
    for adapters in ({}, {"a": "a"}, {"a": "a", "b": "b"}):
        config = load_config(
            None, ["model.name=model", *(f"model.adapters.{name}={at}" for name, at in adapters.items())]
        ).config
        free.append(build.device_memory(config, build.open_model(config.model)).free_bytes)
    assert free == [92_000, 88_000, 86_000]
    write_tensors(Path("model"), "model.safetensors", {"w": 2000}, "BF16")
    config = load_config(None, ["model.name=model", "model.adapters.a=a"]).config
    for kernels, left in (("", 92_000), ("off", 88_000)):  # in 16 bits where the kernels keep them so; the adapter's in 32
        monkeypatch.setenv("CONTBATCH_KERNELS", kernels)
        assert build.device_memory(config, build.open_model(config.model)).free_bytes == left


def write_tensors(directory: Path, name: str, sizes: dict[str, int], dtype: str = "F32") -> None:
    directory.mkdir(exist_ok=True)
    offsets = [sum(list(sizes.values())[:i]) * (4 if dtype == "F32" else 2) for i in range(len(sizes) + 1)]
    header = {
        tensor: {"dtype": dtype, "shape": [size], "data_offsets": offsets[i : i + 2]}
        for i, (tensor, size) in enumerate(sizes.items())
    }
    text = json.dumps(header).encode()
    (directory / name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(offsets[-1]))


def test_a_driver_without_a_device_for_torch_means_the_cpu(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = load_config(None, ["model.name=model"]).config
    memory = build.device_memory(config, build.open_model(config.model))
    assert memory.kind == "cpu" and memory.free_bytes > 0
