"""What `engine.deterministic` costs on a CPU: the same job with and without it, in one process, greedy, exact output lengths.

python tests/benchmarks/deterministic.py JOB.jsonl [--limit N]      rows with "prompt_token_ids" or "prompt", and "max_tokens"
python tests/benchmarks/deterministic.py --drawn 64                 rows drawn like a mixed job: 130 prompt and 93 output tokens
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from contbatch_cli.config import ModelConfig
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.core.stop import standard_stop_rule
from contbatch_cli.data import model_store
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.model.attention import backend_named
from contbatch_cli.model.deterministic import make_deterministic
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.loading import LoadedModel, load_model
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler

BLOCK_SIZE = 16


class Row(NamedTuple):
    prompt_ids: list[int]
    num_new: int


class Outcome(NamedTuple):
    seconds: float
    cpu_seconds: float
    iterations: int
    output_ids: list[list[int]]


def drawn_rows(count: int, vocab_size: int) -> list[Row]:
    rng = random.Random(0)
    return [Row([rng.randrange(vocab_size) for _ in range(rng.randint(16, 244))], rng.randint(24, 162)) for _ in range(count)]


def read_rows(path: Path, tokenizer: Tokenizer) -> list[Row]:
    records = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    return [
        Row(record.get("prompt_token_ids") or tokenizer.encode(record["prompt"]), record["max_tokens"]) for record in records
    ]


def run(loaded: LoadedModel, rows: Sequence[Row], seats: int, budget: int) -> Outcome:
    requests = [
        Request.from_prompt(RequestId(i), row.prompt_ids, SamplingParams(max_tokens=row.num_new, ignore_eos=True))
        for i, row in enumerate(rows)
    ]
    num_blocks = sum(-(-request.max_num_tokens // BLOCK_SIZE) for request in requests)
    scheduler = StallFreeScheduler(KVCacheManager(num_blocks, BLOCK_SIZE), budget, seats, standard_stop_rule)
    cache = KVCache(loaded.layers, num_blocks, BLOCK_SIZE, loaded.dtype, loaded.device)
    runner = ModelRunner(loaded.model, cache, loaded.backend, Sampler(loaded.vocab_size), loaded.device)
    for request in requests:
        scheduler.add_request(request)
    began, cpu_began, iterations = time.perf_counter(), time.process_time(), 0
    while scheduler.has_work():
        batch = scheduler.schedule_next_batch()
        scheduler.update(batch, runner.execute(batch))
        iterations += 1
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Outcome(seconds, cpu_seconds, iterations, [request.output_ids for request in requests])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, nargs="?")
    parser.add_argument("--drawn", type=int, default=64)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--budget", type=int, default=512)
    options = parser.parse_args()
    directory = model_store.resolve(options.model, None)
    loaded = load_model(directory, ModelConfig(device="cpu", dtype="float32"))
    drawn = drawn_rows(options.drawn, loaded.vocab_size)
    rows = (read_rows(options.job, Tokenizer.from_directory(directory)) if options.job else drawn)[: options.limit]
    tiled, _ = make_deterministic(loaded.model, loaded.layers, loaded.dtype)
    changed = replace(loaded, model=tiled, backend=backend_named("deterministic"))
    print(f"{len(rows)} rows, {sum(len(row.prompt_ids) for row in rows):,} prompt tokens, {torch.get_num_threads()} threads")
    outcomes = {}
    for name, model in (("plain", loaded), ("deterministic", changed)):
        outcomes[name] = outcome = run(model, rows, options.seats, options.budget)
        tokens = sum(map(len, outcome.output_ids))
        speed = f"{outcome.seconds:7.1f} s  {tokens / outcome.seconds:6.1f} output tokens/s  {outcome.cpu_seconds:7.1f} CPU s"
        print(f"{name:14} {speed}  {outcome.iterations} iterations", flush=True)
    same = sum(a == b for a, b in zip(outcomes["plain"].output_ids, outcomes["deterministic"].output_ids, strict=True))
    plain, changed_outcome = outcomes["plain"], outcomes["deterministic"]
    ratio, cpu_ratio = changed_outcome.seconds / plain.seconds, changed_outcome.cpu_seconds / plain.cpu_seconds
    print(f"slowdown {ratio:.2f}x ({cpu_ratio:.2f}x in CPU time); {same} of {len(rows)} rows have the same tokens")


if __name__ == "__main__":
    main()
