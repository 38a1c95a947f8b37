"""Real processes killed at random moments, also while they resume: in the end each row has exactly one whole record."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contbatch_cli.data.readers import read_rows

WORKER = """
import random, sys, time
from contbatch_cli.data.output_file import open_output
from contbatch_cli.data.readers import read_rows
from contbatch_cli.data.resume import resume_output
from contbatch_cli.data.writer import output_writer
source, path, order, seed = sys.argv[1:]
print("started", flush=True)
output = open_output(path, "resume")
plan = resume_output(output, {"model": "tiny"}, order, read_rows([source]))
writer = output_writer(output, order, time.monotonic, plan.first, plan.waiting)
rows = list(plan.remaining(read_rows([source])))
random.Random(int(seed)).shuffle(rows)
for row in rows:
    text = row.prompt.text * 3
    writer.write(row.index, b'{"index":%d,"text":"%s","error":null,"row_hash":"%s"}\\n'
                 % (row.index, text.encode(), row.row_hash.encode()))
    time.sleep(0.0005)
writer.close()
output.close()
"""


def start(source, path, order, seed):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(source), str(path), order, str(seed)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def killed_and_resumed(tmp_path, seed, num_kills):
    rng = random.Random(seed)
    source, path = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"prompt": f"row {i} " * 5}) + "\n" for i in range(400)))
    for kill in range(num_kills):
        worker = start(source, path, rng.choice(["completion", "input"]), kill)
        worker.stdout.readline()
        time.sleep(rng.random() * 0.15)
        worker.kill()
        worker.communicate(timeout=60)
    order = rng.choice(["completion", "input"])
    last = start(source, path, order, 0)
    last.communicate(timeout=60)
    assert last.returncode == 0
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    if order == "completion":
        records.sort(key=lambda record: record["index"])
    rows = list(read_rows([str(source)]))
    assert [record["index"] for record in records] == [row.index for row in rows]
    assert [record["text"] for record in records] == [row.prompt.text * 3 for row in rows]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out", "out.meta.json"]


@pytest.mark.parametrize("seed", range(3))
def test_killed_and_resumed(tmp_path, seed):
    killed_and_resumed(tmp_path, seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_and_resumed_many_times(tmp_path, seed):
    killed_and_resumed(tmp_path, 100 + seed, 12)
