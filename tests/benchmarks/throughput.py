"""Whole jobs on a CPU, engine beside engine: interleaved runs, medians, ratios, and every token checked.

    python tests/benchmarks/throughput.py --model DIR [--workload w1 w2 long] [--runs 3] [--threads N] [--no-check]
        [--peer NAME=PYTHON=MODEL]...

Runs ours and transformers' static batches of 16; each `--peer` adds one that another Python environment has (`openvino`, `vllm`; the
model it wants). Each engine is a process of its own (`peers.py`) which loads once and then runs the workload when its turn comes, so
that a machine which is slower for a while is so for all. Workloads: w1, 64 rows all different (8,286 prompt and 5,964 output tokens);
w2, 32 rows with 256 tokens in common; long, 16 rows of 2,000 to 6,000 prompt tokens; or a file of rows.

The check is transformers' own: one pass over each row's prompt and output; a token is right if no other has a logit above its own by
more than 1e-4. For greedy decoding that is equality with `generate`, near ties aside, which are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
NEAR_TIE = 1e-4


class Measured(NamedTuple):
    """One engine's runs of one workload."""

    wall_s: list[float]
    cpu_s: list[float]
    peak_rss_mb: int
    outputs: dict[str, list[int]]


class EngineProcess:
    """One engine, loaded, waiting for its turn."""

    def __init__(self, name: str, python: str, model: str, workload: Path, threads: int, extra: list[str]) -> None:
        self.name = name
        command = [python, "-W", "ignore", str(HERE / "peers.py"), name, "--model", model, "--workload", str(workload)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.load_s = float(self._answer()["ready"])

    def run(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def long_rows() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "id": f"long-{i:03}",
            "prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(rng.randint(2000, 6000))],
            "max_tokens": 128,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(16)
    ]


def workload_path(name: str, scratch: Path) -> Path:
    if name == "long":
        path = scratch / "long.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in long_rows()))
        return path
    bundled = HERE.parent / "workloads" / f"{name}.jsonl"
    return bundled if bundled.exists() else Path(name)


def measure(engines: list[EngineProcess], runs: int) -> dict[str, Measured]:
    """`runs` rounds, each engine once a round."""
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for _ in range(runs):
        for engine in engines:
            answers[engine.name].append(engine.run())
            print(f"  {engine.name}: {answers[engine.name][-1]['wall_s']:.2f} s", file=sys.stderr, flush=True)
    return {
        name: Measured(
            [answer["wall_s"] for answer in given],
            [answer["cpu_s"] for answer in given],
            max(answer["peak_rss_mb"] for answer in given),
            given[-1]["outputs"],
        )
        for name, given in answers.items()
    }


class Check(NamedTuple):
    """How many rows are exactly greedy, how many but for near ties, of how many; and the largest gap found."""

    exact: int
    near: int
    total: int
    worst: float


def check(model_dir: str, rows: list[dict[str, Any]], outputs: dict[str, list[int]]) -> Check:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    gaps = []
    for row in rows:
        chosen = torch.tensor(outputs[row["id"]])
        ids = torch.cat([torch.tensor(row["prompt_token_ids"]), chosen])
        with torch.inference_mode():
            logits = model(input_ids=ids[None], logits_to_keep=len(chosen) + 1).logits[0, :-1]
        complete = len(chosen) == row["max_tokens"]
        gap = (logits.max(dim=-1).values - logits.gather(1, chosen[:, None])[:, 0]).max()
        gaps.append(float(gap) if complete else float("inf"))
    return Check(sum(gap == 0 for gap in gaps), sum(gap <= NEAR_TIE for gap in gaps), len(rows), max(gaps))


def report(name: str, rows: list[dict[str, Any]], measured: dict[str, Measured], checks: dict[str, Check]) -> None:
    prompt_tokens = sum(len(row["prompt_token_ids"]) for row in rows)
    output_tokens = sum(row["max_tokens"] for row in rows)
    ours = statistics.median(measured["contbatch"].wall_s)
    print(f"\n{name}: {len(rows)} rows, {prompt_tokens:,} prompt and {output_tokens:,} output tokens")
    print("| engine | s, median (all) | output tokens/s | against ours | CPU s | peak RSS MB | rows greedy by transformers |")
    print("|---|---|---|---|---|---|---|")
    for engine, found in measured.items():
        median_s = statistics.median(found.wall_s)
        walls = ", ".join(f"{wall:.1f}" for wall in found.wall_s)
        judged = checks.get(engine)
        verdict = (
            "-" if judged is None else f"{judged.near}/{judged.total} ({judged.exact} exactly, worst gap {judged.worst:.1g})"
        )
        print(
            f"| {engine} | {median_s:.2f} ({walls}) | {output_tokens / median_s:.1f} | {median_s / ours:.2f} x "
            f"| {statistics.median(found.cpu_s):.1f} | {found.peak_rss_mb:,} | {verdict} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--workload", nargs="+", default=["w1", "w2", "long"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON=MODEL")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    arguments = parser.parse_args()
    peers = [("contbatch", sys.executable, arguments.model)]
    if not arguments.without_transformers:
        peers.append(("transformers", sys.executable, arguments.model))
    peers += [tuple(peer.split("=", 2)) for peer in arguments.peer]
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.workload:
            path = workload_path(name, Path(scratch))
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            engines = [EngineProcess(*peer, path, arguments.threads, []) for peer in peers]
            for engine in engines:
                print(f"  {engine.name}: ready in {engine.load_s:.1f} s", file=sys.stderr)
            measured = measure(engines, arguments.runs)
            for engine in engines:
                engine.close()
            checked = (
                {} if arguments.no_check else {key: check(arguments.model, rows, m.outputs) for key, m in measured.items()}
            )
            report(name, rows, measured, checked)


if __name__ == "__main__":
    main()
