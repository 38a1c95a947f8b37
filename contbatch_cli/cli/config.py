"""`contbatch config`: the effective config and where each value came from; its JSON Schema."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from contbatch_cli.cli.options import (
    Assignments,
    ConfigFile,
    MaxTokens,
    ModelName,
    Order,
    Replicas,
    Seed,
    Stop,
    Temperature,
    TopP,
    effective_config,
)
from contbatch_cli.config_files import to_yaml
from contbatch_cli.config_schema import json_schema


def config(
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    order: Order = None,
    replicas: Replicas = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a config file instead.")] = False,
) -> None:
    """Print the config that a job with these options would run with, as a config file with the origin of each value."""
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
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
    typer.echo(to_yaml(effective), nl=False)
