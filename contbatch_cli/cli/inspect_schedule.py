"""`contbatch inspect-schedule`: rehearse the schedule of a job, or replay a trace, without weights and without torch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from contbatch_cli.build import Inputs
from contbatch_cli.cli.file_roles import at_file, input_files, named_files, refuse_shared
from contbatch_cli.cli.live import View, make_view, told
from contbatch_cli.cli.options import (
    Assignments,
    ChatTemplateFile,
    ConfigFile,
    InputFormat,
    MaxTokens,
    ModelName,
    Order,
    Raw,
    Replicas,
    Seed,
    Stop,
    System,
    Temperature,
    Template,
    TopP,
    effective_config,
)
from contbatch_cli.cli.rehearsal import Overrides, Rehearsals, assigned
from contbatch_cli.cli.schedule_lanes import ScheduleChart
from contbatch_cli.cli.schedule_plot import perfetto_writer, plot_writer
from contbatch_cli.cli.schedule_view import (
    DEFAULT_ITERATIONS,
    IterationTable,
    Result,
    Schedule,
    open_console,
    print_comparison,
    print_summary,
    walk,
)
from contbatch_cli.config_files import Assignment, Effective
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.data.sources import STANDARD_INPUT, can_be_read_twice, check_sources
from contbatch_cli.errors import UsageError
from contbatch_cli.metrics import Metrics
from contbatch_cli.simulate import OutputScript
from contbatch_cli.trace import TraceIteration, format_header, format_iteration, read_trace

LIVE_NOTE = "the rows came through a pipe, whose timing shaped this schedule: no rehearsal can tell it beforehand"
Draw = Callable[[Sequence[ScheduleChart]], None]


def inspect_schedule(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPTS]...", help="Files of rows, or - .")] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Replay this trace of a real run.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", metavar="NAME", help="The policy to rehearse.")] = None,
    compare: Annotated[str | None, typer.Option("--compare", metavar="NAME,...", help="Policies side by side.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="KEY=V1,V2,...", help="One schedule for each value. Repeatable.")
    ] = None,
    output_lengths: Annotated[
        str,
        typer.Option(
            "--output-lengths", metavar="max|MEAN|@FILE", help="How long outputs are; MEAN: drawn; @FILE: an earlier output."
        ),
    ] = "max",
    json_lines: Annotated[bool, typer.Option("--json", help="The trace format on standard output, nothing else.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="A picture: .svg, .png, or an interactive .html.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="A trace for ui.perfetto.dev and chrome://tracing.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", metavar="N", min=0, help=f"Iterations in the table ({DEFAULT_ITERATIONS}).")
    ] = None,
    format: InputFormat = "auto",
    template: Template = None,
    raw: Raw = False,
    system: System = None,
    chat_template: ChatTemplateFile = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=0, help="Only the first N rows.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    order: Order = None,
    replicas: Replicas = None,
) -> None:
    """Rehearse the schedule of a job, or replay a trace: no weights."""
    read = (*named_files(config=config, trace=trace, chat_template=chat_template), *at_file("--template", template))
    read = (*input_files(prompts or ()), *read, *at_file("--output-lengths", output_lengths))
    refuse_shared(read, named_files(plot=plot, perfetto=perfetto))
    draws = [plot_writer(plot)] if plot else []
    draws += [perfetto_writer(perfetto)] if perfetto else []
    with ExitStack() as stack:
        if trace is not None:
            _refuse_with_trace(
                {"PROMPTS": prompts, "-c": config, "--set": assignments, "-m": model, "--policy": policy, "--compare": compare}
                | {"--sweep": sweep, "--output-lengths": None if output_lengths == "max" else output_lengths}
                | {"--template": template, "--raw": raw or None, "--system": system, "--chat-template": chat_template}
                | {"--limit": limit, "--max-tokens": max_tokens, "--temperature": temperature, "--top-p": top_p}
                | {"--seed": seed, "--stop": stop, "--order": order, "--replicas": replicas}
            )
            schedules: Iterable[Schedule] = [replay(trace)]
            is_comparison = False
        else:
            variants, is_comparison = _variants(policy, compare, sweep), bool(compare or sweep)
            options = InputOptions(format, template, raw, system, limit)
            sources = stack.enter_context(rereadable(_sources(prompts)))

            def configure(more: Sequence[str]) -> Effective:
                return effective_config(
                    config,
                    [*(assignments or ()), *(Assignment("--sweep", one) for one in more)],
                    model=model,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                    stop=stop,
                    order=order,
                    replicas=replicas,
                )

            script = OutputScript.parse(output_lengths)
            for _, overrides in variants:
                configure(assigned(overrides))  # all are right before the first is rehearsed
            rehearsals = Rehearsals(configure, Inputs(sources, options, chat_template), script.again)
            schedules = (rehearsals.schedule(title, overrides) for title, overrides in variants)
        if json_lines:
            _print_json(schedules, is_comparison, draws)
        elif is_comparison:
            _compare(schedules, draws)
        else:
            _show(next(iter(schedules)), DEFAULT_ITERATIONS if iterations is None else iterations, draws)


def replay(path: Path) -> Schedule:
    """The schedule of a real run, from its trace."""
    header, iterations = read_trace(path)
    policy = header.get("config", {}).get("scheduler", {}).get("policy", "")
    notes = (LIVE_NOTE,) if header.get("rehearsable") is False else ()
    return Schedule(f"{path.name} {policy}".strip(), header, iterations, "as measured", lambda: notes)


def _show(schedule: Schedule, limit: int, draws: Sequence[Draw]) -> None:
    console = open_console()
    table = IterationTable(console, limit)
    result, chart = _walk(schedule, draws, [table.add])
    table.finish()
    print_summary(console, result)
    _draw(draws, [chart])


def _compare(schedules: Iterable[Schedule], draws: Sequence[Draw]) -> None:
    with closing(make_view(Metrics())) as view:
        walked = [_walk(_told(view, schedule), draws) for schedule in schedules]
    print_comparison(open_console(), [result for result, _ in walked])
    _draw(draws, [chart for _, chart in walked])


def _told(view: View, schedule: Schedule) -> Schedule:
    """The same; while it is walked the view tells how far it is."""
    return replace(schedule, iterations=told(view, f"rehearsing {schedule.title}, iterations", schedule.iterations))


def _print_json(schedules: Iterable[Schedule], is_comparison: bool, draws: Sequence[Draw]) -> None:
    if is_comparison:
        raise UsageError("--json writes one schedule: leave --compare and --sweep out")
    schedule = next(iter(schedules))

    def write(iteration: TraceIteration) -> None:
        sys.stdout.write(format_iteration(iteration))

    sys.stdout.write(format_header(schedule.header))
    _, chart = _walk(schedule, draws, [write])
    sys.stdout.flush()
    _draw(draws, [chart])


def _walk(
    schedule: Schedule, draws: Sequence[Draw], consumers: Sequence[Callable[[TraceIteration], None]] = ()
) -> tuple[Result, ScheduleChart]:
    chart = ScheduleChart(schedule.title)
    result = walk(schedule, [*consumers, *([chart.add] if draws else [])])
    return result, chart


def _draw(draws: Sequence[Draw], charts: Sequence[ScheduleChart]) -> None:
    for draw in draws:
        draw(charts)


def _refuse_with_trace(options: Mapping[str, object]) -> None:
    """A trace is what it is: an option that would change the schedule is refused, not ignored."""
    for name, value in options.items():
        if value is not None and value != []:
            raise UsageError(f"--trace replays a run as it was: leave {name} out")


def _variants(policy: str | None, compare: str | None, sweep: Sequence[str] | None) -> list[tuple[str, Overrides]]:
    """Titles and config keys of the schedules to make: every policy with every combination of swept values."""
    if policy and compare:
        raise UsageError("--policy and --compare exclude each other: --compare names all policies that are rehearsed")
    policies = _names("--compare", compare) if compare else [policy] if policy else []
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"{'--compare' if compare else '--policy'} {name}: should be one of {', '.join(POLICIES)}")
    axes = [[("scheduler.policy", name) for name in policies]] if policies else []
    axes += [_axis(text) for text in sweep or ()]
    return [(_title(overrides), overrides) for overrides in product(*axes)]


def _title(overrides: Overrides) -> str:
    """The values that make a schedule different; empty when none do."""
    return " ".join(value if key == "scheduler.policy" else f"{key.partition('.')[2]}={value}" for key, value in overrides)


def _axis(text: str) -> list[tuple[str, str]]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--sweep {text}: should be key.path=v1,v2,..., such as scheduler.token_budget=64,128,256")
    return [(key.strip(), value) for value in _names(f"--sweep {key}", values)]


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"{option} {text}: an empty value between commas")
    return list(dict.fromkeys(names))


def _sources(prompts: Sequence[str] | None) -> tuple[str, ...]:
    if prompts:
        return tuple(prompts)
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no PROMPTS: give a file of rows, - for standard input, or --trace FILE")
    return (STANDARD_INPUT,)


@contextmanager
def rereadable(sources: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The sources as files that can be read for every schedule: pipes are copied to temporary files first."""
    check_sources(sources)
    with tempfile.TemporaryDirectory(prefix="contbatch-") as directory:
        yield tuple(
            _copied(source, Path(directory) / f"{position}-{os.path.basename(source)}")
            for position, source in enumerate(sources)
        )


def _copied(source: str, copy: Path) -> str:
    if can_be_read_twice(source):
        return source
    with ExitStack() as stack:
        stream = sys.stdin.buffer if source == STANDARD_INPUT else stack.enter_context(open(source, "rb"))
        shutil.copyfileobj(stream, stack.enter_context(copy.open("wb")))
    return str(copy)
