"""`contbatch models`: the built-in model names and what the cache holds; `contbatch models pull NAME` fetches one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contbatch_cli.data.model_store import BUILTIN, CachedModel, cached_builtin, cached_models, models_dir, resolve

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """The built-in model names, and what is cached."""
    if context.invoked_subcommand is None:
        typer.echo("\n".join([*builtin_lines(), "", *cache_lines(cached_models(), models_dir())]))


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A built-in name, a .gguf file, a directory or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="The branch, tag or commit of a hub id.")] = None,
) -> None:
    """Fetch a model now and print where it lies, so that later runs need no network."""
    typer.echo(resolve(name, revision))


def builtin_lines() -> list[str]:
    """One line a built-in model: its name, whether it is cached, what it is."""
    width = max(map(len, BUILTIN))
    return ["Built in:", *(f"  {name:<{width}}  {_state(name)}  {BUILTIN[name].description}" for name in BUILTIN)]


def _state(name: str) -> str:
    model = BUILTIN[name]
    if cached_builtin(name) is not None:
        return "cached    "
    return f"not cached ({megabytes(model.download_bytes)} to fetch, {megabytes(model.disk_bytes)} on disk)"


def cache_lines(cached: list[CachedModel], root: Path) -> list[str]:
    """One line a cache entry: its size, its name and what it was made from."""
    if not cached:
        return [f"Nothing is cached in {root}."]
    total = sum(model.size_bytes for model in cached)
    lines = [f"Cached in {root} ({megabytes(total)}):"]
    return [*lines, *(f"  {megabytes(model.size_bytes):>9}  {model.name}  {_origin(model)}" for model in cached)]


def _origin(model: CachedModel) -> str:
    return f"from {model.source}" if model.is_whole else "damaged: it is made again when it is next used"


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
