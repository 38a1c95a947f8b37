"""Writing: whole records or nothing, in both orders, on full disks, into closed pipes, under a lock."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from contbatch_cli.data.output_file import open_output, pending_path
from contbatch_cli.data.run_meta import meta_path, write_meta
from contbatch_cli.data.writer import ReaderGone, output_writer, standard_output_writer
from contbatch_cli.errors import EngineError, ExitStatus, UsageError


def record(index, size=10):
    return json.dumps({"index": index, "text": "x" * size}).encode() + b"\n"


def no_time():
    return 0.0


def indices(path):
    return [json.loads(line)["index"] for line in path.read_bytes().splitlines()]


def run(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        **options,
    )


def test_each_record_is_in_the_file_when_write_returns(tmp_path):
    output = open_output(str(tmp_path / "out"), "new")
    writer = output_writer(output, "completion", no_time)
    for index in (3, 1):
        writer.write(index, record(index))
        assert output.path.read_bytes().endswith(record(index))
    assert indices(output.path) == [3, 1]


def test_one_write_a_record_and_at_most_one_sync_a_second(tmp_path, monkeypatch):
    now, writes, syncs = [0.0], [], []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(len(data)) or real_write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: syncs.append(now[0]) or real_sync(fd))
    writer = output_writer(open_output(str(tmp_path / "out"), "new"), "completion", lambda: now[0])
    for index in range(100):
        now[0] = index * 0.1
        writer.write(index, record(index))
    writer.close()
    assert writes == [len(record(index)) for index in range(100)]
    assert len(syncs) <= 11
    assert all(after - before >= 1.0 for before, after in zip(syncs[:-1], syncs[1:-1], strict=False))


def test_short_writes_are_finished(tmp_path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    writer = output_writer(open_output(str(tmp_path / "out"), "new"), "completion", no_time)
    writer.write(0, record(0))
    assert indices(tmp_path / "out") == [0]


FULL_DISK = """
import resource, sys
from contbatch_cli.data.output_file import open_output
from contbatch_cli.data.writer import output_writer
from contbatch_cli.errors import EngineError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = output_writer(open_output(sys.argv[1], "new"), sys.argv[2], lambda: 0.0)
order = range(50) if sys.argv[2] == "completion" else range(1, 51)
try:
    for index in order:
        writer.write(index, b'{"index": %d, "text": "%s"}\\n' % (index, b"x" * 40))
except EngineError as error:
    print(error, int(error.exit_status))
"""


@pytest.mark.parametrize(("order", "written"), [("completion", "out"), ("input", "out.pending")])
def test_a_full_disk_leaves_whole_records_only(tmp_path, order, written):
    done = run(FULL_DISK, tmp_path / "out", order)
    assert "the records in it are whole, --resume goes on 3" in done.stdout, done.stderr
    content = (tmp_path / written).read_bytes()
    assert 800 < len(content) <= 1000 and content.endswith(b"\n")
    assert indices(tmp_path / written) == list(range(order == "input", len(content.splitlines()) + (order == "input")))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full():
    writer = output_writer(open_output("/dev/full", "new"), "completion", no_time)
    with pytest.raises(EngineError, match="No space left"):
        writer.write(0, record(0))


def test_a_redirected_standard_output_is_cut_back_too(tmp_path):
    code = FULL_DISK.replace('open_output(sys.argv[1], "new")', "1").replace("output_writer(1", "standard_output_writer(1")
    code = code.replace("import output_writer", "import standard_output_writer").replace(
        "print(error", "print(error, file=sys.stderr"
    )
    with (tmp_path / "out").open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", code.replace(", int(error.exit_status)", ""), "", "completion"],
            stdout=file,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            timeout=60,
        )
    assert b"standard output" in done.stderr
    assert len(indices(tmp_path / "out")) > 10


def test_a_reader_that_went_away():
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(ReaderGone) as caught:
        standard_output_writer(writing, "completion", no_time).write(0, record(0))
    os.close(writing)
    assert caught.value.exit_status == ExitStatus.SIGPIPE


def test_a_pipe_that_does_not_block_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    big = record(0, 300_000)
    code = "import os, sys, time; time.sleep(0.2); sys.stdout.write(str(len(sys.stdin.buffer.read())))"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    standard_output_writer(writing, "completion", no_time).write(0, big)
    os.close(writing)
    assert int(child.communicate(timeout=30)[0]) == len(big)


@pytest.mark.parametrize("seed", range(5))
def test_input_order_whatever_the_order_of_completion(tmp_path, seed):
    path = tmp_path / "out"
    order = list(range(300))
    random.Random(seed).shuffle(order)
    writer = output_writer(open_output(str(path), "new"), "input", no_time)
    for count, index in enumerate(order, 1):
        writer.write(index, record(index, index % 50))
        on_disk = set(indices(path)) | set(indices(pending_path(path)))
        assert on_disk == set(order[:count])
        assert indices(path) == list(range(len(indices(path))))
    writer.close()
    assert indices(path) == list(range(300))
    assert not pending_path(path).exists()


def test_input_order_to_a_pipe():
    reading, writing = os.pipe()
    writer = standard_output_writer(writing, "input", no_time)
    for index in (2, 1, 0, 3):
        writer.write(index, record(index))
    writer.close()
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert [json.loads(line)["index"] for line in file] == [0, 1, 2, 3]


def test_waiting_records_are_not_in_memory(tmp_path):
    writer = output_writer(open_output(str(tmp_path / "out"), "new"), "input", no_time)
    tracemalloc.start()
    for index in range(1, 3000):
        writer.write(index, record(index, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    writer.write(0, record(0))
    assert len(indices(tmp_path / "out")) == 3000


def test_the_pending_file_is_emptied_when_nothing_waits(tmp_path):
    path = tmp_path / "out"
    writer = output_writer(open_output(str(path), "new"), "input", no_time)
    for start in range(0, 40, 2):
        writer.write(start + 1, record(start + 1, 1_000_000))
        writer.write(start, record(start))
    assert pending_path(path).stat().st_size < 20_000_000
    writer.write(41, record(41))
    writer.write(40, record(40))
    assert indices(path) == list(range(42))


def test_an_existing_output_is_refused_without_a_word(tmp_path):
    path = tmp_path / "out"
    path.write_text("kept")
    with pytest.raises(UsageError, match="exists: --resume goes on with it, --overwrite starts anew"):
        open_output(str(path), "new")
    assert path.read_text() == "kept"
    output = open_output(str(path), "overwrite")
    assert path.read_text() == "kept"
    output.empty()
    assert path.read_text() == ""
    output.close()


def test_a_pending_file_alone_is_refused_too(tmp_path):
    pending_path(tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match=r"out\.pending exists"):
        open_output(str(tmp_path / "out"), "new")
    output = open_output(str(tmp_path / "out"), "overwrite")
    output.empty()
    assert not pending_path(tmp_path / "out").exists()
    output.close()


def test_input_and_output_must_differ(tmp_path):
    path, link = tmp_path / "in.jsonl", tmp_path / "link"
    path.write_text('"a"')
    link.symlink_to(path)
    for output in (path, link):
        for mode in ("overwrite", "resume", "new"):
            with pytest.raises(UsageError, match="is input and output at once"):
                open_output(str(output), mode, [str(path)])
    assert path.read_text() == '"a"'
    meta_path(tmp_path / "out").write_text("{}")
    with pytest.raises(UsageError, match="is input and output at once"):
        open_output(str(tmp_path / "out"), "new", [str(meta_path(tmp_path / "out"))])


def test_a_run_that_never_began_leaves_no_file(tmp_path):
    path = tmp_path / "out"
    open_output(str(path), "new").close()
    assert not path.exists()
    output = open_output(str(path), "new")
    write_meta(path, {})
    output.close()
    assert path.exists()


def test_outputs_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="there is no directory"):
        open_output(str(tmp_path / "absent" / "out"), "new")
    with pytest.raises(UsageError, match="is a directory"):
        open_output(str(tmp_path), "new")
    with pytest.raises(UsageError, match="only regular files can be resumed"):
        open_output("/dev/null", "resume")


HOLD = """
import sys
from pathlib import Path
from contbatch_cli.data.output_file import open_output
from contbatch_cli.data.run_meta import write_meta
output = open_output(sys.argv[1], "new")
write_meta(Path(sys.argv[1]), {})
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_by_name_until_the_first_is_gone(tmp_path):
    path = tmp_path / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert holder.stdout.readline() == "locked\n"
    for mode in ("resume", "overwrite"):
        with pytest.raises(UsageError) as caught:
            open_output(str(path), mode)
        assert str(caught.value) == f"{path}: another contbatch run (process {holder.pid}) is writing to it"
    holder.kill()
    holder.wait(timeout=30)
    holder.stdin.close()
    holder.stdout.close()
    open_output(str(path), "resume").close()


def test_the_lock_outlives_a_renaming(tmp_path):
    path = tmp_path / "out"
    output = open_output(str(path), "new")
    temporary = tmp_path / "new"
    temporary.write_bytes(record(7))
    output.replace_with(temporary)
    with pytest.raises(UsageError, match="another contbatch run"):
        open_output(str(path), "resume")
    output_writer(output, "completion", no_time).write(8, record(8))
    assert indices(path) == [7, 8]
