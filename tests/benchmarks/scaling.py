"""What more rows cost: 16 to 1,024 rows of fixed lengths, with a tiny model and with the default one.

    python tests/benchmarks/scaling.py [--rows 16 64 256 1024] [--model NAME|DIR|tiny]... [--prompt 32] [--output 16] [--threads N]
        [--set KEY=VALUE]...

Each run is the command itself in a process of its own (`phases.py`), from its first iteration to its last. The time for a token
(prompt and output alike) falls as rows come to share the weights, then stays: with the tiny model the program's own part shows, with
the default one the share of it outside the model's forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SMALLEST_VOCABULARY = 256


def write_rows(path: Path, asked: argparse.Namespace, count: int) -> None:
    """Rows that differ in every token, so that nothing is shared."""
    rng = random.Random(count)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            prompt = [rng.randrange(SMALLEST_VOCABULARY) for _ in range(asked.prompt)]
            row = {"prompt_token_ids": prompt, "max_tokens": asked.output, "ignore_eos": True}
            file.write(json.dumps(row) + "\n")


def tiny_model(directory: Path) -> str:
    """A Llama of two layers with random weights."""
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.cli.scripted import write_model
    from tests.model.tiny import llama_config, random_model

    write_model(directory)
    config = llama_config()
    config.vocab_size = 259
    random_model(config).save_pretrained(directory)
    return str(directory)


def measure(rows: Path, model: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One run's phases, as `phases.py` gives them."""
    command = [sys.executable, "-W", "ignore", str(HERE / "phases.py"), str(rows), "--model", model, "--json"]
    for setting in asked.set:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    done = subprocess.run([*command, "--threads", str(asked.threads)], stdout=subprocess.PIPE, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def report(model: str, directory: Path, asked: argparse.Namespace) -> None:
    from phases import MODEL_PHASES

    print(f"\n{model}: {asked.prompt} prompt and {asked.output} output tokens a row, {asked.threads} threads")
    print("| rows | s | µs/token | against the row above | outside the model, µs/token | share |")
    print("|---|---|---|---|---|---|")
    path = tiny_model(directory / "model") if model == "tiny" else model
    before = None
    for count in asked.rows:
        write_rows(directory / "rows.jsonl", asked, count)
        found = measure(directory / "rows.jsonl", path, asked)
        total_s, num_tokens = found["total_s"], found["prompt_tokens"] + found["output_tokens"]
        outside_s = total_s - sum(found["seconds"][phase] for phase in MODEL_PHASES)
        each = 1e6 * total_s / num_tokens
        ratio = "" if before is None else f"{each / before:.2f} x"
        outside = f"{1e6 * outside_s / num_tokens:.1f} | {outside_s / total_s:.1%}"
        print(f"| {count:,} | {total_s:.2f} | {each:.1f} | {ratio} | {outside} |", flush=True)
        before = each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--model", action="append", help="tiny and smollm2-135m-instruct by default")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for model in asked.model or ["tiny", "smollm2-135m-instruct"]:
            report(model, Path(scratch), asked)


if __name__ == "__main__":
    main()
