from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from contbatch_cli.cli.schedule_lanes import ScheduleChart, State
from contbatch_cli.cli.schedule_plot import perfetto_writer, plot_writer
from contbatch_cli.cli.schedule_svg import draw_svg, merge_steps, raster_line, time_ticks
from contbatch_cli.core.request import RequestId
from contbatch_cli.errors import UsageError
from contbatch_cli.trace import TraceIteration, iteration_of
from tests.fake_runs import FakeJob, reports

EVIL = "</script><script>alert(1)</script>&<b>\u2028"


def iterations(rows: int = 30, **settings: float) -> list[TraceIteration]:
    return [iteration_of(report, {0: EVIL}.get) for report in reports(FakeJob.drawn(1, rows, **settings))]


def chart(rows: int = 30, title: str = "a < b", **settings: float) -> ScheduleChart:
    made = ScheduleChart(title)
    for iteration in iterations(rows, **settings):
        made.add(iteration)
    return made


@pytest.mark.parametrize("settings", [{}, {"preempt_every": 4}, {"token_budget": 5, "preempt_every": 7}])
def test_lanes_tell_what_the_iterations_told(settings: dict[str, float]) -> None:
    made = chart(**settings)
    computed: dict[RequestId, int] = {}
    preemptions = 0
    for iteration in iterations(**settings):
        preemptions += len(iteration.preempted)
        for run in iteration.scheduled:
            computed[run.request_id] = computed.get(run.request_id, 0) + run.num_tokens
    assert {request_id: sum(s.num_tokens for s in lane.segments) for request_id, lane in made.lanes.items()} == computed
    assert sum(s.state is State.PREEMPTED for lane in made.lanes.values() for s in lane.segments) == preemptions
    for lane in made.lanes.values():
        assert lane.segments[0].start_s == 0.0
        for before, after in zip(lane.segments, lane.segments[1:], strict=False):
            assert after.start_s == pytest.approx(before.end_s, abs=3e-6)


def test_a_decode_that_gets_no_token_is_stalled() -> None:
    made = ScheduleChart("t")
    steps = iterations(3, seats=3)
    first = next(step.scheduled[0].request_id for step in steps if step.scheduled[0].is_decode)
    for number, step in enumerate(steps):
        if 6 <= number < 9:
            step = step._replace(scheduled=tuple(run for run in step.scheduled if run.request_id != first))
        made.add(step)
    assert State.STALLED in {segment.state for segment in made.lanes[first].segments}


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
@pytest.mark.parametrize("rows", [1, 10, 700])
def test_the_svg_is_well_formed_and_bounded(theme: str, rows: int) -> None:
    text = draw_svg([chart(rows, preempt_every=9), chart(3)], theme)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert len(text) < 400_000
    assert ("prefers-color-scheme" in text) == (theme == "auto")
    assert "a < b" in [node.text for node in root.iter() if node.tag.endswith("text")]
    assert EVIL not in text


def test_an_empty_schedule_is_drawn_too() -> None:
    ElementTree.fromstring(draw_svg([ScheduleChart("none")]))


def test_a_raster_shows_each_state_where_it_is() -> None:
    made = chart(40, preempt_every=5)
    lanes, columns = list(made.lanes.values()), 500
    for lane in lanes:
        cells = raster_line([lane], made.end_s, columns)
        for segment in lane.segments:
            first, last = segment.start_s / made.end_s * columns, segment.end_s / made.end_s * columns
            for column in range(int(first) + 1, int(last)):
                cell = cells[column]
                assert cell is not None and cell[0] is segment.state
        assert all(cell is None for cell in cells[int(lane.end_s / made.end_s * columns) + 1 :])


def test_merged_columns_keep_the_tokens() -> None:
    made = chart(200)
    merged = merge_steps(made.steps, made.end_s, 50)
    assert len(merged) <= 50 < len(made.steps)
    seconds = sum((s.end_s - s.start_s) * s.decode_tokens for s in made.steps)
    assert sum((c.end_s - c.start_s) * c.decode_tokens for c in merged) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("end_s", [1e-4, 0.01, 0.9, 1, 7.3, 60, 3600, 1e6])
def test_ticks_are_few_and_round(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 3 <= len(ticks) <= 11
    assert ticks[0][0] == 0 and ticks[-1][0] <= end_s * 1.000001
    assert len({words for _, words in ticks}) == len(ticks)


def test_the_page_is_self_contained_and_its_data_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    plot_writer(path)([chart(), chart(5)])
    text = path.read_text("utf-8")
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", text)
    assert "<script>alert" not in text
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [len(one["lanes"]) for one in data] == [30, 5]
    assert data[0]["names"][0].startswith("</script>")


def test_perfetto_events(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made = chart(preempt_every=5)
    perfetto_writer(path)([made])
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(lane.segments) for lane in made.lanes.values())
    assert {event["name"] for event in spans} >= {"waiting", "prefill", "decode", "preempted"}
    assert all(event["dur"] >= 0 and event["pid"] == 1 for event in spans)
    assert sum(event["ph"] == "C" for event in events) == 3 * len(made.steps)


def test_a_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    path = tmp_path / "x.png"
    plot_writer(path)([chart()])
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\.svg, \.png or \.html"):
        plot_writer(tmp_path / "x.pdf")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UsageError, match=r"contbatch\[png\]"):
        plot_writer(tmp_path / "x.png")
    with pytest.raises(UsageError, match="there is no directory"):
        plot_writer(tmp_path / "none" / "x.svg")([chart()])


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no headless browser here")
    return found


def screenshot(page: Path, *flags: str) -> str:
    """Runs the page in a headless browser; its DOM after the scripts."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", *flags, "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout


@pytest.mark.slow
def test_a_browser_draws_zooms_and_hovers(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    plot_writer(path)([chart(40, preempt_every=5)])
    probe = """
    const canvas = views[0].canvas, at = canvas.getBoundingClientRect();
    const colors = () => { const d = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
      for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size; };
    const before = views[0].shown.length, drawn = colors();
    setView(0, END / 8); drawAll();
    canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: at.left + 140, clientY: at.top + 5, bubbles: true}));
    document.title = JSON.stringify([drawn, before, views[0].shown.length, tip.textContent]);
    """
    path.write_text(path.read_text("utf-8").replace("</body>", f"<script>{probe}</script></body>"), "utf-8")
    title = re.search(r"<title>(.*?)</title>", screenshot(path), re.DOTALL)
    assert title is not None
    drawn, before, after, hover = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert drawn > 5, "several colours on the canvas"
    assert before == 40 and 0 < after < 40
    assert "prefill" in hover or "decode" in hover
