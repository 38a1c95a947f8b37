"""`contbatch generate`: rows in, one record out for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from contbatch_cli.cli.file_roles import at_file, input_files, named_files, output_files, refuse_shared
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
from contbatch_cli.errors import UsageError
from contbatch_cli.units import parse_duration

OnError = Literal["record", "fail"]


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Files of prompts, or - for standard input.")] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="Where records go; - is standard output.")
    ] = "-",
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an output: run the rows without a good record.")] = False,
    rerun_changed: Annotated[bool, typer.Option("--rerun-changed", help="With --resume, rows that changed run again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew where the output exists.")] = False,
    format: InputFormat = "auto",
    template: Template = None,
    raw: Raw = False,
    system: System = None,
    chat_template: ChatTemplateFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows.")] = None,
    on_error: Annotated[OnError, typer.Option("--on-error", help="Record a bad row, or fail at the first one.")] = "record",
    order: Order = None,
    replicas: Replicas = None,
    max_time: Annotated[
        str | None, typer.Option("--max-time", metavar="DURATION", help="Stop after this time (90s, 10m, 2h).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and tokenize all rows, report, run nothing.")] = False,
    verify: Annotated[
        int, typer.Option("--verify", metavar="N", min=0, help="Afterwards, run N finished rows again alone and compare.")
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the schedule, one line an iteration.")
    ] = None,
    live: Annotated[bool | None, typer.Option("--live/--no-live", help="The live table; default on a terminal.")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Nothing but errors on standard error.")] = False,
) -> None:
    """Run a batch job: rows in, one record out for each."""
    from contbatch_cli.build import Inputs
    from contbatch_cli.cli.batch_run import RunOptions, RunRequest, run
    from contbatch_cli.cli.output import OutputOptions
    from contbatch_cli.data.readers import InputOptions

    effective = effective_config(
        config,
        assignments,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        order=order,
        replicas=replicas,
    )
    inputs = Inputs(_sources(prompts), InputOptions(format, template, raw, system, limit), chat_template)
    read = (*named_files(config=config, chat_template=chat_template), *at_file("--template", template))
    refuse_shared((*input_files(inputs.sources), *read), (*output_files(output), *named_files(trace=trace)))
    if dry_run:
        from contbatch_cli.cli.dry_run import print_dry_run
        from contbatch_cli.cli.live import make_view
        from contbatch_cli.metrics import Metrics

        raise typer.Exit(int(print_dry_run(effective, inputs, make_view(Metrics(), quiet=quiet, live=live))))
    options = RunOptions(on_error, _duration(max_time), verify, trace, live, quiet)
    target = OutputOptions(output, effective.config.output.order, resume, overwrite, rerun_changed)
    raise typer.Exit(int(run(RunRequest(effective, inputs, target, options))))


def _sources(prompts: Sequence[str] | None) -> tuple[str, ...]:
    if prompts:
        return tuple(prompts)
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("PROMPTS: no input; give a file of prompts, or - and rows on standard input")
    return ("-",)


def _duration(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--max-time {text}: {error}") from None
