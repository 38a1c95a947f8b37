from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pyte
import pytest

from contbatch_cli.cli.live import (
    COUNTED_BY,
    LiveView,
    PlainView,
    QuietView,
    RunHeader,
    make_view,
    told,
)
from contbatch_cli.cli.summary import RunSummary, summary_lines
from contbatch_cli.metrics import Metrics, RowCounts
from tests.fake_runs import FakeJob, reports


class Terminal:
    """A pseudo terminal read by a thread into an emulator with a scrollback, and into a list of what was written when."""

    def __init__(self, columns: int, rows: int) -> None:
        self.master, self.slave = pty.openpty()
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.written = bytearray()
        self.resize(columns, rows)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.written += data
            self.stream.feed(data)

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(5)
        os.close(self.master)

    def lines(self) -> list[str]:
        """Scrollback and screen, trailing blanks cut."""
        columns = self.screen.columns
        history = ["".join(line[x].data for x in range(columns)).rstrip() for line in self.screen.history.top]
        return history + [line.rstrip() for line in self.screen.display]


@contextmanager
def terminal(columns: int = 100, rows: int = 24) -> Iterator[Terminal]:
    opened = Terminal(columns, rows)
    try:
        yield opened
    finally:
        if opened._thread.is_alive():
            opened.close()


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(
    term: Terminal, job: FakeJob, names: dict[int, str | int] | None = None, on_step: Callable[[int], None] | None = None
) -> tuple[list[bytes], Metrics]:
    """A whole run on the terminal, standard output being the same one; returns its records."""
    clock = FakeClock()
    metrics = Metrics(total_requests=len(job.prompts))
    metrics.rows = RowCounts(0, 0, len(job.prompts))
    view = LiveView(metrics, (names or {}).get, term.slave, term.slave, clock)
    view.start(RunHeader(("a header line",), len(job.prompts)))
    records = []
    for report in reports(job):
        clock.now += report.elapsed_s
        metrics.observe(report)
        for request in report.finished:
            records.append((json.dumps({"index": request.request_id.row, "text": "w [x] " * 30}) + "\n").encode())
            view.record(records[-1])
        metrics.rows = metrics.rows._replace(done=len(records))
        view.iteration(report)
        if on_step:
            on_step(report.iteration)
    snapshot = metrics.snapshot()
    view.finish(RunSummary(snapshot, snapshot.good, snapshot.bad))
    view.close()
    return records, metrics


def test_records_stand_whole_above_the_table_and_nothing_else_stays() -> None:
    with terminal(100, 24) as term:
        records, _ = play(term, FakeJob.drawn(1, 40))
        term.close()
        kept = [line for line in term.lines() if line]
    text = "".join(line.ljust(100) if line.startswith(("{", "w", " ", "[")) else line + "\n" for line in kept)
    for record in records:
        assert re.sub(r"\s+", "", record.decode()) in re.sub(r"\s+", "", text)
    assert kept[0] == "a header line"
    assert not [line for line in kept if "prefill runs" in line], "the table is gone at the end"
    assert [line.split()[0] for line in kept[-5:]] == ["rows", "tokens", "latency", "schedule", "output"]


def test_record_bytes_are_written_unchanged() -> None:
    with terminal() as term:
        records, _ = play(term, FakeJob.drawn(2, 30))
        term.close()
        for record in records:
            assert term.written.count(record.replace(b"\n", b"\r\n")) == 1


def test_redraws_are_at_most_eight_a_second_and_never_scroll() -> None:
    with terminal(100, 24) as term:
        clock = FakeClock()
        metrics = Metrics()
        view = LiveView(metrics, stdout=-1, stderr=term.slave, clock=clock)
        for report in reports(FakeJob.drawn(3, 60, step_s=0.01)):
            clock.now += report.elapsed_s
            metrics.observe(report)
            view.iteration(report)
        seconds = clock.now - 100
        term.close()
        redraws = term.written.count(b"\x1b[?7l")
        assert 4 * seconds < redraws <= 8 * seconds + 1
        assert not term.screen.history.top, "nothing scrolled off the screen"


@pytest.mark.parametrize(("columns", "rows"), [(100, 3), (100, 1), (20, 24), (8, 5), (1, 1), (200, 60)])
def test_a_table_bigger_than_the_screen_is_cropped(columns: int, rows: int) -> None:
    with terminal(columns, rows) as term:
        metrics = Metrics(total_requests=30)
        clock = FakeClock()
        view = LiveView(metrics, stdout=-1, stderr=term.slave, clock=clock)
        for report in reports(FakeJob.drawn(4, 30)):
            clock.now += 1
            metrics.observe(report)
            metrics.rows = RowCounts(metrics.num_finished, 0, 30)
            view.iteration(report)
        view.close()
        term.close()
        assert not term.screen.history.top
        assert "".join(term.lines()).strip() == ""


def test_a_resize_in_mid_run_is_followed() -> None:
    with terminal(100, 24) as term:
        play(term, FakeJob.drawn(5, 40), on_step=lambda step: term.resize(100 if step % 20 < 10 else 60, 24))
        term.close()
        widest = max(
            len(line) for line in re.findall(rb"[^\r\n]*prefill runs", re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", term.written))
        )
        assert widest <= 100


def test_names_appear_as_they_are_and_control_characters_as_escapes() -> None:
    names: dict[int, str | int] = {0: "[bold red]x[/]", 1: "🎉漢字", 2: "c\x1b[31m\nd", 3: 42, 4: ":smile:"}
    job = FakeJob([9] * 5, [3] * 5, seats=5, token_budget=100)
    with terminal(160, 24) as term:
        seen: list[str] = []
        clock = FakeClock()
        metrics = Metrics()
        view = LiveView(metrics, names.get, -1, term.slave, clock)
        for report in reports(job):
            clock.now += 1
            metrics.observe(report)
            view.iteration(report)
        term.close()
        seen = term.lines()
    text = "\n".join(seen)
    for name in ("[bold red]x[/]:9", "c\\x1b[31m\\nd:9", "42:9", ":smile::9"):
        assert name in text
    assert "🎉" in text and "漢" in text


def piped(run: Callable[[int], None]) -> bytes:
    reading, writing = os.pipe()
    try:
        run(writing)
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return file.read()


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    clock = FakeClock()

    def run(fd: int) -> None:
        metrics = Metrics(total_requests=60)
        view = PlainView(metrics, -1, fd, clock)
        view.start(RunHeader(("header",), 60))
        for report in reports(FakeJob.drawn(6, 60, step_s=0.2)):
            clock.now += report.elapsed_s
            metrics.observe(report)
            metrics.rows = RowCounts(metrics.num_finished, 0, 60)
            view.iteration(report)
        view.finish(RunSummary(metrics.snapshot(), 60, 0))

    written = piped(run).decode()
    assert "\x1b" not in written and "\r" not in written
    progress = [line for line in written.splitlines() if "tokens/s" in line and "running" in line]
    assert len(progress) in range(int((clock.now - 100) / 10) - 2, int((clock.now - 100) / 10) + 2)
    assert progress[-1].startswith("60/60 done")


def test_what_goes_on_before_the_first_iteration_stands_alone_and_goes() -> None:
    """Faults met on the way are records above it; the header takes its place, and later calls show nothing."""
    with terminal(60, 10) as term:
        clock = FakeClock()
        metrics = Metrics()
        view = LiveView(metrics, stdout=term.slave, stderr=term.slave, clock=clock)
        for _ in told(view, "reading rows", range(2 * COUNTED_BY)):
            pass
        wait_for(lambda: term.lines()[0] == f"reading rows: {COUNTED_BY}")
        view.record(b'{"index":0}\n')
        clock.now += 1
        view.stage("reading rows", "700 of " + 10 * "a long name ")
        wait_for(lambda: term.lines()[1].startswith("reading rows: 700 of a long"))
        assert term.lines()[0] == '{"index":0}' and not any(term.lines()[2:])
        view.stage("loading the model")
        wait_for(lambda: term.lines()[1] == "loading the model ...")
        view.start(RunHeader(("a header line",)))
        view.record(b'{"index":1}\n')
        for report in reports(FakeJob.drawn(3, 4)):
            metrics.observe(report)
            clock.now += 1
            view.iteration(report)
            view.stage("reading rows", "800")
        view.close()
        term.close()
        assert [line for line in term.lines() if line] == ['{"index":0}', "a header line", '{"index":1}']
        assert b"800" not in term.written


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_log_tells_of_a_long_wait_for_the_first_iteration() -> None:
    clock = FakeClock()

    def run(fd: int) -> None:
        view = PlainView(Metrics(), -1, fd, clock)
        for second in range(25):
            clock.now += 1
            view.stage("reading rows", f"{second * 100:,}")

    assert piped(run) == b"reading rows: 900\nreading rows: 1,900\n"


def test_quiet_shows_records_only() -> None:
    def run(fd: int) -> None:
        metrics = Metrics()
        view = make_view(metrics, quiet=True, fds=(fd, fd))
        view.stage("loading the model")
        view.start(RunHeader(("header",), 3))
        for report in reports(FakeJob.drawn(7, 3)):
            metrics.observe(report)
            view.iteration(report)
        view.message("a warning")
        view.record(b"{}\n")
        view.finish(RunSummary(metrics.snapshot(), 3, 0))

    assert piped(run) == b"{}\n"


def test_the_view_follows_the_kind_of_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    reading, writing = os.pipe()
    with terminal() as term:
        fds = (writing, term.slave)
        assert isinstance(make_view(Metrics(), fds=fds), LiveView)
        assert isinstance(make_view(Metrics(), live=False, fds=fds), PlainView)
        assert isinstance(make_view(Metrics(), live=True, fds=(writing, writing)), PlainView)
        assert isinstance(make_view(Metrics(), quiet=True, fds=fds), QuietView)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_view(Metrics(), fds=fds), PlainView)
    os.close(reading)
    os.close(writing)


def test_the_summary_tells_all_that_was_lost_or_saved() -> None:
    metrics = Metrics()
    for report in reports(FakeJob.drawn(8, 30, preempt_every=4, error_every=7)):
        metrics.observe(report)
    summary = RunSummary(replace(metrics.snapshot(), duplicates=7), 26, 4, 1, 5, 2, "out.jsonl", ("a note",))
    text = "\n".join(f"{label} {value}" for label, value in summary_lines(summary))
    for part in (
        "26 good",
        "4 bad",
        "1 cancelled",
        "5 kept",
        "7 duplicates",
        "2 rows ran",
        "a note",
        "out.jsonl",
        "TTFT",
        "p99",
    ):
        assert part in text
    for part in ("preemptions", "computed again", "iterations", "peak", "tokens/s"):
        assert part in text
