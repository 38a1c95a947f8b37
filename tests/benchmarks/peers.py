"""One engine as a process that runs a workload on request: ours, transformers, OpenVINO GenAI or vLLM, whichever is installed here.

    python tests/benchmarks/peers.py ENGINE --model DIR --workload FILE.jsonl [--threads N]

ENGINE: contbatch | transformers | openvino | vllm. DIR: a Hugging Face directory; for openvino what `optimum-cli export openvino
--task text-generation-with-past --weight-format fp32` makes of it. Rows: "id", "prompt_token_ids", "max_tokens"; greedy, exact output
lengths, float32. Loading and a short warm-up come first, then the line {"ready": seconds}. For each line on standard input the
workload is run once, and a line is printed: `wall_s`, `cpu_s` (of all threads), `peak_rss_mb`, `outputs` (id to token ids).
`throughput.py` drives several of these in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Outputs = dict[str, list[int]]
Engine = Callable[[Sequence[Row]], Outputs]
WARM_UP: Row = {"id": "warm-up", "prompt_token_ids": list(range(100, 132)), "max_tokens": 4}
STATIC_BATCH = 16
BEFORE_RUNS: list[Callable[[], object]] = []
"""What an engine does before each run, untimed: each begins with an empty prefix cache."""
CACHE_GIB = 4


def contbatch(arguments: argparse.Namespace) -> Engine:
    """Wired as `contbatch generate` wires it, without output files. Each run begins with an empty prefix cache."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch

    from contbatch_cli import build
    from contbatch_cli.config_files import load_config
    from contbatch_cli.data.detokenizer import StopStringRule
    from contbatch_cli.data.readers import InputOptions

    torch.set_num_threads(arguments.threads)
    effective = load_config(assignments=[f"model.name={arguments.model}", *arguments.set])
    model = build.open_model(effective.config.model)
    inputs = build.Inputs((arguments.workload,), InputOptions())
    memory = build.device_memory(effective.config, model)

    def prepare() -> build.Job:
        return build.prepare_job(effective, inputs, model, memory, lambda fault: sys.exit(fault.message))

    executor = build.build_executor(prepare())
    print("\n".join(build.header_lines(prepare(), executor)), file=sys.stderr)

    def run(rows: Sequence[Row]) -> Outputs:
        rule = build.stop_rule(StopStringRule(model.tokenizer), executor)
        engine = build.build_engine(prepare(), executor.runner, rule, time.monotonic)
        outputs: Outputs = {}
        for report in engine.run():
            if rows == [WARM_UP] and report.iteration == 2:
                break
            for request in (*report.finished, *report.duplicates):
                index, _ = request.request_id
                outputs[rows[index]["id"]] = request.output_ids
        return outputs

    return run


def transformers(arguments: argparse.Namespace) -> Engine:
    """Static batches of STATIC_BATCH rows in input order, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(rows: Sequence[Row]) -> Outputs:
        longest = max(len(row["prompt_token_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), 2)
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, longest - len(row["prompt_token_ids"]) :] = torch.tensor(row["prompt_token_ids"])
            mask[i, longest - len(row["prompt_token_ids"]) :] = 1
        most = max(row["max_tokens"] for row in rows)
        settings = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=2, bos_token_id=1)
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return {row["id"]: output[i, longest:][: row["max_tokens"]].tolist() for i, row in enumerate(rows)}

    def run(rows: Sequence[Row]) -> Outputs:
        outputs: Outputs = {}
        for first in range(0, len(rows), STATIC_BATCH):
            outputs.update(generate(rows[first : first + STATIC_BATCH]))
        return outputs

    return run


def openvino(arguments: argparse.Namespace) -> Engine:
    import numpy
    import openvino as runtime
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = 256
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = arguments.prefix_caching
    properties = {
        "INFERENCE_NUM_THREADS": arguments.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": "f32",
    }

    def new_pipeline() -> Any:
        return genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)

    pipeline = new_pipeline()

    def renew() -> None:
        """Its cache cannot be emptied: without a new pipeline a second run would find all prompts computed."""
        nonlocal pipeline
        pipeline = None
        pipeline = new_pipeline()
        run([WARM_UP])

    def config_of(row: Row) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = row["max_tokens"], True
        config.do_sample, config.apply_chat_template = False, False
        return config

    def run(rows: Sequence[Row]) -> Outputs:
        ids = [runtime.Tensor(numpy.array([row["prompt_token_ids"]], dtype=numpy.int64)) for row in rows]
        results = pipeline.generate(ids, [config_of(row) for row in rows])
        return {row["id"]: list(result.m_generation_ids[0]) for row, result in zip(rows, results, strict=True)}

    BEFORE_RUNS.append(renew)
    return run


def vllm(arguments: argparse.Namespace) -> Engine:
    """In this process, eager: its compilation costs minutes at each start for a few per cent."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{arguments.threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    longest = max(len(row["prompt_token_ids"]) + row["max_tokens"] for row in read_rows(arguments.workload))
    model = LLM(
        arguments.model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=arguments.prefix_caching,
        max_model_len=max(1024, longest),
        seed=0,
    )

    BEFORE_RUNS.append(model.reset_prefix_cache)

    def run(rows: Sequence[Row]) -> Outputs:
        settings = [
            SamplingParams(temperature=0.0, max_tokens=r["max_tokens"], ignore_eos=True, detokenize=False) for r in rows
        ]
        results = model.generate([{"prompt_token_ids": row["prompt_token_ids"]} for row in rows], settings, use_tqdm=False)
        return {row["id"]: list(result.outputs[0].token_ids) for row, result in zip(rows, results, strict=True)}

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "contbatch": contbatch,
    "transformers": transformers,
    "openvino": openvino,
    "vllm": vllm,
}


def read_rows(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line.strip()]


def measured(engine: Engine, rows: Sequence[Row]) -> dict[str, Any]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    outputs = engine(rows)
    return {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "outputs": outputs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prefix-caching", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="contbatch's own settings")
    arguments = parser.parse_args()
    arguments.prefix_caching = bool(arguments.prefix_caching)
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]  # its files would hide packages
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows = read_rows(arguments.workload)
    began_s = time.perf_counter()
    engine = ENGINES[arguments.engine](arguments)
    engine([WARM_UP])
    print(json.dumps({"ready": time.perf_counter() - began_s}), file=answers, flush=True)
    for _ in sys.stdin:
        for prepare in BEFORE_RUNS:
            prepare()
        print(json.dumps(measured(engine, rows)), file=answers, flush=True)


if __name__ == "__main__":
    main()
