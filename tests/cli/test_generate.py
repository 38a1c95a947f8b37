"""`contbatch generate` as a whole, with a scripted runner in the place of the model."""

import gzip
import json
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contbatch_cli.errors import UsageError
from contbatch_cli.trace import read_trace
from tests.cli import scripted
from tests.cli.scripted import call, generate, read_records, write_model, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs `generate` with the tiny model in the test's directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **script: call("generate", "-m", model, *arguments, script=script)


def file_of(tmp_path, *rows, name="rows.jsonl"):
    return write_rows(tmp_path / name, rows)


def prompts(count, **params):
    return [{"id": f"r{index}", "prompt": f"row {index}", **params} for index in range(count)]


def by_index(records):
    return [record for record in sorted(records, key=lambda record: record["index"])]


# -- what comes out


def test_one_record_for_each_row(run, tmp_path):
    source = file_of(tmp_path, {"id": 1, "prompt": "one", "max_tokens": 4}, {"id": "1", "prompt": "two", "note": [1]}, "three")
    done = run(source)
    assert done.status == 0, done.errors
    first, second, third = done.records
    assert [first["id"], second["id"], third["id"]] == [1, "1", None]
    assert first["usage"]["prompt_tokens"] == 3 and first["usage"]["completion_tokens"] <= 4
    assert second["extra"] == {"note": [1]}
    assert {record["finish_reason"] for record in done.records} <= {"stop", "length"}
    assert "rows      3 good, 0 bad" in done.errors


def test_bad_rows_fail_alone(run, tmp_path):
    source = tmp_path / "rows.jsonl"
    lines = [
        b'{"prompt":"a"}',
        b'{"prompt":',
        b"",
        b"[1]",
        b'"\xff"',
        b'{"prompt":"a","max_tokns":3}',
        b'{"prompt":"a","top_p":7}',
    ]
    lines += [
        b'{"prompt":""}',
        b'{"messages":[{"role":"odd","content":""}]}',
        b'{"id":"x","prompt":"a"}',
        b'{"id":"x","prompt":"a"}',
    ]
    lines += [b'{"prompt":"a","max_tokens":600}', b'{"prompt":"last"}']
    source.write_bytes(b"\n".join(lines))
    done = run(source)
    assert done.status == 1
    codes = [(record["error"] or {}).get("code") for record in done.records]
    assert codes == [
        None,
        "invalid_json",
        "invalid_row",
        "invalid_encoding",
        "unknown_parameter",
        "invalid_parameter",
        "empty_prompt",
        "template_error",
        None,
        "duplicate_id",
        "prompt_too_long",
        None,
    ]
    assert done.records[1]["line"] == 2 and done.records[2]["line"] == 4
    assert "3 good, 9 bad" in done.errors


def test_rows_that_no_cache_of_this_size_can_hold(run, tmp_path):
    source = file_of(tmp_path, {"prompt": "x" * 40, "max_tokens": 40}, {"prompt": "x", "max_tokens": 4})
    done = run(source, "--set", "cache.num_blocks=4")
    assert done.status == 1
    assert done.records[0]["error"]["code"] == "exceeds_kv_cache"
    assert done.records[1]["error"] is None


def test_a_cache_too_small_for_all_changes_no_text(run, tmp_path):
    source = file_of(tmp_path, *prompts(40, max_tokens=60))
    roomy, tight = run(source), run(source, "--set", "cache.num_blocks=6", "--set", "scheduler.max_batch_size=8")
    assert roomy.status == tight.status == 0
    assert [record["text"] for record in roomy.records] == [record["text"] for record in tight.records]


def test_no_rows_need_no_model(run, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    done = run("empty.jsonl", "-o", "out.jsonl", LOAD_S=60)
    assert done.status == 0
    assert "0 good, 0 bad" in done.errors
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_all_rows_bad_need_no_model(run, tmp_path):
    done = run(file_of(tmp_path, {"prompt": ""}, []), LOAD_S=60)
    assert done.status == 1
    assert len(done.records) == 2


def test_several_inputs_name_their_files(run, tmp_path):
    one, two = file_of(tmp_path, *prompts(2), name="one.jsonl"), tmp_path / "two.jsonl.gz"
    two.write_bytes(gzip.compress(b'\xef\xbb\xbf"x"\r\n\r\n{"prompt":""}'))
    done = run("one.jsonl", "two.jsonl.gz")
    assert [(record["index"], record["file"]) for record in done.records] == [
        (0, "one.jsonl"),
        (1, "one.jsonl"),
        (2, "two.jsonl.gz"),
        (3, "two.jsonl.gz"),
    ]
    assert done.records[3]["line"] == 3
    assert one.exists()


def test_openai_rows_give_openai_lines(run, tmp_path):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi", "max_tokens": 5}},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "hi", "max_tokens": -5},
        },
    ]
    done = run(file_of(tmp_path, *rows))
    assert done.status == 1
    first, second, third = done.records
    assert [record["custom_id"] for record in done.records] == ["a", "b", "c"]
    assert ChatCompletion.model_validate(first["response"]["body"], strict=True).choices[0].message.content
    assert Completion.model_validate(second["response"]["body"], strict=True).usage.completion_tokens <= 5
    assert third["response"] is None and third["error"]["code"] == "invalid_parameter"


def test_templates_system_messages_and_raw_text(run, tmp_path):
    source = file_of(tmp_path, {"id": 7, "question": "why", "params": {"max_tokens": 2}}, {"answer": "no question"})
    plain, chat = run(source, "--template", "Q: {{ question }}", "--raw"), run(source, "--template", "Q: {{ question }}")
    assert [record["finish_reason"] for record in plain.records][1] == "error"
    assert plain.records[1]["error"]["code"] == "template_error"
    assert plain.records[0]["usage"]["prompt_tokens"] == len("Q: why")
    assert plain.records[0]["extra"] == {"question": "why"}
    rendered = "<|im_start|>user\nQ: why<|im_end|>\n<|im_start|>assistant"  # Jinja drops the last newline
    assert chat.records[0]["usage"]["prompt_tokens"] == len(rendered) - len("<|im_start|>" * 2 + "<|im_end|>") + 3
    system = run(source, "--template", "Q: {{ question }}", "--system", "Be brief.")
    added = len("<|im_start|>system\nBe brief.<|im_end|>\n") - len("<|im_start|><|im_end|>") + 2
    assert system.records[0]["usage"]["prompt_tokens"] == chat.records[0]["usage"]["prompt_tokens"] + added


def test_text_csv_and_parquet(run, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\n")
    (tmp_path / "b.csv").write_bytes(b'id,prompt,note\n1,"two, and\nmore",x\n2,,y\n')
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"id": ["p", "q"], "prompt": ["one", "two"]}), tmp_path / "c.parquet")
    done = run("a.txt", "b.csv", "c.parquet")
    assert [record["id"] for record in done.records] == [None, None, "1", "2", "p", "q"]
    assert [record["error"] is None for record in done.records] == [True, True, True, False, True, True]
    assert done.records[0]["text"] == done.records[4]["text"], "equal prompts, equal text"
    assert "Parquet cannot be read from standard input" in run("-", "--format", "parquet").errors


def test_several_samples_of_one_row(run, tmp_path):
    source = file_of(tmp_path, {"prompt": "hi", "n": 3, "temperature": 1.0, "max_tokens": 9}, {"prompt": "hi", "max_tokens": 9})
    done = run(source)
    record = done.records[0]
    assert [choice["index"] for choice in record["choices"]] == [0, 1, 2]
    assert record["text"] == record["choices"][0]["text"]
    assert "choices" not in done.records[1]
    assert "2 good, 0 bad" in done.errors


def test_progress_counts_rows_not_samples_and_bad_rows_too(run, model, tmp_path):
    rows = [{"prompt": f"row {index}", "n": 3, "temperature": 1.0, "max_tokens": 5} for index in range(4)]
    done = run(file_of(tmp_path, *rows, {"prompt": ""}))
    assert "\n5/5 done (1 bad), " in done.errors
    rehearsed = call("inspect-schedule", "-m", model, "rows.jsonl")
    assert b"rows      4 done, at most 12 requests at once" in rehearsed.output
    shared = call("inspect-schedule", "-m", model, "rows.jsonl", "--replicas", 2)
    counts = [int(count) for count in re.findall(rb"replica \d: (\d+) rows?,", shared.output)]
    assert len(counts) == 2 and sum(counts) == 4


def test_duplicates_fan_out_and_the_summary_says_what_that_saved(run, tmp_path):
    source = file_of(tmp_path, *[{"id": index, "prompt": "the same", "max_tokens": 20} for index in range(10)], "another")
    done = run(source)
    same = done.records[:10]
    assert len({record["text"] for record in same}) == 1
    tokens = same[0]["usage"]["prompt_tokens"] + same[0]["usage"]["completion_tokens"]
    assert f"11 good, 0 bad, 9 duplicates not computed again ({9 * tokens:,} tokens saved)" in done.errors
    assert "11/11 done" in done.errors


def test_runaway_rows_are_counted_and_stopped_where_asked(run, tmp_path):
    source = file_of(tmp_path, {"prompt": "a", "max_tokens": 100}, {"prompt": "b", "max_tokens": 63})
    done = run(source, LOOPS=1)
    assert [record["finish_reason"] for record in done.records] == ["length", "length"]
    assert "1 row ran on, repeating the same tokens" in done.errors
    stopped = run(source, "--set", "sampling.stop_on_repetition=true", LOOPS=1)
    assert stopped.records[0]["finish_reason"] == "stop" and stopped.records[0]["stop_reason"] == "repetition"
    assert stopped.records[0]["usage"]["completion_tokens"] == 64
    assert stopped.records[1]["finish_reason"] == "length"


def test_stop_strings_end_rows(run, tmp_path):
    source = file_of(tmp_path, *prompts(20, max_tokens=60))
    whole, cut = run(source).records, run(source, "--stop", "e").records
    for one, other in zip(whole, cut, strict=True):
        assert other["text"] == one["text"].split("e")[0]
        assert other["stop_reason"] == ("e" if "e" in one["text"] else None)


def test_token_ids_and_metrics_on_demand(run, tmp_path):
    rows = [*prompts(3), {"prompt": "x", "n": 3}, *[{"prompt": f"y{i}", "n": 4, "temperature": 1.0} for i in range(20)]]
    settings = ("--set", "output.token_ids=true", "--set", "output.metrics=true", "--set", "cache.num_blocks=20")
    done = run(file_of(tmp_path, *rows), *settings)
    assert done.status == 0, done.errors
    for record in done.records:
        choices = record.get("choices", [record])
        assert sum(len(choice["token_ids"]) for choice in choices) == record["usage"]["completion_tokens"]
        assert record["metrics"]["e2e_s"] >= record["metrics"]["ttft_s"] > 0


# -- limits


def test_limit_counts_rows_good_or_bad(run, tmp_path):
    source = file_of(tmp_path, "a", [], "b", "c")
    done = run(source, "--limit", 3)
    assert [record["index"] for record in done.records] == [0, 1, 2]


def test_max_time_cancels_what_is_unfinished_and_what_was_not_read(run, tmp_path):
    source = file_of(tmp_path, *prompts(300, max_tokens=40), {"prompt": ""})
    settings = ("--set", "scheduler.window=20", "--set", "scheduler.max_batch_size=8", "--set", "scheduler.job_order=input")
    done = run(source, *settings, "--max-time", "0.3s", STEP_S=0.01)
    assert done.status == 1
    assert [record["index"] for record in done.records] == list(range(301))
    reasons = [record["finish_reason"] for record in done.records]
    assert reasons[0] in ("stop", "length") and reasons[299:] == ["cancelled", "error"]
    cancelled = done.records[299]
    assert cancelled["error"] == {"code": "cancelled", "message": "not finished within --max-time, 0.3 s"}
    num_good = sum(record["error"] is None for record in done.records)
    assert f"{num_good} good, 1 bad, {300 - num_good} cancelled" in done.errors


def test_cancelled_rows_run_when_resumed(run, tmp_path):
    source = file_of(tmp_path, *prompts(60, max_tokens=40))
    settings = (source, "-o", "out.jsonl", "--set", "scheduler.max_batch_size=4")
    assert run(*settings, "--max-time", "0.2s", STEP_S=0.01).status == 1
    done = run(*settings, "--resume")
    assert done.status == 0, done.errors
    assert "kept from the earlier run" in done.errors
    records = read_records(tmp_path / "out.jsonl")
    assert sorted(record["index"] for record in records) == list(range(60))
    assert all(record["error"] is None for record in records)


# -- order and files


@pytest.mark.parametrize("to_file", [True, False])
def test_input_order(run, tmp_path, to_file):
    rows = [*prompts(50, max_tokens=30), {"prompt": ""}, *[{"prompt": f"late {index}", "max_tokens": 2} for index in range(50)]]
    source = file_of(tmp_path, *rows)
    done = run(source, "--order", "input", *(("-o", "out.jsonl") if to_file else ()))
    records = read_records(tmp_path / "out.jsonl" if to_file else done.output)
    assert [record["index"] for record in records] == list(range(101))
    assert not (tmp_path / "out.jsonl.pending").exists()


def test_an_output_that_exists_is_not_touched(run, tmp_path):
    source, output = file_of(tmp_path, *prompts(3)), tmp_path / "out.jsonl"
    output.write_text("precious\n")
    done = run(source, "-o", output)
    assert (done.status, done.errors) == (2, f"contbatch: {output} exists: --resume goes on with it, --overwrite starts anew\n")
    assert output.read_text() == "precious\n"
    assert run(source, "-o", output, "--overwrite").status == 0
    assert len(read_records(output)) == 3


@pytest.mark.parametrize("options", [("-m", "/no/such/model"), ("--on-error", "fail"), ("--set", "cache.memory=1B")])
def test_overwrite_takes_nothing_away_before_the_run_can_begin(run, tmp_path, options):
    source, output = file_of(tmp_path, "a", {"prompt": ""}), tmp_path / "out.jsonl"
    output.write_text("precious\n")
    assert run(source, "-o", output, "--overwrite", *options).status == 2
    assert output.read_text() == "precious\n"


@pytest.mark.parametrize("quiet", [[], ["-q"]])
@pytest.mark.parametrize("count", [4, 400])
def test_a_trace_that_the_disk_does_not_take_costs_no_record(run, tmp_path, count, quiet):
    source = file_of(tmp_path, *prompts(count, max_tokens=20), {"prompt": ""})
    done = run(source, "-o", "out.jsonl", "--trace", "/dev/full", *quiet)
    assert done.status == 1, done.errors
    complaint = "contbatch: --trace /dev/full: No space left on device; the trace is incomplete"
    assert done.errors.count(complaint) == 1
    assert len(read_records(tmp_path / "out.jsonl")) == count + 1
    assert run(file_of(tmp_path, "a"), "--trace", "/dev/full").status == 0


def test_overwrite_keeps_the_old_output_until_the_model_is_loaded(run, tmp_path, monkeypatch):
    source, output = file_of(tmp_path, *prompts(3), {"prompt": ""}), tmp_path / "out.jsonl"
    old = {"out.jsonl": "precious\n", "out.jsonl.meta.json": "{}", "out.jsonl.pending": "waits\n", "run.trace": "old\n"}
    for name, content in old.items():
        (tmp_path / name).write_text(content)
    with monkeypatch.context() as patched:
        patched.setattr(scripted, "build_scripted_executor", no_such_device)
        done = run(source, "-o", output, "--overwrite", "--trace", "run.trace")
    assert (done.status, done.errors) == (2, "contbatch: model.device: no such device\n")
    assert {name: (tmp_path / name).read_text() for name in old} == old
    assert run(source, "-o", output, "--overwrite", "--order", "input", "--trace", "run.trace").status == 1
    assert [record["index"] for record in read_records(output)] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["version"] == 1
    assert list(read_trace(tmp_path / "run.trace")[1])
    assert not (tmp_path / "out.jsonl.pending").exists()


def no_such_device(job):
    raise UsageError("model.device: no such device")


def test_overwrite_keeps_the_old_output_when_its_meta_file_cannot_be_written(run, tmp_path):
    source, output = file_of(tmp_path, *prompts(3)), tmp_path / "out.jsonl"
    output.write_text("precious\n")
    (tmp_path / "out.jsonl.meta.json").write_text("{}")
    (tmp_path / "out.jsonl.meta.json.tmp").mkdir()
    done = run(source, "-o", output, "--overwrite")
    assert done.status == 3 and "out.jsonl.meta.json: Is a directory" in done.errors
    assert output.read_text() == "precious\n" and (tmp_path / "out.jsonl.meta.json").read_text() == "{}"


def test_input_and_output_are_not_the_same_file(run, tmp_path):
    source = file_of(tmp_path, *prompts(3))
    before = source.read_bytes()
    for options in (("-o", source), ("-o", source, "--overwrite"), ("-o", source, "--resume")):
        assert run(source, *options).status == 2
        assert source.read_bytes() == before
    done = run(source, "--trace", source)
    assert (done.status, source.read_bytes()) == (2, before)
    assert "is " in done.errors


def test_on_error_fail_stops_before_anything_is_written_or_loaded(run, tmp_path):
    source = file_of(tmp_path, *prompts(5), {"prompt": "late", "top_p": 9})
    done = run(source, "-o", "out.jsonl", "--on-error", "fail", "--set", "scheduler.window=2", LOAD_S=60)
    assert done.status == 2
    assert "--on-error fail: " in done.errors and "line 6: top_p is 9" in done.errors
    assert done.errors.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}
    assert run(file_of(tmp_path, *prompts(5)), "-o", "out.jsonl", "--on-error", "fail").status == 0


def test_on_error_fail_on_a_pipe_stops_at_the_first_bad_row(model, tmp_path):
    rows = b"".join(b'{"prompt":"row %d","max_tokens":2}\n' % index for index in range(5000)) + b'{"prompt":""}\n'
    done = generate("-m", model, "--on-error", "fail", "--set", "scheduler.window=64", stdin=rows, script={"STEP_S": 0.001})
    assert done.returncode in (2, 3)
    assert b"line 5001: the prompt is empty" in done.stderr


def test_the_trace_of_a_pipe_says_that_it_cannot_be_rehearsed(run, model, tmp_path):
    source = file_of(tmp_path, *prompts(3, max_tokens=3))
    assert run(source, "--trace", "file.trace").status == 0
    done = generate("-m", model, "--trace", tmp_path / "pipe.trace", stdin=source.read_bytes())
    assert done.returncode == 0, done.stderr
    assert "rehearsable" not in read_trace(tmp_path / "file.trace")[0]
    assert read_trace(tmp_path / "pipe.trace")[0]["rehearsable"] is False
    for name, is_told in (("file.trace", False), ("pipe.trace", True)):
        shown = call("inspect-schedule", "--trace", name)
        assert shown.status == 0 and (b"the rows came through a pipe" in shown.output) is is_told
    again = call("inspect-schedule", "--trace", "pipe.trace", "--json")
    assert again.output == (tmp_path / "pipe.trace").read_bytes()


def test_the_trace_has_every_iteration(run, tmp_path):
    source = file_of(tmp_path, *prompts(30, max_tokens=20))
    done = run(source, "--trace", "trace.jsonl")
    header, iterations = read_trace(tmp_path / "trace.jsonl")
    iterations = list(iterations)
    assert header["rows"] == 30
    assert [step.iteration for step in iterations] == list(range(len(iterations)))
    assert sorted(index for step in iterations for index, _ in step.finished) == list(range(30))
    assert f"{len(iterations)} iterations" in done.errors
    assert run(source, "--trace", "no/such/dir/trace", LOAD_S=60).status == 2


def test_a_failing_engine_is_not_a_row_error(run, tmp_path):
    done = run(file_of(tmp_path, *prompts(30)), "-o", "out.jsonl", FAIL_AT=4)
    assert done.status == 3
    assert "RuntimeError: scripted failure" in done.errors
    last = done.errors.splitlines()[-1]
    assert last == "contbatch: the engine failed (RuntimeError): the same command with --resume goes on with out.jsonl"
    assert run(tmp_path / "rows.jsonl", "-o", "out.jsonl", "--resume").status == 0


def test_quiet_says_nothing(run, tmp_path):
    done = run(file_of(tmp_path, *prompts(3)), "-q")
    assert (done.status, done.errors, len(done.records)) == (0, "", 3)


def test_progress_and_summary_count_rows_alike(run, tmp_path):
    done = run(file_of(tmp_path, *prompts(7), {"prompt": ""}, {"prompt": "x", "n": 2, "temperature": 1.0}))
    lines = done.errors.splitlines()
    progress = next(line for line in lines if " done" in line)
    assert progress.startswith("9/9 done") and "0 running, 0 waiting" in progress
    assert "rows      8 good, 1 bad" in lines


# -- whatever bytes come in

PIECES = st.sampled_from(
    [
        b'{"prompt":"a"}',
        b'{"id":1,"prompt":"a","max_tokens":2}',
        b'{"id":"x","messages":[{"role":"user","content":"hi"}]}',
        b'{"prompt_token_ids":[1,2,300]}',
        b'{"custom_id":"q","method":"POST","url":"/v1/completions","body":{"prompt":"x","max_tokens":1}}',
        b'"bare"',
        b"\r",
        b"\xef\xbb\xbf",
        b"\xe2\x80\xa8",
        b'"\\ud800"',
        b'{"prompt":"a","max_tokens":1e400}',
        b'{"prompt":"a",}',
        b"[" * 200,
        b'{"prompt":NaN}',
        b'{"prompt":"a","stop":["", 1]}',
        b'{"prompt":"a","n":3,"temperature":2}',
        b'{"prompt":"a","logit_bias":{"5":1}}',
        b'{"messages":[{"role":"odd","content":"x"}]}',
        b'{"prompt":"a","response_format":{"type":"json_object"}}',
        b'{"prompt":"a","id":123456789012345678901234567890}',
        b'{"prompt":"a","extra":{"deep":[[[]]]}}',
    ]
)
LINES = st.lists(st.one_of(PIECES, st.binary(max_size=40), st.builds(lambda a, b: a + b, PIECES, PIECES)), max_size=12)


def count_rows(content):
    """How many rows a JSON Lines file has: its lines that are not blank, the byte order mark aside."""
    return sum(bool(line.strip(b" \t\r")) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))


@pytest.mark.parametrize("order", ["completion", "input"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, is_ended=st.booleans())
@example(lines=[b"\xef\xbb\xbf", b'{"prompt":"a"}', b"\xef\xbb\xbf"], is_ended=False)
def test_whatever_comes_in_each_row_gets_one_record(model, tmp_path, order, lines, is_ended):
    content = b"\n".join(lines) + b"\n" * is_ended
    source = tmp_path / "rows.jsonl"
    source.write_bytes(content)
    done = call("generate", "-m", model, source, "--order", order, "--max-tokens", 5)
    assert "Traceback" not in done.errors, done.errors
    assert done.status in (0, 1), done.errors
    records = read_records(done.output)
    assert sorted(record["index"] for record in records) == list(range(count_rows(content)))
    assert (done.status == 1) == any(record["error"] for record in records)
    for record in records:
        json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv", "rows.jsonl.gz"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=200), st.builds(lambda lines: b"id,prompt\n" + b"\n".join(lines), LINES)))
def test_other_formats_leave_no_traceback_either(model, tmp_path, name, content):
    source = tmp_path / name
    source.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    done = call("generate", "-m", model, source, "--max-tokens", 5)
    assert "Traceback" not in done.errors, done.errors
    assert done.status in (0, 1) or (done.status in (2, 3) and not done.output), done.errors
    indices = sorted(record["index"] for record in read_records(done.output))
    assert indices == list(range(len(indices)))
