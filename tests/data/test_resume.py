"""Resuming: after any cut, any kill, with changed rows and settings; in the end each row has one record."""

import contextlib
import errno
import json
import os
import random

import pytest

from contbatch_cli.data.output_file import open_output, pending_path
from contbatch_cli.data.readers import read_rows
from contbatch_cli.data.resume import good_record, resume_output, start_output
from contbatch_cli.data.row_table import RowTable
from contbatch_cli.data.run_meta import meta_path, read_meta, write_meta
from contbatch_cli.data.writer import output_writer
from contbatch_cli.errors import EngineError, UsageError

SETTINGS = {"model": "tiny", "sampling.temperature": 0.0}


def no_time():
    return 0.0


def write_input(path, num_rows=6):
    path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"prompt {i}" * (i % 3 + 1)}) + "\n" for i in range(num_rows)))
    return path


def record_of(row, error=None):
    record = {"index": row.index, "id": row.id, "text": f"answer é {row.index}" if error is None else None}
    return json.dumps({**record, "error": error, "row_hash": row.row_hash}, ensure_ascii=False).encode() + b"\n"


def run(source, path, order="completion", stop_after=None, seed=0, settings=SETTINGS, **options):
    """A whole run with --resume; the records come in a shuffled order. `stop_after` records it dies."""
    output = open_output(str(path), "resume")
    try:
        plan = resume_output(output, settings, order, read_rows([str(source)]), **options)
        writer = output_writer(output, order, no_time, plan.first, plan.waiting)
        rows = list(plan.remaining(read_rows([str(source)])))
        random.Random(seed).shuffle(rows)
        for row in rows[:stop_after]:
            writer.write(row.index, record_of(row))
        if stop_after is None:
            writer.close()
        return plan
    finally:
        os.close(output.descriptor)


def assert_whole(source, path, order="completion"):
    lines = path.read_bytes().splitlines(keepends=True)
    expected = [record_of(row) for row in read_rows([str(source)])]
    assert (lines if order == "input" else sorted(lines)) == (expected if order == "input" else sorted(expected))
    assert not pending_path(path).exists()
    assert not [name for name in os.listdir(path.parent) if name.endswith((".resume", ".tmp"))]


@pytest.mark.parametrize("order", ["completion", "input"])
def test_after_a_cut_at_every_byte(tmp_path, order):
    source, path = write_input(tmp_path / "in.jsonl", 2), tmp_path / "out"
    run(source, path, "completion")
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = sum(line.endswith(b"\n") for line in whole[:cut].splitlines(keepends=True))
        plan = run(source, path, order)
        assert plan.num_kept == kept
        assert_whole(source, path, order)


@pytest.mark.parametrize("seed", range(8))
def test_dying_again_and_again_in_either_order(tmp_path, seed):
    rng = random.Random(seed)
    source, path = write_input(tmp_path / "in.jsonl", 40), tmp_path / "out"
    num_kept = 0
    for step in range(8):
        order = rng.choice(["completion", "input"])
        plan = run(source, path, order, stop_after=rng.randrange(6), seed=step)
        assert plan.num_kept >= num_kept
        num_kept = plan.num_kept
        torn = rng.choice([path, pending_path(path)])
        if torn.exists():
            with torn.open("ab") as file:
                file.write(b'{"index": 3, "te')
    order = rng.choice(["completion", "input"])
    run(source, path, order)
    assert_whole(source, path, order)


class Killed(BaseException):
    pass


def kill_at(monkeypatch, call):
    """The n-th of the calls that change the file system is the last: the process dies before it takes effect."""
    count = [0]

    def wrap(real):
        def wrapped(*arguments, **options):
            count[0] += 1
            if count[0] == call:
                raise Killed
            return real(*arguments, **options)

        return wrapped

    for name in ("rename", "replace", "unlink", "fsync", "ftruncate"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return count


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("before", ["completion", "input"])
def test_a_kill_at_any_step_of_the_resume_loses_no_record(tmp_path, monkeypatch, before, order):
    source = write_input(tmp_path / "in.jsonl", 12)
    for call in range(1, 30):
        directory = tmp_path / str(call)
        directory.mkdir()
        path = directory / "out"
        kept = run(source, path, before, stop_after=7, seed=3)
        with path.open("ab") as file:
            file.write(record_of(next(read_rows([str(source)])), {"code": "x", "message": "y"}) + b'{"torn')
        if before == "input":  # the record of row 5 has been moved and not forgotten, another not even moved
            with pending_path(path).open("ab") as file:
                file.writelines(path.read_bytes().splitlines(keepends=True)[:2])
        assert kept.num_kept == 0
        with monkeypatch.context() as patch:
            count = kill_at(patch, call)
            with contextlib.suppress(Killed):
                run(source, path, order, stop_after=0)
            died = count[0] >= call
        plan = run(source, path, order)
        assert plan.num_kept == 7
        assert_whole(source, path, order)
        if not died:
            return
    pytest.fail("the resume never came to its end")


@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_full_disk_during_the_resume_leaves_the_output_as_it_was(tmp_path, monkeypatch, order):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    run(source, path, stop_after=3)
    with path.open("ab") as file:
        file.write(b'{"torn')
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EngineError, match="No space left on device; it is as it was"):
            run(source, path, order)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out", "out.meta.json"]
    run(source, path, order)
    assert_whole(source, path, order)


def test_a_record_moved_by_a_dying_run_is_found_on_either_side(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl", 5), tmp_path / "out"
    rows = list(read_rows([str(source)]))
    write_meta(path, SETTINGS)
    path.write_bytes(record_of(rows[0]) + record_of(rows[1]))
    pending_path(path).write_bytes(record_of(rows[1]) + record_of(rows[2]) + record_of(rows[4]))
    plan = run(source, path, "input")
    assert (plan.num_kept, plan.first) == (4, 3)
    assert_whole(source, path, "input")


def test_error_and_cancelled_records_run_again(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    rows = list(read_rows([str(source)]))
    write_meta(path, SETTINGS)
    failed = {"code": "cancelled", "message": "m"}
    path.write_bytes(b"".join([record_of(rows[0]), record_of(rows[1], failed), record_of(rows[2])]))
    plan = run(source, path)
    assert (plan.num_kept, plan.num_failed) == (2, 1)
    assert_whole(source, path)


def test_kept_records_stay_as_they_are_to_the_byte(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    row = next(read_rows([str(source)]))
    odd = b'{ "row_hash":"%s",  "error": null, "index":0, "more": 1.50 }\n' % row.row_hash.encode()
    write_meta(path, SETTINGS)
    path.write_bytes(odd + b"garbage\n\0\0\0\n")
    plan = run(source, path)
    assert path.read_bytes().startswith(odd)
    assert (plan.num_kept, plan.num_broken) == (1, 2)


def test_repeated_records_are_kept_once(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    write_meta(path, SETTINGS)
    rows = list(read_rows([str(source)]))
    path.write_bytes(record_of(rows[0]) * 2)
    run(source, path)
    assert_whole(source, path)


def test_a_missing_or_empty_output_is_begun_afresh(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    path.write_bytes(b"")
    write_meta(path, {"model": "another"})
    run(source, path)
    assert_whole(source, path)
    assert read_meta(path)["settings"] == SETTINGS


def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    run(source, path, stop_after=3)
    with path.open("ab") as file:
        file.write(b'{"torn')
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"sampling\.temperature was 0\.0 when .* was begun and is 0\.7 now"):
        run(source, path, settings={**SETTINGS, "sampling.temperature": 0.7})
    with pytest.raises(UsageError, match="model was"):
        run(source, path, settings={"sampling.temperature": 0.0})
    with pytest.raises(UsageError, match="template was null"):
        run(source, path, settings={**SETTINGS, "template": "x"})
    assert path.read_bytes() == before
    assert read_meta(path)["settings"] == SETTINGS


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 100_000, b'{"version": 2, "settings": {}}'])
def test_a_meta_file_that_is_missing_or_damaged_is_refused(tmp_path, content):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    run(source, path, stop_after=3)
    meta_path(path).unlink()
    if content is not None:
        meta_path(path).write_bytes(content)
    with pytest.raises(UsageError, match=r"out\.meta\.json"):
        run(source, path)


def test_a_changed_row_is_refused_by_name_or_run_again(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    run(source, path)
    lines = source.read_text().splitlines(keepends=True)
    lines[2] = '{"id": "r2", "prompt": "another"}\n'
    source.write_text("".join(lines))
    with pytest.raises(UsageError, match=r'row 2 \(id "r2"\) of .*in\.jsonl, line 3 is not the row'):
        run(source, path)
    plan = run(source, path, rerun_changed=True)
    assert (plan.num_kept, plan.num_changed) == (5, 1)
    assert_whole(source, path)


def test_rows_that_were_added_run_and_rows_that_are_gone_are_named(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl", 6), tmp_path / "out"
    run(source, path)
    write_input(source, 9)
    assert run(source, path).num_kept == 6
    assert_whole(source, path)
    write_input(source, 4)
    with pytest.raises(UsageError, match="a record of row 4, the input has only 4 rows"):
        run(source, path)
    assert run(source, path, is_whole_input=False).num_kept == 9
    run(source, path, rerun_changed=True)
    assert_whole(source, path)


def test_an_input_that_is_read_once_is_compared_while_it_is_read(tmp_path):
    source, path = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    run(source, path, stop_after=6)
    source.write_text(source.read_text().replace("prompt 0", "changed"))
    output = open_output(str(path), "resume")
    plan = resume_output(output, SETTINGS, "completion", None)
    with pytest.raises(UsageError, match="row 0"):
        list(plan.remaining(read_rows([str(source)])))
    with pytest.raises(UsageError, match="read twice"):
        resume_output(output, SETTINGS, "completion", None, rerun_changed=True)
    output.close()


def test_openai_lines_are_resumed_too():
    line = {"id": "x", "custom_id": "c", "response": {}, "error": None, "index": 4, "row_hash": "00000000000000ff"}
    assert good_record(json.dumps(line).encode() + b"\n") == (4, 255)
    assert good_record(json.dumps({**line, "error": {"code": "x"}}).encode() + b"\n") == "failed"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}\n",
        b"[]\n",
        b'{"index": true, "error": null, "row_hash": "0000000000000000"}\n',
        b'{"index": -1, "error": null, "row_hash": "0000000000000000"}\n',
        b'{"index": 1, "error": null, "row_hash": "x"}\n',
        b'{"index": 1, "row_hash": "0000000000000000"}\n',
        b'{"index": 1, "error": null, "row_hash": "0000000000000000"}',
        b'{"index": 99999999999999999999, "error": null, "row_hash": "0000000000000000"}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ],
)
def test_lines_that_are_no_records(line):
    assert good_record(line) is None


def test_the_meta_file_is_there_before_the_first_record(tmp_path):
    output = open_output(str(tmp_path / "out"), "new")
    start_output(output, SETTINGS)
    assert read_meta(output.path) == {"version": 1, "pid": os.getpid(), "settings": SETTINGS}
    output.close()


def test_row_table_is_exact_and_small():
    rng, table, oracle = random.Random(5), RowTable(), {}
    for _ in range(3000):
        index, number = rng.choice([rng.randrange(9000), rng.randrange(2**47)]), rng.randrange(1, 2**64)
        table[index] = oracle[index] = number
    assert list(table.indices()) == sorted(oracle)
    assert all(table[index] == number for index, number in oracle.items())
    table.drop_before(8192)
    assert table[100] == 0 and table[8192 + 4096] == oracle.get(8192 + 4096, 0)
    dense = RowTable()
    for index in range(1_000_000):
        dense[index] = 1
    assert sum(page.buffer_info()[1] * 8 for page in dense._pages.values()) < 8.1 * 1_000_000
