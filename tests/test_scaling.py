"""Nothing grows faster than the number of rows: calls are counted, and processor time is compared with room to spare."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from contbatch_cli import build
from contbatch_cli.cli.batch_run import collector_at_rest
from contbatch_cli.config_files import load_config
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.engine import InferenceEngine
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import build_scripted_executor, write_model

PROMPT, OUTPUT = 24, 12
FEW, MANY = 64, 1024


class Job(NamedTuple):
    """A job whose rows are read and whose model is a script, ready to run."""

    engine: InferenceEngine
    num_tokens: int
    finish: Callable[[Any], None]

    def run(self) -> int:
        """To the end; the number of iterations."""
        count = 0
        for report in self.engine.run():
            count += 1
            for request in report.finished:
                self.finish(request)
        return count


def job_of(directory: Path, num_rows: int, seats: int) -> Job:
    """Rows that differ from their first token on, of equal lengths."""
    model_dir = directory / "model"
    if not model_dir.exists():
        write_model(model_dir)
    rows = directory / f"{num_rows}.jsonl"
    prompts = ([row % 251, row // 251, *range(PROMPT - 2)] for row in range(num_rows))
    rows.write_text(
        "".join(json.dumps({"prompt_token_ids": ids, "max_tokens": OUTPUT, "ignore_eos": True}) + "\n" for ids in prompts)
    )
    settings = [f"model.name={model_dir}", "model.device=cpu", f"scheduler.max_batch_size={seats}"]
    effective = load_config(None, [*settings, "scheduler.token_budget=1024"])
    model = build.open_model(effective.config.model)
    inputs = build.Inputs((str(rows),), InputOptions())
    memory = DeviceMemory("cpu", 1 << 28)
    job = build.prepare_job(effective, inputs, model, memory, lambda fault: pytest.fail(fault.message))
    executor, texts = build_scripted_executor(job), StopStringRule(model.tokenizer)
    assert executor.runner is not None

    def finish(request: Any) -> None:
        done = job.rows.finish(request)
        assert done is not None
        build.complete(texts, model, request, done.row)

    engine = build.build_engine(job, executor.runner, build.stop_rule(texts, executor), lambda: 0.0)
    return Job(engine, num_rows * (PROMPT + OUTPUT), finish)


def num_calls(action: Callable[[], object]) -> int:
    """Calls of Python and of built-in functions within it."""
    count = 0

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profiler)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("seats", [32, MANY])
def test_calls_per_token_do_not_grow_with_the_rows(tmp_path: Path, seats: int) -> None:
    few, many = (job_of(tmp_path, rows, seats) for rows in (FEW, MANY))
    per_token = [num_calls(job.run) / job.num_tokens for job in (few, many)]
    assert per_token[1] < 1.1 * per_token[0], per_token


def test_calls_to_read_and_prepare_a_row_do_not_grow_with_the_rows(tmp_path: Path) -> None:
    job_of(tmp_path, 1, 32)
    one, few, many = (num_calls(partial(job_of, tmp_path, rows, 32)) for rows in (1, FEW, MANY))
    assert (many - one) / (MANY - 1) < 1.1 * (few - one) / (FEW - 1)


@pytest.mark.parametrize("seats", [32, MANY])
def test_processor_time_per_token_does_not_grow_with_the_rows(tmp_path: Path, seats: int) -> None:
    """The best of a few runs each, so that a busy machine does not show; twice is far below what a square would give, 16 times."""

    def best_s(num_rows: int, runs: int) -> float:
        found = []
        for _ in range(runs):
            job = job_of(tmp_path, num_rows, seats)
            with collector_at_rest():  # as in a run of the command
                began_s = time.process_time()
                job.run()
                found.append((time.process_time() - began_s) / job.num_tokens)
        return min(found)

    per_token = best_s(FEW, 5), best_s(MANY, 3)
    assert per_token[1] < 2 * per_token[0], per_token


def test_iterations_are_as_many_as_the_seats_need(tmp_path: Path) -> None:
    """Equal rows in full seats: once the first are through, each round of seats takes its prompts' and its outputs' steps."""
    iterations = [job_of(tmp_path, rows, 32).run() for rows in (FEW, MANY)]
    assert iterations[1] <= iterations[0] * MANY / FEW
