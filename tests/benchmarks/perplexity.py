"""What a precision costs in quality: the perplexity of a fixed text (`perplexity.txt`, 1,700 words of plain English prose).

    python tests/benchmarks/perplexity.py [-m MODEL] [--words N] [KEY=VALUE[,KEY=VALUE...]]...

Each argument is a set of the product's own settings; without any: model.dtype=float32, model.dtype=bfloat16 and model.weights=int8.
The text goes through `contbatch generate` as rows that are only scored (`prompt_logprobs`, no new tokens): one row, or one for each
N words where a model's context is short. Perplexity is exp of the mean negative log-probability of the tokens after each row's first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SETTINGS = ("model.dtype=float32", "model.dtype=bfloat16", "model.weights=int8")


def texts(words: int | None) -> list[str]:
    """The text, a paragraph a line, as one row or in rows of so many words."""
    content = (HERE / "perplexity.txt").read_text(encoding="utf-8").strip()
    whole = "\n".join(" ".join(paragraph.split()) for paragraph in content.split("\n\n"))
    if words is None:
        return [whole]
    split = whole.split(" ")
    return [" ".join(split[first : first + words]) for first in range(0, len(split), words)]


def logprobs(model: str, settings: str, rows: list[str]) -> list[float]:
    """Of every token after a row's first, as the command gives them."""
    prompts = "".join(json.dumps({"prompt": row, "max_tokens": 0, "prompt_logprobs": 0}) + "\n" for row in rows)
    command = [sys.executable, "-m", "contbatch_cli", "generate", "-", "-q", "-m", model]
    for setting in settings.split(","):
        command += ["--set", setting]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(command, input=prompts.encode(), stdout=subprocess.PIPE, env=environment, cwd=scratch, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == len(rows)
    return [entry["logprob"] for record in records for entry in record["prompt_logprobs"] if entry is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=SETTINGS, metavar="KEY=VALUE")
    parser.add_argument("-m", "--model", default="smollm2-135m-instruct")
    parser.add_argument("--words", type=int, help="words of a row; all by default")
    asked = parser.parse_args()
    model = str(Path(asked.model).resolve()) if Path(asked.model).exists() else asked.model
    rows = texts(asked.words)
    print("| settings | tokens | perplexity | against the first |")
    print("|---|---|---|---|")
    first = None
    for settings in asked.settings:
        found = logprobs(model, settings, rows)
        perplexity = math.exp(-math.fsum(found) / len(found))
        first = first or perplexity
        print(f"| {settings} | {len(found):,} | {perplexity:.4f} | {perplexity / first - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
