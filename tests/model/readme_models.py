"""The README's table of model families, made from the families that the tests run.

python -m tests.model.readme_models      writes it into the README
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from contbatch_cli.model.probe import AttentionCall, layers_of
from tests.model.test_families import FAMILIES, SINCE, config_of
from tests.model.tiny import CPU, random_model

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- families: made by tests/model/readme_models.py -->\n", "<!-- end of families -->\n"


def needed_version() -> str:
    """The oldest transformers that the package takes."""
    found = re.search(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def table() -> str:
    lines = ["| family | `model_type` | attention | transformers |", "|---|---|---|---|"]
    for name, (model_type, _) in FAMILIES.items():
        config = config_of(name)
        calls = layers_of(random_model(config), CPU)
        since = SINCE.get(name, needed_version())
        lines.append(f"| {name} | `{model_type}` | {', '.join(_features(calls)) or 'plain'} | {since} |")
    return "\n".join(lines) + "\n"


def _features(calls: Sequence[AttentionCall]) -> Iterator[str]:
    """What the tested models' attention has beyond the plain kind, as their layers pass it."""
    windowed = sum(call.variant.sliding_window is not None for call in calls)
    if windowed:
        yield "sliding window" if windowed == len(calls) else "sliding window in some layers"
    if any(call.variant.softcap is not None for call in calls):
        yield "soft cap"
    if any(call.variant.sinks is not None for call in calls):
        yield "sinks"
    if any(call.shape.key_size != call.shape.value_size for call in calls):
        yield "multi-head latent"
    elif any(call.shape.num_kv_heads < call.shape.num_heads for call in calls):
        yield "grouped heads"


def parts() -> tuple[str, str, str]:
    """The README before, within and after the markers."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    within, after = rest.split(END)
    return before, within, after


if __name__ == "__main__":
    start, _, end = parts()
    README.write_text(start + BEGIN + table() + END + end, encoding="utf-8")
