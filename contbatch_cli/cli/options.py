"""Options that several commands have: those that set config keys, and those that say how rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from contbatch_cli.config_files import Assignment, Effective, Option, load_config

ConfigFile = Annotated[Path | None, typer.Option("-c", "--config", metavar="FILE", help="YAML config file.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one config key, such as sampling.top_k=40. Repeatable."),
]
ModelName = Annotated[
    str | None,
    typer.Option("-m", "--model", metavar="NAME|DIR", help="A built-in name, a directory, a .gguf file, or a hub id."),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="The most tokens generated for a row.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="X", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="X", help="Keep the likeliest tokens up to this probability.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The run seed.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End a row where this text appears. Repeatable.")
]
Format = Literal["auto", "jsonl", "text", "csv", "parquet"]
InputFormat = Annotated[Format, typer.Option("--format", help="Format of the inputs; auto goes by the file's ending.")]
Template = Annotated[
    str | None, typer.Option("--template", metavar="TEXT|@FILE", help="Jinja2 over a row's columns, as a user message.")
]
Raw = Annotated[bool, typer.Option("--raw", help="The template's text is a raw prompt.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message for rows without one.")]
ChatTemplateFile = Annotated[
    Path | None, typer.Option("--chat-template", metavar="FILE", help="Jinja2 file instead of the model's chat template.")
]
Order = Annotated[str | None, typer.Option("--order", metavar="completion|input", help="Order of the records.")]
Replicas = Annotated[
    str | None, typer.Option("--replicas", metavar="N|auto", help="Engines that share the job, through Ray; auto: all GPUs.")
]


def effective_config(
    config: Path | None,
    assignments: Sequence[str | Assignment] | None,
    *,
    model: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
    order: str | None = None,
    replicas: str | None = None,
) -> Effective:
    """The effective config of a command line; None stands for an option that was not given. Raises UsageError."""
    options = (
        Option("model.name", "--model", model),
        Option("sampling.max_tokens", "--max-tokens", max_tokens),
        Option("sampling.temperature", "--temperature", temperature),
        Option("sampling.top_p", "--top-p", top_p),
        Option("sampling.seed", "--seed", seed),
        Option("sampling.stop", "--stop", list(stop) if stop else None),
        Option("output.order", "--order", order),
        Option("cluster.replicas", "--replicas", int(replicas) if replicas and replicas.isdecimal() else replicas),
    )
    return load_config(config, assignments or (), options)
