"""The command line's shell as a user meets it: help, version, statuses, pipes, and what a start costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path

import pytest

from contbatch_cli import __version__
from contbatch_cli.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "transformers", "jinja2", "numpy", "tokenizers", "yaml"]


def contbatch(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contbatch_cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **settings)  # type: ignore[call-overload, no-any-return]


def existing_commands() -> list[str]:
    return [name for name, entry in COMMANDS.items() if (ROOT / f"{entry.module.replace('.', '/')}.py").is_file()]


def test_help_lists_the_commands_that_exist() -> None:
    done = contbatch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line[:3].strip()]
    assert listed == existing_commands()


@pytest.mark.parametrize("name", existing_commands())
def test_each_command_has_help_that_stays_torch_free(name: str) -> None:
    program = (
        "import sys\nfrom contbatch_cli.cli.app import main\n"
        f"try:\n    main([{name!r}, '--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "sys.exit(','.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: contbatch {name} ")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom contbatch_cli.cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"sys.exit(','.join(set({HEAVY!r}) & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_answers_in_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        contbatch("--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_version() -> None:
    assert contbatch("--version").stdout == f"contbatch {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [(), ("confg",), ("config", "--tmperature", "1"), ("config", "--max-tokens", "x"), ("--nope",)]
)
def test_usage_errors_end_with_status_2_and_leave_standard_output_alone(arguments: tuple[str, ...]) -> None:
    done = contbatch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: contbatch" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_ours_is_one_line() -> None:
    done = contbatch("config", "--max-tokens", "-3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "contbatch: --max-tokens -3: must be a whole number of at least 0\n"


def test_control_characters_of_foreign_text_do_not_reach_the_terminal() -> None:
    done = contbatch("config", "--set", "model.x\x1b[31m\nnext=1")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


def test_an_error_of_ours_survives_a_closed_standard_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m contbatch_cli config --max-tokens -3 2>&-", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("arguments", ["--help", "config --help", "config --schema", "config"])
def test_a_reader_that_goes_away_ends_it_quietly(arguments: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "contbatch_cli", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_bug_keeps_its_plain_traceback() -> None:
    program = (
        "import contbatch_cli.cli.options as options\nfrom contbatch_cli.cli.app import main\n"
        "def broken(*_, **__):\n    raise ZeroDivisionError('seven over nothing')\n"
        "options.load_config = broken\nmain(['config'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.rstrip().endswith("ZeroDivisionError: seven over nothing")


def test_config_shows_values_with_their_origins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sampling:\n  temperature: 1e-5\n")
    done = contbatch("config", "-c", str(file), "--set", "cache.memory=2GiB", "-m", "x/y", "--stop", "[b]", "--stop", "two")
    lines = [line.split("  # ") for line in done.stdout.splitlines() if "#" in line]
    shown = {entry.strip(): origin for entry, origin in lines if origin != "default"}
    assert shown == {
        "name: x/y": "--model",
        'memory: "2GiB"': "--set",
        "temperature: 1e-05": f"{file}:2",
        'stop: ["[b]", "two"]': "--stop",
    }


def test_config_has_every_option_that_sets_a_key() -> None:
    """What a job would run with, by its own options."""
    from contbatch_cli.cli.config import config
    from contbatch_cli.cli.generate import generate
    from contbatch_cli.cli.inspect_schedule import inspect_schedule
    from contbatch_cli.cli.options import effective_config

    keys = set(signature(effective_config).parameters)
    for command in (config, generate, inspect_schedule):
        assert keys <= set(signature(command).parameters), command


def test_config_schema_is_json() -> None:
    assert json.loads(contbatch("config", "--schema").stdout)["properties"].keys() >= {"model", "sampling"}


def test_works_in_the_c_locale() -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    done = contbatch("config", "--set", "model.name=é", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
