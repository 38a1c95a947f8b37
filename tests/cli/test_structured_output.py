"""Structured output on the real model through the real command: 200 rows over 20 schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from tests.model.test_grammar import SCHEMAS, object_of

ROOT = Path(__file__).parents[2]
SCORE = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01}
SCORES = object_of(scores={"type": "array", "items": SCORE, "minItems": 2, "maxItems": 2})
BOUNDED = [*SCHEMAS[:-1], SCORES]
"""A number without a step may have digits without end, and a small greedy model writes them."""
TOPICS = ["a cat", "the sea", "a red bicycle", "tea", "winter", "a small robot", "Paris", "a library", "music", "bread"]


@pytest.mark.slow
def test_every_stop_record_is_valid_and_nearly_all_rows_stop(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    schemas = [schema for schema in BOUNDED for _ in TOPICS]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Write JSON about {topic} that follows this schema: {json.dumps(schema)}"}
            ],
            "max_tokens": 160,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
        for schema, topic in zip(schemas, TOPICS * len(BOUNDED), strict=True)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "contbatch_cli", "generate", str(source), "-o", str(output), "--no-live"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(record["index"] for record in records) == list(range(len(rows)))
    for record in records:
        if record["finish_reason"] == "stop":
            jsonschema.validate(json.loads(record["text"]), schemas[record["index"]])
    reasons = Counter(record["finish_reason"] for record in records)
    print(f"200 rows over 20 schemas: {dict(reasons)}\n{done.stderr}")
    assert reasons["stop"] >= 0.95 * len(rows)
