"""Whole jobs on a CPU, engine beside engine: interleaved runs, medians, ratios, and every token checked.

    python tests/benchmarks/throughput.py --model DIR [--workload w1 w2 long] [--runs 3] [--threads N] [--no-check]
        [--rows N] [--peer NAME=PYTHON=MODEL]... [--also KEY=VALUE]... [--reference-rows N] [--profile]

Runs ours and transformers' static batches of 16; each `--peer` adds one that another Python environment has (`openvino`, `vllm`; the
model it wants), each `--also` ours once more with that setting (`model.weights=int8`). `--reference-rows N` gives transformers the
first N rows only: its speed is then that of these rows. `--profile` prints in which phases ours spends its time (`phases.py`).

Each engine is a process of its own (`peers.py`) which loads once and then runs the workload when its turn comes, so that a machine
which is slower for a while is so for all. Workloads: w1, 64 rows all different (8,286 prompt and 5,964 output tokens); w2, 32 rows
with 256 tokens in common; long, 16 rows of 2,000 to 6,000 prompt tokens; or a file of rows.

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


class Contender(NamedTuple):
    """An engine that takes part: its name in the table, what `peers.py` calls it, where it runs, what it is told besides.

    With `num_rows` it gets the first so many rows only.
    """

    label: str
    engine: str
    python: str
    model: str
    extra: tuple[str, ...] = ()
    num_rows: int | None = None

    def rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows[: self.num_rows]


class EngineProcess:
    """One engine, loaded, waiting for its turn."""

    def __init__(self, contender: Contender, rows: list[dict[str, Any]], scratch: Path, threads: int) -> None:
        self.name = contender.label
        workload = scratch / "rows.jsonl" if contender.num_rows is None else scratch / "first_rows.jsonl"
        write_rows(workload, contender.rows(rows))
        command = [contender.python, "-W", "ignore", str(HERE / "peers.py"), contender.engine, "--model", contender.model]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [*command, "--workload", str(workload), "--threads", str(threads), *contender.extra],
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


def workload_rows(name: str) -> list[dict[str, Any]]:
    if name == "long":
        return long_rows()
    bundled = HERE.parent / "workloads" / f"{name}.jsonl"
    lines = (bundled if bundled.exists() else Path(name)).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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

    def __str__(self) -> str:
        return f"{self.near}/{self.total} ({self.exact} exactly, worst gap {self.worst:.1g})"


class Judge:
    """transformers' model in float32, which tells how far a row's tokens are from its own greedy choice."""

    def __init__(self, model_dir: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._gaps: dict[tuple[int, ...], float] = {}

    def check(self, rows: list[dict[str, Any]], outputs: dict[str, list[int]]) -> Check:
        gaps = [self._gap(row, outputs[row["id"]]) for row in rows]
        return Check(sum(gap == 0 for gap in gaps), sum(gap <= NEAR_TIE for gap in gaps), len(rows), max(gaps))

    def _gap(self, row: dict[str, Any], output: list[int]) -> float:
        """The largest distance between the best logit and the chosen one; infinite for an output of another length."""
        if len(output) != row["max_tokens"]:
            return float("inf")
        ids = (*row["prompt_token_ids"], *output)
        if ids not in self._gaps:
            torch, chosen = self._torch, self._torch.tensor(output)
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([ids]), logits_to_keep=len(output) + 1).logits[0, :-1]
            self._gaps[ids] = float((logits.max(dim=-1).values - logits.gather(1, chosen[:, None])[:, 0]).max())
        return self._gaps[ids]


def report(
    name: str,
    rows: list[dict[str, Any]],
    contenders: list[Contender],
    measured: dict[str, Measured],
    checks: dict[str, Check],
) -> None:
    """A table. `against ours` is the time for a token, prompt or output, over ours: for the same rows, the ratio of their times."""
    print(f"\n{name}: {len(rows)} rows, {num_prompt_tokens(rows):,} prompt and {num_output_tokens(rows):,} output tokens")
    print(
        "| engine | rows | s, median (all) | output tokens/s | against ours | CPU s | peak RSS MB | rows greedy by transformers |"
    )
    print("|---|---|---|---|---|---|---|---|")
    ours_s = statistics.median(measured[contenders[0].label].wall_s) / (num_prompt_tokens(rows) + num_output_tokens(rows))
    for contender in contenders:
        found, own_rows = measured[contender.label], contender.rows(rows)
        median_s, num_tokens = statistics.median(found.wall_s), num_output_tokens(own_rows)
        each_s = median_s / (num_prompt_tokens(own_rows) + num_tokens)
        print(
            f"| {contender.label} | {len(own_rows)} | {median_s:.2f} ({', '.join(f'{wall:.1f}' for wall in found.wall_s)}) "
            f"| {num_tokens / median_s:.1f} | {each_s / ours_s:.2f} x | {statistics.median(found.cpu_s):.1f} "
            f"| {found.peak_rss_mb:,} | {checks.get(contender.label, '-')} |",
            flush=True,
        )


def num_prompt_tokens(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["prompt_token_ids"]) for row in rows)


def num_output_tokens(rows: list[dict[str, Any]]) -> int:
    return sum(row["max_tokens"] for row in rows)


def contenders_of(arguments: argparse.Namespace) -> list[Contender]:
    """Ours first."""
    ours = Contender("contbatch", "contbatch", sys.executable, arguments.model)
    found = [ours, *(ours._replace(label=f"contbatch, {also}", extra=("--set", also)) for also in arguments.also)]
    if not arguments.without_transformers:
        found.append(ours._replace(label="transformers", engine="transformers", num_rows=arguments.reference_rows))
    for peer in arguments.peer:
        name, python, model = peer.split("=", 2)
        found.append(Contender(name, name, python, model))
    return found


def run_workload(name: str, arguments: argparse.Namespace, scratch: Path) -> None:
    """Measure all engines on one workload, and print its table."""
    rows, contenders = workload_rows(name)[: arguments.rows], contenders_of(arguments)
    engines = [EngineProcess(contender, rows, scratch, arguments.threads) for contender in contenders]
    for engine in engines:
        print(f"  {engine.name}: ready in {engine.load_s:.1f} s", file=sys.stderr)
    measured = measure(engines, arguments.runs)
    for engine in engines:
        engine.close()
    checks: dict[str, Check] = {}
    if not arguments.no_check:
        judge = Judge(arguments.model)
        checks = {c.label: judge.check(c.rows(rows), measured[c.label].outputs) for c in contenders}
    report(name, rows, contenders, measured, checks)
    if arguments.profile:
        workload = scratch / "rows.jsonl"
        command = [sys.executable, "-W", "ignore", str(HERE / "phases.py"), str(workload), "--model", arguments.model]
        subprocess.run([*command, "--threads", str(arguments.threads)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--workload", nargs="+", default=["w1", "w2", "long"])
    parser.add_argument("--rows", type=int, help="the first so many rows of each workload, for all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON=MODEL")
    parser.add_argument("--also", action="append", default=[], metavar="KEY=VALUE", help="ours once more with this setting")
    parser.add_argument("--reference-rows", type=int, metavar="N", help="transformers gets the first N rows only")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print in which phases ours spends its time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.workload:
            run_workload(name, arguments, Path(scratch))


if __name__ == "__main__":
    main()
