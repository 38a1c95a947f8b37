"""Signals, pipes and terminals, through the real command in processes of their own."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from contbatch_cli.cli.signals import Interrupted, Interrupts
from contbatch_cli.errors import ExitStatus
from tests.cli.scripted import ROOT, command, environment, generate, read_records, write_model, write_rows

SLOW_STEP = 0.02


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ({"id": f"r{i}", "prompt": f"row {i}", "max_tokens": 30} for i in range(400)))


def start(*arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, script=None, **more):
    return subprocess.Popen(
        command("generate", *arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment(**script or {}),
        cwd=ROOT,
        **more,
    )


def wait_until(condition, process=None, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        assert process is None or process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.005)


def read_until(stream, wanted):
    """Reads a stream until `wanted` stands in it; what was read."""
    seen = b""
    while wanted not in seen:
        piece = os.read(stream.fileno(), 4096)
        assert piece, seen.decode()
        seen += piece
    return seen


def raise_another():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted as error:
        raise SystemError("returned a result with an exception set") from error


def swallow():
    with suppress(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("library", [raise_another, swallow])
def test_what_a_library_makes_of_the_exception_of_a_signal_changes_nothing(library):
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.may_raise(), interrupts.may_raise():
            library()
        assert interrupts.status == ExitStatus.SIGTERM


def test_an_error_within_without_a_signal_is_raised_as_it_is():
    with Interrupts() as interrupts, pytest.raises(SystemError), interrupts.may_raise():
        raise SystemError


def ends(process, status, seconds=30):
    """The process ends with `status` and no traceback; the last line of what it said to people."""
    _, errors = process.communicate(timeout=seconds)
    assert process.returncode == status, errors.decode()
    assert b"Traceback" not in errors and b"Fatal" not in errors, errors.decode()
    lines = errors.decode().splitlines()
    return lines[-1] if lines else ""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_the_first_signal_ends_the_run_in_order(tmp_path, model, source, number, status):
    output = tmp_path / "out.jsonl"
    process = start(source, "-m", model, "-o", output, script={"STEP_S": SLOW_STEP})
    wait_until(lambda: output.exists() and output.stat().st_size > 3000, process)
    process.send_signal(number)
    last = ends(process, status)
    assert last == (
        f"contbatch: interrupted; rows without a record were not finished: the same command with --resume goes on with {output}"
    )
    kept = read_records(output)
    assert 10 < len(kept) < 400
    assert generate(source, "-m", model, "-o", output, "--resume", "-q").returncode == 0
    records = read_records(output)
    assert records[: len(kept)] == kept
    assert sorted(record["index"] for record in records) == list(range(400))


def test_the_second_signal_ends_it_at_once(model, source):
    process = start(source, "-m", model, script={"STEP_S": 30})
    read_until(process.stderr, b"cache ")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None, "in the midst of a step the first one waits"
    process.send_signal(signal.SIGINT)
    ends(process, 130, seconds=5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_standard_input_is_waited_for(model, number):
    read_end, write_end = os.pipe()
    process = start("-", "-m", model, stdin=read_end, script={"STEP_S": 0})
    os.write(write_end, b'"first"\n')
    read_until(process.stdout, b"\n")
    process.send_signal(number)
    assert "use -o FILE to be able to go on" in ends(process, 128 + number)
    os.close(write_end)
    os.close(read_end)


def test_interrupted_while_nothing_came_at_all(model):
    read_end, write_end = os.pipe()
    process = start("-", "-m", model, stdin=read_end)
    read_until(process.stderr, b"cache ")
    process.send_signal(signal.SIGINT)
    ends(process, 130)
    os.close(write_end)
    os.close(read_end)


def test_interrupted_while_a_big_window_is_read(tmp_path, model):
    source = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"row {i} " * 50} for i in range(60_000)))
    output = tmp_path / "out.jsonl"
    process = start(source, "-m", model, "-o", output)
    wait_until(lambda: (tmp_path / "out.jsonl.meta.json").exists(), process)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "--resume goes on" in ends(process, 130, seconds=5)
    assert output.read_bytes() == b""


def test_interrupted_while_the_model_is_loaded(tmp_path, model, source):
    output = tmp_path / "out.jsonl"
    process = start(source, "-m", model, "-o", output, script={"LOAD_S": 30})
    wait_until(lambda: (tmp_path / "out.jsonl.meta.json").exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    ends(process, 130, seconds=5)


def test_interrupted_while_the_rest_is_cancelled(tmp_path, model):
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"row {i}", "max_tokens": 9} for i in range(100_000)))
    output = tmp_path / "out.jsonl"
    settings = (rows, "-m", model, "-o", output, "--set", "scheduler.window=16", "--max-time", "2s")
    process = start(*settings, "--set", "scheduler.job_order=input", script={"STEP_S": 0.2})
    wait_until(lambda: output.exists() and b"cancelled" in output.read_bytes()[-4096:], process)
    process.send_signal(signal.SIGINT)
    ends(process, 130, seconds=5)
    assert len(read_records(output)) < 100_000


def test_the_reader_of_standard_output_goes_away(model, source):
    line = f"{' '.join(command('generate', source, '-m', model))} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, env=environment(STEP_S=0.001), cwd=ROOT, timeout=60
    )
    record, status = done.stdout.splitlines()
    assert record.startswith(b'{"index"')
    assert status == b"141"
    assert b"Traceback" not in done.stderr and b"rror" not in done.stderr, done.stderr.decode()


def test_nothing_but_records_on_standard_output(model, source):
    done = generate(source, "-m", model, script={"NOISE": "a library prints\n"})
    assert done.returncode == 0
    assert sorted(record["index"] for record in read_records(done.stdout)) == list(range(400))
    assert b"a library prints" in done.stderr


def test_the_reader_of_standard_error_goes_away(tmp_path, model, source):
    output = tmp_path / "out.jsonl"
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start(source, "-m", model, "-o", output, stderr=write_end)
    os.close(write_end)
    assert process.wait(timeout=60) == 0
    assert len(read_records(output)) == 400


@pytest.mark.parametrize("closed", ["0<&-", "2>&-", "0<&- 2>&-", "0<&- 1>&- 2>&-", "1>&-"])
def test_closed_standard_descriptors(tmp_path, model, source, closed):
    output = tmp_path / "out.jsonl"
    line = f"exec {' '.join(command('generate', source, '-m', model, '-o', output))} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment(NOISE="noise"), cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(record["index"] for record in read_records(output)) == list(range(400))
    assert b"noise" not in source.read_bytes()


def test_records_have_to_go_somewhere(model, source):
    line = f"exec {' '.join(command('generate', source, '-m', model))} 1>&-"
    done = subprocess.run(["bash", "-c", line], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, b"contbatch: standard output is closed: use -o FILE\n")


def test_standard_input_that_is_closed_has_no_rows(model):
    for arguments in ("-", ""):
        line = f"exec {' '.join(command('generate', '-m', model))} {arguments} 0<&-"
        done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment(), cwd=ROOT, timeout=60)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1, done.stderr.decode()


def test_any_locale(tmp_path, model):
    source = write_rows(tmp_path / "rows.jsonl", [{"id": "é\u2028ü", "prompt": "naïve 😀 「」"}, {"id": "ß", "prompt": ""}])
    plain = {**environment(), "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command("generate", source, "-m", model), stdin=subprocess.DEVNULL, capture_output=True, env=plain, cwd=ROOT, timeout=60
    )
    assert done.returncode == 1, done.stderr.decode()
    assert {record["id"] for record in read_records(done.stdout)} == {"é\u2028ü", "ß"}


def test_rows_that_trickle_in_get_records_before_the_pipe_ends(model):
    process = start("-", "-m", model, stdin=subprocess.PIPE)
    for number in range(4):
        process.stdin.write(b'{"prompt":"row","id":%d}\n' % number)
        process.stdin.flush()
        assert b'"id":%d' % number in read_until(process.stdout, b"\n")
    process.stdin.close()
    process.stdin = None
    ends(process, 0)


def test_max_time_holds_while_a_pipe_is_silent(model):
    read_end, write_end = os.pipe()
    process = start("-", "-m", model, "--max-time", "2s", stdin=read_end)
    os.write(write_end, b'"first"\n')
    assert b'"finish_reason":"stop"' in read_until(process.stdout, b"\n")
    ends(process, 0, seconds=15)
    os.close(write_end)
    os.close(read_end)


class Terminal:
    """A real pseudo-terminal of 100 columns with a process on it; `seen` is all that it wrote."""

    def __init__(self, *arguments, script=None, both=True):
        self.master, side = pty.openpty()
        os.set_blocking(self.master, False)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        streams = {"stdin": side, "stderr": side, "stdout": side if both else subprocess.PIPE}
        self.process = subprocess.Popen(
            command("generate", *arguments),
            env={**environment(**script or {}), "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
            cwd=ROOT,
            start_new_session=True,
            **streams,
        )
        os.close(side)
        self.seen = b""

    def read(self, seconds):
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                return False
        return True

    def read_until(self, wanted, seconds=60):
        deadline = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < deadline and self.read(1), self.seen.decode()

    def end(self, seconds=60):
        deadline = time.monotonic() + seconds
        while self.read(0.2) and (self.process.poll() is None or select.select([self.master], [], [], 0)[0]):
            assert time.monotonic() < deadline, self.seen.decode()
        self.process.wait(timeout=seconds)
        os.close(self.master)


CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def test_records_and_the_live_table_on_one_terminal(tmp_path, model):
    source = write_rows(
        tmp_path / "rows.jsonl", ({"id": f"[bold]r{i}", "prompt": f"row {i}", "note": "x" * 150} for i in range(60))
    )
    terminal = Terminal(source, "-m", model, script={"STEP_S": 0.01})
    terminal.end()
    assert terminal.process.returncode == 0, terminal.seen.decode()
    assert b"\x1b[" in terminal.seen, "no table was drawn"
    assert b"decodes" in terminal.seen or b"decode" in terminal.seen
    text = CONTROL.sub(b"", terminal.seen).replace(b"\r", b"\n")
    records = [line for line in text.split(b"\n") if line.startswith(b'{"index"')]
    assert len(records) == 60, "each record stands whole, unwrapped, at the start of a line"
    assert b"60 good, 0 bad" in terminal.seen


def test_interrupted_on_a_terminal(model, source):
    terminal = Terminal(source, "-m", model, script={"STEP_S": SLOW_STEP})
    terminal.read_until(b"tokens/s")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.end()
    assert terminal.process.returncode == 130
    assert terminal.seen.rstrip().endswith(b"use -o FILE to be able to go on")
    assert b"Traceback" not in terminal.seen


def test_without_prompts_a_terminal_is_not_waited_for(model):
    terminal = Terminal("-m", model)
    terminal.end()
    assert terminal.process.returncode == 2
    assert b"PROMPTS: no input" in terminal.seen


def test_a_terminal_that_is_closed(tmp_path, model, source):
    output = tmp_path / "out.jsonl"
    terminal = Terminal(source, "-m", model, "-o", output, script={"STEP_S": 0.005})
    terminal.read_until(b"tokens/s")
    os.close(terminal.master)
    assert terminal.process.wait(timeout=60) in (0, 129)
    assert read_records(output)
