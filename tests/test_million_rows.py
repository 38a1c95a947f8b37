"""Big jobs: memory that does not grow with the rows, and speed from reading to record, all of it but the model.

Rows a second are of the machine too, and one that others use changes its speed from second to second. So they are asked of a core
of a stated speed, by what a row costs at the least by the libraries alone (see `Times`), measured in the same process in the same
seconds; and a row's cost in these bare necessities has a bound of its own, which is tighter.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.cli.scripted import ROOT, command, environment, write_model

WORKING_MEMORY_MB = 200
"""What a job of any size may take more than one of 10,000 rows: mostly the look-ahead window of 65,536 rows."""

MOST_COST = 4.5
"""Of a row, in bare necessities."""

REFERENCE_S = 22e-6
"""CPU seconds of the bare necessities of a row on the core of which rows a second are asked; on a faster one they count as they are."""


def write_small_rows(path, count):
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f'{{"id":"row-{index}","prompt":"Say {index}","max_tokens":2}}\n' for index in range(count))


class Run(NamedTuple):
    """`rows_per_s` is of CPU time here, the scripted runner's too, on a core `slow` times slower than the reference, at least 1.

    `cost` is the CPU time of a row without the runner's, in bare necessities.
    """

    peak_mb: float
    rows_per_s: float
    slow: float
    cost: float


def measured_run(directory, count, *options):
    """Runs a job of `count` rows."""
    source, output, times = (directory / f"{count}.{ending}" for ending in ("jsonl", "out.jsonl", "times.json"))
    write_small_rows(source, count)
    arguments = command("generate", source, "-m", directory / "model", "-o", output, "-q", "--overwrite", *options)
    process = subprocess.Popen(arguments, env=environment(TIMES=times), cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    check_indices(output, count, "input" in options)
    measured = json.loads(times.read_text())
    seconds = usage.ru_utime + usage.ru_stime - measured["bare_s"]
    bare_s = measured["bare_s"] / measured["bare_rows"]
    cost = (seconds - measured["runner_s"]) / count / bare_s
    peak_mb = usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)
    return Run(peak_mb, count / seconds, max(bare_s / REFERENCE_S, 1.0), cost)


def check_indices(output, count, is_in_order):
    """Every index once; records begin with them."""
    seen = bytearray(count)
    with output.open("rb") as file:
        for number, line in enumerate(file):
            assert line.startswith(b'{"index":') and line.endswith(b"}\n")
            index = int(line[9 : line.index(b",")])
            assert not is_in_order or index == number
            seen[index] += 1
    assert seen == b"\1" * count


def check_big_job(directory, count, rows_per_s, *options):
    write_model(directory / "model")
    small = measured_run(directory, 10_000, *options)
    big = measured_run(directory, count, *options)
    if big.rows_per_s * big.slow <= rows_per_s or big.cost >= MOST_COST:  # what shares the machine slows it: once more
        big = measured_run(directory, count, *options)
    memory = f"{big.peak_mb:.0f} MB ({small.peak_mb:.0f} MB for 10,000)"
    speed = f"{big.rows_per_s:,.0f} rows/s of CPU time on a core {big.slow:.2f} times slower than the reference"
    print(f"\n{count:,} rows: {memory}, {speed}, {big.cost:.2f} times the bare necessities")
    assert big.peak_mb - small.peak_mb < WORKING_MEMORY_MB
    assert big.rows_per_s * big.slow > rows_per_s
    assert big.cost < MOST_COST


def test_a_hundred_thousand_rows(tmp_path):
    check_big_job(tmp_path, 100_000, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_million_rows(tmp_path, order):
    check_big_job(tmp_path, 1_000_000, 10_000, "--order", order)
