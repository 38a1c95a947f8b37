"""The default model for tests: its weights once a process, its rows, and the oracle's answers."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from contbatch_cli.config import ModelConfig
from contbatch_cli.core.request import SamplingParams
from contbatch_cli.data import model_store
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.model.attention import ATTENTION_NAME
from contbatch_cli.model.kv_cache import LayerShape
from contbatch_cli.model.loading import LoadedModel, load_model
from contbatch_cli.model.packing import pack_model
from tests.oracle import OracleRow, greedy_alone

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tests" / "workloads"
Row = tuple[list[int], SamplingParams]


@functools.cache
def loaded() -> LoadedModel:
    """The default model in float32."""
    return load_model(model_store.resolve("smollm2-135m-instruct"), ModelConfig(dtype="float32"))


@functools.cache
def packed() -> LoadedModel:
    """The same as the product runs it: read as stored, its layers swapped for kernels, its weights packed. A load of its own."""
    model = load_model(model_store.resolve("smollm2-135m-instruct"), ModelConfig(dtype="float32"), as_stored=True)
    pack_model(model.model, model.attention_choice)
    return model


def shapes() -> list[LayerShape]:
    return list(loaded().layers)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(model_store.resolve("smollm2-135m-instruct"))


def workload(name: str, limit: int | None = None) -> list[Row]:
    """The rows of a workload file: token ids and exact output lengths."""
    rows = [json.loads(line) for line in (WORKLOADS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        (row["prompt_token_ids"], SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True, eos_token_ids=(2,)))
        for row in rows[:limit]
    ]


def short_rows(num_rows: int, longest_prompt: int = 48, most_tokens: int = 16, seed: int = 0) -> list[Row]:
    """Greedy rows cut out of the repository's own prompts; they end at EOS where the model says so."""
    rng = random.Random(seed)
    texts = [json.dumps(json.loads(line)) for line in (ROOT / "prompts" / "mixed.jsonl").read_text("utf-8").splitlines()]
    ids = tokenizer().encode("\n".join(texts))
    rows = []
    for _ in range(num_rows):
        start = rng.randrange(len(ids) - longest_prompt)
        prompt = ids[start : start + rng.randint(1, longest_prompt)]
        rows.append((prompt, SamplingParams(max_tokens=rng.randint(1, most_tokens), eos_token_ids=(2,))))
    return rows


def answers(rows: list[Row]) -> list[OracleRow]:
    """Each row alone through transformers' `generate`, with its own attention."""
    model: Any = loaded().model
    model.set_attn_implementation("sdpa")
    try:
        return [
            greedy_alone(model, prompt, params.max_tokens, () if params.ignore_eos else params.eos_token_ids)
            for prompt, params in rows
        ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
