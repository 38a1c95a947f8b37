"""The configs and prompt files that the repository ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from contbatch_cli.config import Config
from contbatch_cli.config_files import load_config
from contbatch_cli.config_schema import config_keys, json_schema

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PROMPTS = sorted((ROOT / "prompts").glob("*.jsonl"))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_config_loads_and_fits_the_schema(file: Path) -> None:
    effective = load_config(file)
    assert any(effective.is_written(path) for path in config_keys())
    jsonschema.validate(yaml.safe_load(file.read_text()), json_schema(), jsonschema.Draft202012Validator)


def test_default_config_writes_every_key_with_its_built_in_value() -> None:
    effective = load_config(ROOT / "configs" / "default.yaml")
    assert effective.config == Config()
    assert [path for path in config_keys() if not effective.is_written(path)] == []


def test_there_is_a_config_for_each_situation() -> None:
    assert [file.stem for file in CONFIGS] == ["cpu", "default", "gpu-throughput", "low-latency"]
    budgets = {file.stem: load_config(file).config.scheduler.token_budget for file in CONFIGS}
    assert budgets["low-latency"] < budgets["cpu"] < budgets["gpu-throughput"]  # type: ignore[operator]


@pytest.mark.parametrize("file", PROMPTS, ids=lambda file: file.stem)
def test_prompt_rows_are_well_formed(file: Path) -> None:
    ids = [row["id"] for row in rows(file)]
    assert len(set(ids)) == len(ids)
    for row in rows(file):
        assert ("prompt" in row) != ("messages" in row)
        assert all(set(message) == {"role", "content"} and message["content"] for message in row.get("messages", []))
        assert 1 <= row.get("max_tokens", 256) <= 256


def test_the_sets_are_what_the_readme_says() -> None:
    by_name = {file.stem: rows(file) for file in PROMPTS}
    assert set(by_name) == {"quickstart", "chat", "mixed"}
    assert all("messages" in row for row in by_name["chat"])
    assert {"prompt", "messages"} <= set().union(*by_name["quickstart"])
    mixed = by_name["mixed"]
    sizes = [len(json.dumps(row)) for row in mixed]
    assert len(mixed) == 60
    assert max(sizes) > 10 * min(sizes)
    assert len({row["max_tokens"] for row in mixed}) > 10
