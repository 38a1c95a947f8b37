"""Runs killed with SIGKILL at random moments and resumed, many times over, end as if nothing had happened."""

import random
import signal
import subprocess
import sys
import time
from itertools import count

import pytest

from tests.cli.scripted import ROOT, command, environment, generate, read_records, write_model, write_rows

NUM_ROWS = 300


def rows(rng):
    """Rows of many lengths, duplicates, rows of several samples and bad rows among them."""
    for index in range(NUM_ROWS):
        kind = index % 25
        if kind == 7:
            yield {"id": f"r{index}", "max_tokens": 5}
        elif kind == 13:
            yield {"prompt": "the same again", "max_tokens": 12}
        else:
            yield {
                "id": f"r{index}",
                "prompt": "word " * rng.randint(1, 12) + str(index),
                "max_tokens": rng.randint(1, 40),
                **({"n": 3, "temperature": 1.0} if kind == 3 else {}),
            }


def outcome(record):
    """What must not depend on where a run was cut: everything but how much of the prompt happened to be cached."""
    usage = record["usage"] and {name: number for name, number in record["usage"].items() if name != "cached_tokens"}
    return {**record, "usage": usage}


def wait_for_the_moment(process, output, rng):
    """Lets a run go on to a random moment: after a while, in the midst of its repair, or after some more records."""
    moment = rng.choice(["time", "repair", "record"])
    size = output.stat().st_size if output.exists() else 0
    deadline = time.monotonic() + (rng.uniform(0.2, 1.2) if moment == "time" else 3.0)
    while process.poll() is None and time.monotonic() < deadline:
        if moment == "repair" and any(output.parent.glob(f"{output.name}*.resume")):
            return
        if moment == "record" and output.exists() and output.stat().st_size > size:
            time.sleep(rng.uniform(0, 0.05))
            return
        time.sleep(0.0005)


def run_with_kills(arguments, output, num_kills, rng):
    """Starts and kills `num_kills` times, then lets it come to its end; how many of the kills met a running process."""
    num_met = 0
    for number in count():
        process = subprocess.Popen(
            [*command("generate", *arguments), *(["--resume"] if number else [])],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(STEP_S=0.012 if number < num_kills else 0),
            cwd=ROOT,
        )
        if number < num_kills:
            wait_for_the_moment(process, output, rng)
            process.kill()
        _, errors = process.communicate(timeout=120)
        if number == num_kills:
            assert process.returncode == 1, errors.decode()
            return num_met
        assert process.returncode in (-signal.SIGKILL, 1), errors.decode()
        num_met += process.returncode == -signal.SIGKILL
    raise AssertionError


def check_killed_runs(tmp_path, order, seed, num_kills):
    rng = random.Random(seed)
    model = write_model(tmp_path / "model")
    source = write_rows(tmp_path / "rows.jsonl", rows(rng))
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    settings = (
        source,
        "-m",
        model,
        "--order",
        order,
        "--set",
        "scheduler.max_batch_size=8",
        "--set",
        "cache.num_blocks=30",
        "-q",
    )
    assert generate(*settings, "-o", whole).returncode == 1
    num_met = run_with_kills((*settings, "-o", output), output, num_kills, rng)
    assert num_met >= num_kills - 2, "too few of the kills met a running process"

    records = read_records(output)
    indices = [record["index"] for record in records]
    assert indices == list(range(NUM_ROWS)) if order == "input" else sorted(indices) == list(range(NUM_ROWS))
    expected = {record["index"]: outcome(record) for record in read_records(whole)}
    assert {record["index"]: outcome(record) for record in records} == expected
    left = {path.name for path in tmp_path.glob("out.jsonl*")}
    assert left == {"out.jsonl", "out.jsonl.meta.json"}


@pytest.mark.parametrize("order", ["completion", pytest.param("input", marks=pytest.mark.slow)])
def test_twenty_kills(tmp_path, order):
    check_killed_runs(tmp_path, order, 1, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("order", ["completion", "input"])
def test_two_hundred_kills(tmp_path, order, seed):
    check_killed_runs(tmp_path, order, 100 + seed, 10)


@pytest.mark.slow
def test_kills_with_the_real_model(tmp_path):
    rng = random.Random(5)
    prompts = [{"id": index, "prompt": f"{index} is a number. The next is", "max_tokens": 4 + index % 9} for index in range(16)]
    source, output, whole = write_rows(tmp_path / "rows.jsonl", prompts), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    real = [sys.executable, "-m", "contbatch_cli", "generate", str(source), "--order", "input", "-q"]
    real += ["--set", "scheduler.max_batch_size=4", "--set", "model.device=cpu"]
    subprocess.run([*real, "-o", str(whole)], check=True, cwd=ROOT, timeout=600)
    for number in range(3):
        process = subprocess.Popen([*real, "-o", str(output), *(["--resume"] if number else [])], cwd=ROOT)
        if number < 2:
            size = output.stat().st_size if output.exists() else 0
            while process.poll() is None and not (output.exists() and output.stat().st_size > size):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
        process.wait(timeout=600)
    assert process.returncode == 0
    expected = {record["index"]: record["text"] for record in read_records(whole)}
    records = read_records(output)
    assert len(records) == len(expected)
    assert {record["index"]: record["text"] for record in records} == expected
