"""The CUDA engine on a GPU: checks first, then measures, and writes both out. Not yet run on a GPU by anyone.

    PYTHONPATH=. python tests/benchmarks/cuda.py --out cuda.json              everything: Qwen3-shaped 0.6B and 8B, bfloat16
    PYTHONPATH=. python tests/benchmarks/cuda.py --models 0.6B --no-peer      one model, without transformers' own engine
    PYTHONPATH=. TRITON_INTERPRET=1 python tests/benchmarks/cuda.py --rehearse     on a CPU: that the program runs, at toy sizes

Needs torch and transformers alone: models are made from a config with random weights, rows are drawn token ids.
Each model is measured on rows of 100 to 1,024 tokens in and out, against two things: the memory-bandwidth floor of each step that
is all decodes (weights and the contexts' keys and values, read once at the bandwidth of a plain copy here), and transformers'
`generate_batch` in the same process, for which every row has the same number of output tokens, since it knows but one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, Qwen3Config

from contbatch_cli.core.batch import ScheduledBatch
from contbatch_cli.model.kv_cache import bytes_per_block
from contbatch_cli.model.memory import left_for_cache
from tests.cuda_checks import CHECKS, TINY, Built, Recorded, Row, blocks_for, check_golden_tokens, drawn_rows, run_job

BLOCK_SIZE = 16
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def config_of(name: str) -> Qwen3Config:
    if name == "toy":
        return TINY
    return Qwen3Config(
        **SHAPES[name],
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=name == "0.6B",
        eos_token_id=None,
    )


class Stopwatch:
    """Seconds of each step, apart for those that are all decodes, with the bytes that such a step has to read."""

    def __init__(self, built: Built, bytes_per_token: int) -> None:
        self.device = built.device
        # The token embedding is looked up, not read; a tied one is read as the LM head.
        looked_up = 0 if built.model.config.tie_word_embeddings else built.model.get_input_embeddings().weight.nbytes
        self.weight_bytes = sum(parameter.nbytes for parameter in built.model.parameters()) - looked_up
        self.bytes_per_token = bytes_per_token
        self.steps: list[dict[str, Any]] = []
        self.last_s = time.perf_counter()

    def __call__(self, batch: ScheduledBatch) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        contexts = sum(sequence.end for sequence in batch.sequences)
        self.steps.append(
            {
                "seconds": now - self.last_s,
                "tokens": batch.num_tokens,
                "decodes_only": all(sequence.is_decode for sequence in batch.sequences),
                "floor_bytes": self.weight_bytes + contexts * self.bytes_per_token,
            }
        )
        self.last_s = now


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written, of copying one large buffer to another: the best of five."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * num_bytes / best


def run_checks(device: torch.device, rehearse: bool) -> dict[str, str]:
    """What each check says; "FAILED: ..." for one that does not hold."""
    found: dict[str, str] = {}
    for check in (check_golden_tokens,) if rehearse else CHECKS:
        try:
            found[check.__name__] = check(device, count=2, longest=9) if rehearse else check(device)
        except Exception as error:
            found[check.__name__] = f"FAILED: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{check.__name__}: {found[check.__name__]}", flush=True)
    return found


def resolve_cache(built: Built, budget: int, seats: int, rows: list[Row]) -> tuple[int, str]:
    """Number of blocks by the profiling pass: what memory is left, but no more than the rows can use."""
    wanted = blocks_for(rows, BLOCK_SIZE)
    if built.device.type != "cuda":
        return wanted, "all that the job can use"
    memory = left_for_cache(lambda num_blocks: built.runner(num_blocks, BLOCK_SIZE), built.device, budget, seats, BLOCK_SIZE)
    held = memory.num_bytes // bytes_per_block(built.layers, BLOCK_SIZE, built.dtype)
    return min(wanted, held), f"{held:,} blocks: {memory.reason}; the job can use {wanted:,}"


def measure_engine(
    built: Built, rows: list[Row], budget: int, seats: int, bandwidth: float
) -> tuple[dict[str, Any], list[list[int]]]:
    num_blocks, reason = resolve_cache(built, budget, seats, rows)
    runner = built.runner(num_blocks, BLOCK_SIZE)
    run_job(runner, [row._replace(num_new=2) for row in rows[:4]], budget, seats, num_blocks, BLOCK_SIZE)
    watch = Stopwatch(built, bytes_per_block(built.layers, BLOCK_SIZE, built.dtype) // BLOCK_SIZE)
    began = time.perf_counter()
    outputs = run_job(Recorded(runner, watch), rows, budget, seats, num_blocks, BLOCK_SIZE)
    seconds = time.perf_counter() - began
    decodes = [step for step in watch.steps if step["decodes_only"]]
    spent = sum(step["seconds"] for step in decodes)
    floor = sum(step["floor_bytes"] for step in decodes) / bandwidth
    return {
        "cache": reason,
        "seconds": seconds,
        "output_tokens": sum(map(len, outputs)),
        "output_tokens_per_s": sum(map(len, outputs)) / seconds,
        "steps": len(watch.steps),
        "decode_steps": len(decodes),
        "decode_ms_median": 1000 * sorted(step["seconds"] for step in decodes)[len(decodes) // 2] if decodes else None,
        "share_of_bandwidth_floor": floor / spent if decodes else None,
    }, outputs


def measure_peer(built: Built, rows: list[Row]) -> dict[str, Any]:
    """transformers' own continuous batching on the same model and rows, all of one output length."""
    num_new = rows[0].num_new
    assert all(row.num_new == num_new for row in rows)
    built.model.set_attn_implementation("sdpa")
    settings = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        synchronize(built.device)
        began = time.perf_counter()
        answers = built.model.generate_batch(inputs=[row.prompt_ids for row in rows], generation_config=settings)
        synchronize(built.device)
        seconds = time.perf_counter() - began
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        return {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        built.model.set_attn_implementation("contbatch")


def measure_model(name: str, device: torch.device, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    built = Built.random(config_of(name), torch.float32 if name == "toy" else torch.bfloat16, device)
    vocab_size = built.model.config.vocab_size
    rows = drawn_rows(options.rows, options.shortest, options.longest, vocab_size)
    report: dict[str, Any] = {"mixed_lengths": measure_engine(built, rows, options.budget, options.seats, bandwidth)[0]}
    print(f"{name} mixed lengths: {json.dumps(report['mixed_lengths'])}", flush=True)
    if options.peer:
        even = [row._replace(num_new=options.even_length) for row in rows]
        report["even_lengths"], _ = measure_engine(built, even, options.budget, options.seats, bandwidth)
        report["even_lengths_transformers"] = peer = measure_peer(built, even)
        if "seconds" in peer:
            report["speedup"] = peer["seconds"] / report["even_lengths"]["seconds"] * (
                report["even_lengths"]["output_tokens"] / max(peer["output_tokens"], 1)
            )  # fmt: skip
        print(
            f"{name} even lengths: {json.dumps({key: value for key, value in report.items() if key != 'mixed_lengths'})}",
            flush=True,
        )
    return report


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["0.6B", "8B"], choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument(
        "--even-length", type=int, default=256, help="output tokens of each row when compared with transformers"
    )
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path("cuda.json"))
    options = parser.parse_args(arguments)
    if options.rehearse:
        options.models, options.rows, options.shortest, options.longest, options.budget = ["toy"], 3, 3, 8, 16
        options.peer = False
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device; --rehearse runs the program on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "checks": run_checks(device, options.rehearse),
        "models": {},
    }
    options.out.write_text(json.dumps(report, indent=1))
    bandwidth = copy_bandwidth(device, 2**24 if options.rehearse else 2**32)
    report["copy_bandwidth_bytes_per_s"] = bandwidth
    with torch.inference_mode():
        for name in options.models:
            report["models"][name] = measure_model(name, device, options, bandwidth)
            options.out.write_text(json.dumps(report, indent=1))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    failed = [name for name, text in report["checks"].items() if text.startswith("FAILED")]
    print(f"written to {options.out}; {len(failed)} checks failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
