"""A model over two processes with gloo: tokens, refusals, and what is left when something dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from contbatch_cli import build
from contbatch_cli.config import ModelConfig
from contbatch_cli.config_files import load_config
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.errors import EngineError, UsageError
from contbatch_cli.model.attention import cpu
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.memory import is_out_of_memory
from contbatch_cli.model.sampler import Sampler
from contbatch_cli.model.splitting import Executes, SplittingRunner
from contbatch_cli.model.tensor_parallel import CacheSizes, SplitModel, load_split, refuse_unsplittable, split_devices
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import write_model
from tests.model.test_families import config_of
from tests.model.tiny import (
    RashScheduler,
    Setting,
    draw_rows,
    llama_config,
    managers,
    one_thread,
    random_model,
    run_rows,
    shapes_of,
    windows_of,
)
from tests.oracle import Comparison, greedy_alone

__all__ = ["one_thread"]

ROOT = Path(__file__).parents[2]
Rows = list[tuple[list[int], SamplingParams]]
SETTING = Setting(token_budget=24, max_batch_size=6, block_size=4, num_blocks=30, is_rash=True)
"""Room for a row and a half of the longest: chunks beside decodes, and rows that lose their blocks."""
SPLIT_FAMILIES = (
    *("Llama", "Qwen3", "Gemma 2", "Gemma 3 (text)", "Mixtral", "DeepSeek-V2", "Mistral", "Qwen2", "Qwen2-MoE", "Qwen3-MoE"),
    *("Gemma", "Phi", "GPT-NeoX", "SmolLM3", "Granite", "Cohere", "Starcoder2"),
)


def write_random(config: PretrainedConfig, directory: Path) -> Any:
    """A tiny random model, as a directory that `generate` can run; returns it with transformers' own attention."""
    write_model(directory)
    (directory / "config.json").unlink()
    model = random_model(config)
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model


def split_over_two(directory: Path, model: Any, setting: Setting = SETTING) -> SplitModel:
    _, num_blocks, pool = managers(setting, windows_of_config(model))
    settings = ModelConfig(name=str(directory), device="cpu", tensor_parallel=2)
    return load_split(directory, settings, CacheSizes(num_blocks, setting.block_size, pool))


def windows_of_config(model: Any) -> Any:
    model.set_attn_implementation("contbatch")
    windows = windows_of(model)
    model.set_attn_implementation("eager")
    return windows


def sampler_of(split: SplitModel) -> Sampler:
    return Sampler(split.loaded.vocab_size)


def runner_of(split: SplitModel, model: Any, sampler: Any = None, setting: Setting = SETTING) -> Any:
    _, num_blocks, pool = managers(setting, windows_of_config(model))
    cache = KVCache(split.loaded.layers, num_blocks, setting.block_size, torch.float32, split.loaded.device, pool)
    cache.fill(float("nan"))
    return split.runner(cache, sampler or sampler_of(split))


def run(runner: Executes, model: Any, rows: Rows, setting: Setting = SETTING) -> tuple[dict[int, list[int]], int]:
    """All rows to their ends: output ids by row, and how often one was preempted."""
    kv, _, _ = managers(setting, windows_of_config(model))
    scheduler = RashScheduler(kv, setting.token_budget, setting.max_batch_size, standard_stop_rule)
    requests = [Request.from_prompt(RequestId(i), ids, params) for i, (ids, params) in enumerate(rows)]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
        scheduler.check()
    return {i: request.output_ids for i, request in enumerate(requests)}, sum(one.num_preemptions for one in requests)


def greedy_rows(seed: int, num_rows: int = 20) -> Rows:
    return draw_rows(random.Random(seed), num_rows, 40, 24)


def sampled_rows(seed: int) -> Rows:
    """Rows whose sampling reads histories and seeds."""
    extras = ({}, {"top_p": 0.8}, {"repetition_penalty": 1.2}, {"top_k": 5, "frequency_penalty": 0.5})
    return [
        (ids, replace(params, temperature=0.8, seed=i, **extras[i % len(extras)]))
        for i, (ids, params) in enumerate(greedy_rows(seed))
    ]


def compare_greedy(name: str, model: Any, outputs: dict[int, list[int]], rows: Rows) -> None:
    comparison = Comparison()
    for i, (ids, params) in enumerate(rows):
        comparison.add(f"row {i}", outputs[i], greedy_alone(model, ids, params.max_tokens))
    comparison.check(name)


class Llama:
    """The directory of a tiny Llama, the whole model, and the same over two processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.whole = write_random(llama_config(), directory)
        self.split = split_over_two(directory, self.whole)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    made = Llama(tmp_path_factory.mktemp("llama"))
    yield made
    made.split.ranks.close()


# One split model for these, in this order: the last two end it.


def test_each_rank_has_its_own_heads_and_tokens_are_those_of_generate(llama: Llama) -> None:
    assert {(shape.num_heads, shape.num_kv_heads) for shape in llama.split.loaded.layers} == {(2, 1)}
    assert {(shape.num_heads, shape.num_kv_heads) for shape in shapes_of(random_model(llama_config()))} == {(4, 2)}
    rows = greedy_rows(1)
    outputs, num_preemptions = run(runner_of(llama.split, llama.whole), llama.whole, rows)
    assert num_preemptions > 0
    compare_greedy("Llama, 2 processes", llama.whole, outputs, rows)


def test_seeded_rows_are_those_of_one_device(llama: Llama) -> None:
    rows = sampled_rows(2)
    outputs, _ = run(runner_of(llama.split, llama.whole), llama.whole, rows)
    whole = random_model(llama_config())
    alone = run_rows(whole, shapes_of(whole), rows, replace(SETTING, num_blocks=300, max_batch_size=1)).outputs
    assert outputs == alone


def test_a_step_whose_sampling_finds_no_memory_is_split(llama: Llama) -> None:
    class Short(Sampler):
        def sample(self, logits: torch.Tensor, sequences: Any) -> Any:
            if len(sequences) > 3:
                raise MemoryError
            return super().sample(logits, sequences)

    rows = greedy_rows(3)
    runner = SplittingRunner(runner_of(llama.split, llama.whole, Short(llama.split.loaded.vocab_size)), is_out_of_memory)
    outputs, _ = run(runner, llama.whole, rows)
    assert runner.num_splits > 0
    compare_greedy("Llama, split steps", llama.whole, outputs, rows)


def test_a_forward_pass_that_fails_in_one_rank_ends_all(llama: Llama) -> None:
    class Failing:
        prepare = staticmethod(cpu.prepare)

        @staticmethod
        def attend(*arguments: Any) -> torch.Tensor:
            raise MemoryError("no room for scores")

    inner = runner_of(llama.split, llama.whole)
    inner.backend = Failing
    runner = SplittingRunner(inner, is_out_of_memory)
    with pytest.raises(EngineError, match=r"model.tensor_parallel 2: .*no room for scores.*; lower scheduler.token_budget"):
        run(runner, llama.whole, greedy_rows(4))
    assert runner.num_splits == 0
    with pytest.raises(EngineError, match="no room for scores"):
        run(runner, llama.whole, greedy_rows(4))
    pids = llama.split.ranks.pids
    began_s = time.monotonic()
    llama.split.ranks.close()
    assert time.monotonic() - began_s < 3 and not any(is_alive(pid) for pid in pids)


def test_a_rank_that_is_killed_is_an_engine_error(llama: Llama) -> None:
    """And a second split model in the process takes the place of the first."""
    split = split_over_two(llama.directory, llama.whole)
    runner = runner_of(split, llama.whole)
    run(runner, llama.whole, greedy_rows(5, num_rows=4))
    os.kill(split.ranks.pids[0], signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was killed by signal 9"):
        run(runner, llama.whole, greedy_rows(5))
    assert time.monotonic() - began_s < 8
    split.ranks.close()
    assert not torch.distributed.is_initialized()


def test_what_cannot_be_split_is_refused_with_numbers() -> None:
    def refusal(config: PretrainedConfig, size: int) -> str:
        with pytest.raises(UsageError) as caught:
            refuse_unsplittable(config, size)
        return str(caught.value)

    llama = llama_config()
    llama.architectures = ["LlamaForCausalLM"]
    refuse_unsplittable(llama, 2)
    assert refusal(llama, 3) == (
        "model.tensor_parallel 3: LlamaForCausalLM cannot be split: 4 attention heads cannot be shared out evenly "
        "between 3 devices"
    )
    assert "2 key/value heads cannot be shared out evenly between 4 devices" in refusal(llama, 4)
    assert "gpt2 cannot be split: transformers has no plan for it" in refusal(GPT2Config(), 2)
    assert "every device would hold all of its key/value heads" in refusal(config_of("Phi-3"), 2)
    quantised = LlamaConfig(quantization_config={"quant_method": "fp8"})
    assert "its weights are quantised" in refusal(quantised, 2)


def test_devices_are_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert split_devices("cuda:1", 2) == [torch.device("cuda", 1), torch.device("cuda", 2)]
    assert split_devices("auto", 3) == [torch.device("cuda", rank) for rank in range(3)]
    with pytest.raises(UsageError, match="model.tensor_parallel 3: torch sees 2 CUDA devices from cuda:1 on"):
        split_devices("cuda:1", 3)
    with pytest.raises(UsageError, match="model.tensor_parallel 2: not on the CPU of this machine"):
        split_devices("cpu", 2)


# The command


def command(directory: Path, rows: Path, *more: str) -> list[str]:
    settings = ("--set", "model.device=cpu", "--set", "model.tensor_parallel=2", "--set", "output.token_ids=true")
    return [sys.executable, "-m", "contbatch_cli", "generate", str(rows), "-m", str(directory), *settings, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=300)


def write_lines(path: Path, rows: Rows, **more: Any) -> Path:
    lines = [json.dumps({"prompt_token_ids": ids, "max_tokens": params.max_tokens, **more}) for ids, params in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for rows of many tokens."""
    made = tmp_path_factory.mktemp("model")
    write_random(llama_config(), made)
    return made


def test_the_command(directory: Path, tmp_path: Path) -> None:
    rows = greedy_rows(6, num_rows=8)
    done = run_command(directory, write_lines(tmp_path / "rows.jsonl", rows))
    assert done.returncode == 0, done.stderr
    assert "2 processes of 1 thread, tensor parallel" in done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    outputs = {record["index"]: record["token_ids"] for record in records}
    compare_greedy("the command", AutoModelForCausalLM.from_pretrained(directory), outputs, rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.tensor_parallel=3",), "LlamaForCausalLM cannot be split: 4 attention heads cannot be shared out evenly"),
        (("engine.deterministic=true",), "model.tensor_parallel 2: cannot be had with engine.deterministic"),
    ],
)
def test_a_job_is_refused_before_anything_is_started(
    directory: Path, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", greedy_rows(7, num_rows=2))
    base = (f"model.name={directory}", "model.device=cpu", "model.tensor_parallel=2")
    effective = load_config(None, [*base, *settings])
    job = build.prepare_job(
        effective,
        build.Inputs((str(rows),), InputOptions()),
        build.open_model(effective.config.model),
        DeviceMemory("cpu", 1 << 30),
        lambda fault: pytest.fail(fault.message),
    )
    with pytest.raises(UsageError, match=message):
        build.build_executor(job)
    with pytest.raises(UsageError, match=r"cannot be had with model.adapters \(some\)"):
        adapters = replace(job.model, adapters={"some": directory})
        build.build_executor(replace(job, model=adapters, config=load_config(None, base).config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "to", "status", "last_line"),
    [
        (signal.SIGKILL, "rank", 3, "was killed by signal 9"),
        (signal.SIGKILL, "main", -9, ""),
        (signal.SIGINT, "group", 130, "contbatch: interrupted"),
        (signal.SIGTERM, "main", 143, "contbatch: interrupted"),
    ],
)
def test_no_process_is_left(
    directory: Path, tmp_path: Path, sent: signal.Signals, to: str, status: int, last_line: str
) -> None:
    rows = [([i + 1, 2, 3], SamplingParams(max_tokens=3000)) for i in range(40)]
    arguments = command(directory, write_lines(tmp_path / "rows.jsonl", rows, ignore_eos=True), "-o", str(tmp_path / "out"))
    with subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert any("running" in line for line in process.stderr), "it ended before its first step"
        ranks = children_of(process.pid)
        assert len(ranks) == 1
        targets = {"rank": ranks[0], "main": process.pid, "group": process.pid}
        (os.killpg if to == "group" else os.kill)(targets[to], sent)
        process.wait(timeout=20)
        last = process.stderr.read().splitlines()
    assert process.returncode == status
    assert last_line in (last[-1] if last else "")
    ends_s = time.monotonic() + 10
    while is_alive(ranks[0]) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not is_alive(ranks[0])


@pytest.mark.slow
def test_two_replicas_of_two_processes(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    rows = greedy_rows(9, num_rows=8)
    done = run_command(directory, write_lines(tmp_path / "rows.jsonl", rows), "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert "2 replicas" in done.stderr and "2 processes of 1 thread, tensor parallel" in done.stderr
    outputs = {record["index"]: record["token_ids"] for record in map(json.loads, done.stdout.splitlines())}
    compare_greedy("2 replicas", AutoModelForCausalLM.from_pretrained(directory), outputs, rows)


def is_alive(pid: int) -> bool:
    """Whether there is a process of that number that has not ended."""
    return _stat(pid) is not None


def children_of(pid: int) -> list[int]:
    found = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [child for child in found if (stat := _stat(child)) is not None and stat[1] == str(pid)]


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None for none, or one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Tied embeddings, windows with a pool of their own, experts, latent attention."""
    config = config_of(name)
    model = write_random(config, tmp_path)
    setting = replace(SETTING, num_blocks=40)
    whole = shapes_of(random_model(config))
    split = split_over_two(tmp_path, model, setting)
    try:
        assert [2 * shape.num_kv_heads for shape in split.loaded.layers] == [shape.num_kv_heads for shape in whole]
        rows = greedy_rows(8)
        outputs, _ = run(runner_of(split, model, setting=setting), model, rows, setting)
        compare_greedy(f"{name}, 2 processes", model, outputs, rows)
    finally:
        split.ranks.close()
