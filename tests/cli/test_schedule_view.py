from __future__ import annotations

import io
import re

import pytest
import yaml

from contbatch_cli.cli.schedule_view import (
    IterationTable,
    Result,
    Schedule,
    choose,
    comparison_table,
    config_lines,
    open_console,
    print_comparison,
    print_summary,
    walk,
)
from contbatch_cli.trace import iteration_of
from tests.fake_runs import FakeJob, reports


def schedule(title: str = "stall_free", names: dict[int, str] | None = None, **job: int | float) -> Schedule:
    iterations = [iteration_of(report, (names or {}).get) for report in reports(FakeJob.drawn(1, 30, **job))]
    return Schedule(title, {}, iterations, "estimated", lambda: ("a note",), (("scheduler.token_budget", title),))


def table_lines(limit: int | None, **job: int | float) -> list[str]:
    out = io.StringIO()
    table = IterationTable(open_console(out), limit)
    walk(schedule(names={0: "[red]x", 1: "y\x1b["}, **job), [table.add])
    table.finish()
    return out.getvalue().splitlines()


def test_piped_tables_are_plain_and_have_one_line_an_iteration() -> None:
    lines = table_lines(None, preempt_every=5)
    num_iterations = len(list(reports(FakeJob.drawn(1, 30, preempt_every=5))))
    assert len(lines) == num_iterations + 1
    assert not any("\x1b" in line for line in lines)
    assert "[red]x:" in lines[1]
    assert any("y\\x1b[:" in line for line in lines)
    assert sum("1 preempted" in line for line in lines) > 3
    assert all(len(line) <= 140 for line in lines)


@pytest.mark.parametrize("limit", [0, 1, 4, 10, 10_000])
def test_a_limit_shows_the_first_and_the_last_iterations(limit: int) -> None:
    everything, lines = table_lines(None), table_lines(limit)
    shown = [line for line in lines[1:] if "more (--iterations" not in line]
    assert len(shown) == min(limit, len(everything) - 1)
    assert set(shown) <= set(everything)
    if limit in (4, 10):
        assert shown[0] == everything[1] and shown[-1] == everything[-1]


def test_the_summary_has_every_figure() -> None:
    out = io.StringIO()
    print_summary(open_console(out), walk(schedule(preempt_every=5)))
    text = out.getvalue()
    for part in (
        "makespan",
        "(estimated)",
        "30 done",
        "TTFT",
        "ITL",
        "budget",
        "peak",
        "preemptions",
        "computed again",
        "a note",
    ):
        assert part in text


def results() -> list[Result]:
    return [walk(schedule("slow", step_s=0.05)), walk(schedule("fast", step_s=0.01)), walk(schedule("fast2", step_s=0.01004))]


def test_the_best_value_of_each_measure_is_marked() -> None:
    out = io.StringIO()
    open_console(out).print(comparison_table(results()))
    makespan = next(line for line in out.getvalue().splitlines() if line.startswith("makespan"))
    assert re.findall(r"[\d.:]+ m?s(\*?)", makespan) == ["", "*", ""]
    iterations = next(line for line in out.getvalue().splitlines() if line.startswith("iterations"))
    assert "*" not in iterations, "equal values have no best"


def test_the_choice_is_the_shortest_then_the_steadiest() -> None:
    slow, fast, fast2 = results()
    best, reason = choose([slow, fast2, fast])
    assert best is fast
    assert "less than slow" in reason and "within 1%" in reason
    assert choose([slow])[0] is slow


def test_the_lines_to_paste_are_yaml() -> None:
    lines = config_lines([("scheduler.token_budget", "128"), ("cache.block_size", "32"), ("scheduler.policy", "static")])
    assert yaml.safe_load("\n".join(lines)) == {
        "scheduler": {"token_budget": 128, "policy": "static"},
        "cache": {"block_size": 32},
    }


def test_many_schedules_stand_below_one_another() -> None:
    out = io.StringIO()
    many = [walk(schedule(f"budget={n}", token_budget=n)) for n in (4, 8, 16, 32, 64, 128)]
    print_comparison(open_console(out), many)
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("budget=") for line in lines) == 6
    assert "scheduler:" in lines
