"""Replicas on a real local Ray with several simulated nodes: the product's command line, with a scripted runner in its replicas."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scripted import write_model

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
ROWS = 120
POISON = 258


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, a node with one and a node with two."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for num_cpus in (1, 2):
        made.add_node(num_cpus=num_cpus, object_store_memory=80 * 2**20)
    yield made
    made.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Runs:
    """Starts the command in a directory of its own, and knows what its replicas left there."""

    def __init__(self, directory: Path, model: Path, address: str | None) -> None:
        self.output = directory / "out.jsonl"
        self.rows = directory / "rows.jsonl"
        self.pids = directory / "pids"
        self.pids.mkdir()
        self._model = model
        self._address = address
        rng = random.Random(5)
        self.write_rows(
            [
                {"prompt": f"row {index} " + "x" * rng.randint(1, 40), "max_tokens": rng.randint(1, 60), "seed": 3}
                | ({"temperature": 1.0} if index % 3 == 0 else {})
                for index in range(ROWS)
            ]
        )

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def start(self, *arguments: str, step_s: float = 0.0, **settings: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SCRIPTED_PIDS": str(self.pids),
            "SCRIPTED_STEP_S": str(step_s),
            "SCRIPTED_TOGETHER": arguments[arguments.index("--replicas") + 1] if "--replicas" in arguments else "1",
        }
        address = ["--set", f"cluster.address={self._address}"] if self._address and "--replicas" in arguments else []
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.scripted", "generate", str(self.rows), "-m", str(self._model)]
            + ["--set", "scheduler.max_batch_size=4", *address, *arguments],
            env=environment | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, status: int = 0, step_s: float = 0.0, **settings: str) -> tuple[str, str]:
        started = self.start(*arguments, step_s=step_s, **settings)
        output, messages = started.communicate(timeout=180)
        assert started.returncode == status, messages
        return output, messages

    def to_file(self, *arguments: str, step_s: float = 0.0, **settings: str) -> subprocess.Popen[str]:
        return self.start("-o", str(self.output), *arguments, step_s=step_s, **settings)

    def records(self) -> list[dict[str, Any]]:
        """The records of the output, each row's exactly once, in order of the rows."""
        found = records_of(self.output.read_text())
        assert [record["index"] for record in found] == list(range(len(found)))
        return found

    def replica_pids(self) -> list[int]:
        return [int(file.name) for file in self.pids.iterdir()]

    def wait_for_records(self, number: int) -> None:
        wait_until(lambda: self.output.exists() and self.output.read_bytes().count(b"\n") >= number)


def records_of(text: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, text.splitlines()), key=lambda record: record["index"])


def wait_until(is_so: Callable[[], bool], limit_s: float = 90.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < ends_s, f"not within {limit_s} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def runs(tmp_path: Path, model: Path, cluster: Any) -> Runs:
    return Runs(tmp_path, model, cluster.address)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    """The texts of the job without Ray."""
    output, _ = Runs(tmp_path_factory.mktemp("alone"), model, None).run("-q")
    return [record["text"] for record in records_of(output)]


def test_the_text_does_not_depend_on_the_number_of_replicas(runs: Runs, texts: list[str]) -> None:
    for replicas, described in (("1", "1 replica, 2 threads each"), ("3", "3 replicas, 1 thread each")):
        output, messages = runs.run("--replicas", replicas)
        found = records_of(output)
        assert [record["index"] for record in found] == list(range(ROWS))
        assert [record["text"] for record in found] == texts
        assert described in messages
        assert f"rows      {ROWS} good, 0 bad" in messages
    assert len(runs.replica_pids()) == 4


def test_standard_output_carries_records_only_and_a_trace_names_replicas(runs: Runs, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    output, messages = runs.run("--replicas", "2", "-q", "--trace", str(trace), SCRIPTED_NOISE="noise\n")
    assert len(records_of(output)) == ROWS
    assert messages == ""
    lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert {line["replica"] for line in lines} == {0, 1}
    finished = [row for line in lines for row in line["finished"]]
    assert sorted(finished) == list(range(ROWS))


def test_a_replica_killed_in_mid_run_loses_no_row(runs: Runs, texts: list[str]) -> None:
    started = runs.to_file("--replicas", "3", step_s=0.02)
    runs.wait_for_records(20)
    os.kill(runs.replica_pids()[0], signal.SIGKILL)
    _, messages = started.communicate(timeout=180)
    assert started.returncode == 0, messages
    assert [record["text"] for record in runs.records()] == texts
    assert "was lost" in messages and "to run again" in messages


@pytest.mark.slow
def test_a_removed_node_loses_no_row(runs: Runs, texts: list[str], cluster: Any) -> None:
    extra = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started = runs.to_file("--replicas", "4", step_s=0.03)
    runs.wait_for_records(20)
    assert extra.node_id in {file.read_text() for file in runs.pids.iterdir()}
    cluster.remove_node(extra, allow_graceful=False)
    _, messages = started.communicate(timeout=180)
    assert started.returncode == 0, messages
    assert [record["text"] for record in runs.records()] == texts
    assert "was lost" in messages


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
)
def test_a_run_that_is_ended_leaves_no_actors_and_can_be_resumed(
    runs: Runs, texts: list[str], number: signal.Signals, status: int
) -> None:
    started = runs.to_file("--replicas", "2", step_s=0.03)
    runs.wait_for_records(20)
    before = runs.replica_pids()
    assert len(before) == 2 and all(map(is_alive, before))
    started.send_signal(number)
    _, messages = started.communicate(timeout=90)
    assert started.returncode == status, messages
    wait_until(lambda: not any(map(is_alive, before)))
    assert 20 <= runs.output.read_bytes().count(b"\n") < ROWS
    if number is not signal.SIGKILL:
        return
    resumed = runs.to_file("--replicas", "3", "--resume")
    _, messages = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, messages
    assert [record["text"] for record in runs.records()] == texts


def test_a_row_that_kills_its_replicas_becomes_an_error_record(runs: Runs, texts: list[str]) -> None:
    rows = [json.loads(line) for line in runs.rows.read_text().splitlines()]
    runs.write_rows([*rows[:50], {"prompt_token_ids": [POISON, 65], "max_tokens": 4}, *rows[50:]])
    started = runs.to_file("--replicas", "2", "--set", "cluster.max_attempts=2", step_s=0.005, SCRIPTED_POISON=str(POISON))
    _, messages = started.communicate(timeout=180)
    assert started.returncode == 1, messages
    records = runs.records()
    bad = records.pop(50)
    assert bad["error"]["code"] == "replica_lost"
    assert "lost 2 times" in bad["error"]["message"]
    assert [record["finish_reason"] for record in records].count("error") == 0
    assert [record["text"] for record in records][:50] == texts[:50]


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_reported_and_the_others_go_on(runs: Runs, texts: list[str]) -> None:
    output, messages = runs.run("--replicas", "2", "--set", "cluster.max_restarts=0", step_s=0.03, SCRIPTED_NO_START="1")
    assert [record["text"] for record in records_of(output)] == texts
    assert "could not start: RuntimeError: scripted: this one does not start" in messages


def test_without_any_replica_the_run_fails_in_one_line(runs: Runs) -> None:
    output, messages = runs.run("--replicas", "2", "--set", "cluster.max_restarts=0", status=3, SCRIPTED_NO_START="9")
    assert output == ""
    assert messages == "contbatch: none of 2 replicas could start: scripted: this one does not start\n"


def test_more_gpus_than_there_are_are_refused(runs: Runs) -> None:
    output, messages = runs.run("--replicas", "5", "--set", "model.device=cuda", status=2)
    assert (output, messages) == ("", "contbatch: cluster.replicas 5: each needs a GPU: 0 on 3 machines\n")


def test_ctrl_c_for_the_whole_process_group_ends_a_ray_of_our_own(tmp_path: Path, model: Path) -> None:
    alone = Runs(tmp_path, model, None)
    started = alone.to_file("--replicas", "2", step_s=0.03)
    alone.wait_for_records(5)
    before = alone.replica_pids()
    os.killpg(started.pid, signal.SIGINT)
    output, messages = started.communicate(timeout=90)
    assert (started.returncode, output) == (130, ""), messages
    assert messages.splitlines()[-1].startswith("contbatch: interrupted; rows without a record")
    assert "Traceback" not in messages
    wait_until(lambda: not any(map(is_alive, before)))


@pytest.mark.parametrize("slow", ["SCRIPTED_LOAD_S", pytest.param("SCRIPTED_STEP_S", marks=pytest.mark.slow)])
def test_max_time_holds_while_no_replica_reports(runs: Runs, slow: str) -> None:
    """None has loaded yet, or the only one is stuck in a step."""
    began_s = time.monotonic()
    limit = "1s" if slow == "SCRIPTED_LOAD_S" else "12s"
    output, messages = runs.run("--replicas", "1", "--max-time", limit, status=1, **{slow: "100"})
    assert time.monotonic() - began_s < 60
    found = records_of(output)
    assert [record["index"] for record in found] == list(range(ROWS))
    assert {record["error"]["code"] for record in found} == {"cancelled"}
    assert f"0 good, 0 bad, {ROWS} cancelled" in messages
