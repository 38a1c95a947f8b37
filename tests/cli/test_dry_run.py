"""`generate --dry-run`: what a run would meet, without weights."""

import json
import os
import re
import subprocess

import pytest

from tests.cli.scripted import ROOT, call, command, environment, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def report(model, source, *options, status=0):
    done = call("generate", "--dry-run", "-m", model, source, *options)
    assert (done.status, done.errors) == (status, ""), done.errors
    return done.output.decode()


def line(text, label):
    return next(line for line in text.splitlines() if line.startswith(label))


def test_rows_are_counted_by_kind_and_errors_by_code(model, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    rows = [
        {"prompt": "a"},
        {"prompt": "b"},
        chat,
        {"prompt_token_ids": [1]},
        *[{"prompt": ""}] * 5,
        {"prompt": "c", "top_k": "x"},
    ]
    rows.append({"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    text = report(model, write_rows(tmp_path / "rows.jsonl", rows), status=1)
    assert line(text, "rows") == "rows      11: 2 text, 1 chat, 1 token ids, 1 OpenAI chat, 6 bad"
    assert "  empty_prompt: 5\n" in text and "  invalid_parameter: 1\n" in text
    assert re.findall(r"rows\.jsonl, line (\d+): the prompt is empty", text) == ["5", "6", "7"], "the first few"


def test_prompt_lengths_and_savings(model, tmp_path):
    rows = [{"prompt": "s" * 32 + f"{index:04}", "max_tokens": 10} for index in range(10)]
    rows += [{"prompt": "twice", "max_tokens": 3}] * 4
    text = report(model, write_rows(tmp_path / "rows.jsonl", rows))
    assert line(text, "prompts") == "prompts   380 tokens: least 5, median 36, p99 36, most 36"
    counts = {bounds: int(count) for bounds, count in re.findall(r"^ +([\d,]+ to [\d,]+) \S+ (\d+)$", text, re.M)}
    assert counts == {"4 to 7": 4, "8 to 15": 0, "16 to 31": 0, "32 to 63": 10}
    assert line(text, "outputs") == "outputs   at most 103 tokens in 11 requests"
    assert line(text, "saved") == (
        f"saved     {9 * 32} of 365 prompt tokens in shared prefixes; 3 duplicates not to be run (at most 24 tokens)"
    )


def test_rows_that_do_not_fit(model, tmp_path):
    rows = [{"prompt": "x" * 100, "max_tokens": 100}, {"prompt": "x", "max_tokens": 512}, {"prompt": "y", "max_tokens": 4}]
    text = report(model, write_rows(tmp_path / "rows.jsonl", rows), "--set", "cache.num_blocks=8", status=1)
    assert line(text, "too big") == "too big   2 rows beyond the context or the cache"
    assert "  exceeds_kv_cache: 1\n" in text and "  prompt_too_long: 1\n" in text
    assert "1 for the largest; the run has 8 (" in line(text, "cache")


def test_the_time_is_near_a_rehearsal_of_the_same_job(model, tmp_path):
    rows = [{"prompt": f"{index} " + "w" * (index % 50), "max_tokens": 60} for index in range(300)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    found = re.search(r"at most ([\d.]+) (s|ms)", line(report(model, source), "time"))
    estimated = float(found[1]) * {"s": 1, "ms": 1e-3}[found[2]]
    rehearsed = call("inspect-schedule", source, "-m", model, "--json")
    last = json.loads(rehearsed.output.splitlines()[-1])
    assert estimated == pytest.approx(last["start_s"] + last["elapsed_s"], rel=0.25)


def test_windows_do_not_hide_rows(model, tmp_path):
    rows = [{"prompt": f"row {index:05}", "max_tokens": 2} for index in range(1000)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    whole, windowed = report(model, source), report(model, source, "--set", "scheduler.window=100")
    for label in ("rows", "prompts", "outputs"):
        assert line(whole, label) == line(windowed, label)


@pytest.mark.parametrize("kinds", ["one", "all"])
def test_a_model_with_windows_shows_the_bytes_of_each_pool(tmp_path, kinds):
    """A block of one layer is 16 tokens of 2 heads of 8 in float32, keys and values: 2 KiB. A window of 40 touches 5 blocks."""
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    types = ["sliding_attention", "full_attention" if kinds == "one" else "sliding_attention"]
    config |= {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 40, "layer_types": types}
    (model / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": "x" * 200 + str(index), "max_tokens": 20} for index in range(8)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    settings = ("scheduler.token_budget=16", "scheduler.max_batch_size=2")
    text = report(model, source, *(word for setting in settings for word in ("--set", setting)))
    if kinds == "one":
        assert line(text, "cache").startswith(
            "cache     28 blocks of 16 (56.00 KiB) for a batch of the largest rows, 14 for the"
        )
        assert line(text, "windows") == (
            "windows   10 blocks of 16 (20.00 KiB) more for 1 of 2 layers with a window of 40; the run has 10 (20.00 KiB)"
        )
    else:
        assert line(text, "cache").startswith(
            "cache     10 blocks of 16 (40.00 KiB) for a batch of the largest rows, 5 for the"
        )
        assert "windows " not in text
    done = call("generate", source, "-m", model, *(word for setting in settings for word in ("--set", setting)))
    assert ("10 for 1 of 2 layers" in done.errors) is (kinds == "one"), done.errors


def test_an_empty_job(model, tmp_path):
    text = report(model, write_rows(tmp_path / "rows.jsonl", []))
    assert line(text, "rows") == "rows      0: 0 bad"
    assert "at most 0 s" in line(text, "time")


def test_nothing_is_written_and_torch_is_not_imported(model, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", ["a", "é"])
    plain = {**environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    arguments = command("generate", "--dry-run", source, "-m", model, "-o", tmp_path / "out.jsonl")
    done = subprocess.run(arguments, capture_output=True, env=plain, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii() and b"###" in done.stdout
    assert os.listdir(tmp_path) == ["rows.jsonl"]
