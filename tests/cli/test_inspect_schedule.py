from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contbatch_cli.build import Executor, Inputs, build_engine, open_model, prepare_job, resolved_config, stop_rule
from contbatch_cli.cli.rehearsal import Rehearsals, rehearsal_memory
from contbatch_cli.config_files import Effective, load_config
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import accepted, sampled_runs
from contbatch_cli.core.request import Request
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.simulate import OutputScript, SimulatedClock
from contbatch_cli.trace import format_header, header_line, iteration_line, read_trace

EOS = 2


def inspect(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contbatch_cli", "inspect-schedule", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def write_rows(path: Path, seed: int, num_rows: int = 40) -> Path:
    """At least three rows of token ids: some share a prefix, some are equal, some ask for two samples, one is no row."""
    rng = random.Random(seed)
    shared = [rng.randint(100, 40_000) for _ in range(40)]
    rows: list[Any] = []
    for number in range(num_rows):
        ids = (shared if rng.random() < 0.4 else []) + [rng.randint(100, 40_000) for _ in range(rng.randint(1, 60))]
        row = {"id": f"row[{number}]", "prompt_token_ids": ids, "max_tokens": rng.randint(1, 40)}
        rows.append(row | ({"n": 2, "temperature": 1.0, "seed": number} if rng.random() < 0.2 else {}))
    rows.insert(7, {"id": "again", **{key: rows[2][key] for key in rows[2] if key != "id"}})
    rows.insert(11, {"nothing": 1})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class HashRunner:
    """A stand-in for a model: the next token follows from the tokens before it, and is now and then EOS."""

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        return BatchResult([self._result(one) if one.samples else SequenceResult() for one in batch.sequences])

    def _result(self, sequence: ScheduledSequence) -> SequenceResult:
        return accepted(sequence, [self._sampled(run) for run in sampled_runs(sequence)])

    def _sampled(self, sequence: ScheduledSequence) -> SequenceResult:
        rng = random.Random(f"{sequence.request_id} {sequence.end}")
        return SequenceResult((EOS if rng.random() < 0.05 else rng.randint(100, 103),))


def configure(**keys: object) -> Callable[..., Effective]:
    written = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return lambda more=(): load_config(assignments=[*written, *more])


def run(configured: Callable[..., Effective], inputs: Inputs) -> tuple[str, list[Request]]:
    """A run with the stand-in: its trace and its finished requests."""
    effective = configured()
    model = open_model(effective.config.model)
    job = prepare_job(effective, inputs, model, rehearsal_memory(effective.config, model), lambda fault: None)
    lines, done = [header_line(resolved_config(job), {}, job.rows.num_rows)], []
    rule = stop_rule(StopStringRule(model.tokenizer), Executor(HashRunner(), "made up"))
    for report in build_engine(job, HashRunner(), rule, SimulatedClock()).run():
        lines.append(iteration_line(report, job.rows.name_of))
        for request in (*report.finished, *report.duplicates):
            job.rows.finish(request)
            done.append(request)
    return "".join(lines), done


def write_output(path: Path, done: list[Request]) -> Path:
    """What `generate` would have written of it, with token ids."""
    rows: dict[int, dict[int, list[int]]] = {}
    for request in done:
        rows.setdefault(request.request_id.row, {})[request.request_id.sample] = request.output_ids
    with path.open("w") as file:
        for index, samples in rows.items():
            choices = [{"token_ids": samples[sample]} for sample in sorted(samples)]
            record: dict[str, Any] = {"index": index, "usage": {"completion_tokens": sum(map(len, samples.values()))}}
            record |= {"choices": choices} if len(choices) > 1 else choices[0]
            file.write(json.dumps(record) + "\n")
    return path


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"cache__num_blocks": 90, "cache__block_size": 2, "scheduler__token_budget": 24},
        {"cache__num_blocks": 90, "cache__block_size": 2, "scheduler__token_budget": 24, "scheduler__policy": "prefill_first"},
        {"scheduler__max_batch_size": 3, "scheduler__job_order": "longest_first", "scheduler__policy": "static"},
        {"scheduler__job_order": "input", "cache__prefix_caching": "false", "cache__num_blocks": 60, "cache__block_size": 2},
    ],
    ids=["auto", "small_cache", "prefill_first", "static", "no_prefixes"],
)
def test_a_rehearsal_fed_with_the_output_equals_the_run(tmp_path: Path, keys: dict[str, object]) -> None:
    inputs = Inputs((str(write_rows(tmp_path / "rows.jsonl", 5)),), InputOptions())
    configured = configure(**keys)
    trace, done = run(configured, inputs)
    script = OutputScript.from_file(write_output(tmp_path / "out.jsonl", done))
    schedule = Rehearsals(configured, inputs, script.again).schedule("")
    lines = trace.splitlines()
    header = json.loads(format_header(schedule.header))["header"]
    assert header | {"device": {}} == json.loads(lines[0])["header"]
    rehearsed = [iteration._replace(start_s=0, elapsed_s=0) for iteration in schedule.iterations]
    (tmp_path / "trace.jsonl").write_text(trace)
    measured = [iteration._replace(start_s=0, elapsed_s=0) for iteration in read_trace(tmp_path / "trace.jsonl")[1]]
    assert rehearsed == measured
    runs = [one for iteration in measured for one in iteration.scheduled]
    if keys.get("cache__num_blocks") != 60:
        assert 0 < sum(one.num_accepted for one in runs) < sum(one.num_drafts for one in runs)
    if keys.get("cache__num_blocks") == 90:
        assert any(iteration.preempted for iteration in measured)


def test_json_is_the_trace_format_and_a_replay_shows_the_same(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 1, 20)
    done = inspect(str(rows), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "trace.jsonl"
    path.write_text(done.stdout)
    header, iterations = read_trace(path)
    assert header["version"] == 1 and header["rows"] == 22 and header["config"]["scheduler"]["token_budget"] == 512
    num_iterations = len(list(iterations))
    replayed, rehearsed = inspect("--trace", str(path), "--iterations", "5"), inspect(str(rows), "--iterations", "5")
    assert replayed.returncode == 0 and f"{num_iterations} iterations" in replayed.stdout
    assert replayed.stdout.splitlines()[:7] == rehearsed.stdout.splitlines()[:7]
    assert re.search(r" row\[\d+\]:\d", replayed.stdout) and "\x1b" not in replayed.stdout
    again = inspect("--trace", str(path), "--json")
    assert again.stdout == done.stdout


def test_standard_input_can_be_compared_too(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 2, 15).read_text()
    done = inspect("-", "--compare", "stall_free,prefill_first,static", "--plot", str(tmp_path / "x.svg"), stdin=rows)
    assert done.returncode == 0, done.stderr
    head = done.stdout.splitlines()[0].split()
    assert head == ["stall_free", "prefill_first", "static"]
    assert (tmp_path / "x.svg").read_text().count("tokens a step") == 3


def test_a_sweep_ends_in_lines_to_paste(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 3, 15)
    sweeps = ("--sweep", "scheduler.token_budget=8,64,256", "--sweep", "cache.block_size=4,16")
    done = inspect(str(rows), *sweeps, "--output-lengths", "10")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("token_budget=")]
    assert len(table) == 6 and "*" in "".join(table)
    pasted = tmp_path / "c.yaml"
    pasted.write_text(done.stdout[done.stdout.index("scheduler:\n") :])
    assert load_config(pasted).config.cache.block_size in (4, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fifo"), "one of stall_free, prefill_first, static"),
        (("--compare", "static,,"), "empty value"),
        (("--sweep", "scheduler.token_budget"), "key.path=v1,v2"),
        (("--sweep", "scheduler.token_budgt=1,2"), "did you mean scheduler.token_budget"),
        (("--sweep", "scheduler.token_budget=1,2", "--json"), "--json writes one schedule"),
        (("--plot", "x.gif"), ".svg, .png or .html"),
        (("--output-lengths", "long"), "--output-lengths long"),
        (("--trace", "x"), "leave PROMPTS out"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = inspect(str(write_rows(tmp_path / "rows.jsonl", 4, 5)), *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_no_torch_is_imported(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4, 5)
    code = (
        "import sys\nfrom contbatch_cli.cli.app import main\n"
        f"try: main(['inspect-schedule', {str(rows)!r}])\n"
        "finally: print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr
