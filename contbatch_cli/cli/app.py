"""The command `contbatch`: its commands by name, imported when called, and the way from errors to exit statuses."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from contbatch_cli import __version__
from contbatch_cli.errors import ContbatchError, EngineError, ExitStatus

OUTPUT_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
"""What a write may fail with that has nothing to do with the program; every file but standard output has its own message."""


class CommandEntry(NamedTuple):
    """A command that is imported when it is called.

    Its module holds either `app`, a Typer, or a function with the command's name, underscores for hyphens.
    """

    module: str
    summary: str


COMMANDS = {
    "generate": CommandEntry("contbatch_cli.cli.generate", "Run a batch job: rows in, one record out for each."),
    "inspect-schedule": CommandEntry(
        "contbatch_cli.cli.inspect_schedule", "Rehearse the schedule of a job, or replay a trace: no weights."
    ),
    "calibrate": CommandEntry("contbatch_cli.cli.calibrate", "Measure this machine and model for the rehearsal's clock."),
    "models": CommandEntry("contbatch_cli.cli.models", "The built-in models and what is cached; fetch one."),
    "config": CommandEntry("contbatch_cli.cli.config", "The effective config and where each value came from; its JSON Schema."),
}


class LazyCommands(TyperGroup):
    """Lists the commands without importing them, imports the one that is called, and turns its errors into exit statuses."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, entry in COMMANDS.items() if find_spec(entry.module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load_command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with exit_statuses():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with exit_statuses():
            return super().invoke(ctx)


def _load_command(name: str) -> Any:
    module = import_module(COMMANDS[name].module)
    commands: typer.Typer | None = getattr(module, "app", None)
    if commands is None:
        commands = new_typer()
        commands.command(name, help=COMMANDS[name].summary)(getattr(module, name.replace("-", "_")))
    command = get_command(commands)
    command.name = name
    return command


def new_typer(**settings: Any) -> typer.Typer:
    """A Typer with this program's ways: plain help, plain tracebacks, `-h` as well as `--help`."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Ends the program with the contract's status: one line for an error of ours, silence for a reader that went away."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # here, while its failure still has a message and a status
    except ContbatchError as error:
        print_error(str(error))
        raise typer.Exit(int(error.exit_status)) from None
    except BrokenPipeError:
        discard_standard_output()
        raise typer.Exit(int(ExitStatus.SIGPIPE)) from None
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        discard_standard_output()
        print_error(f"standard output: {error.strerror}")
        raise typer.Exit(int(ExitStatus.FAILED)) from None
    except KeyboardInterrupt:
        print_error("interrupted")
        raise typer.Exit(int(ExitStatus.INTERRUPTED)) from None


def print_error(message: str) -> None:
    """One line on standard error, control characters of foreign text escaped; nothing when standard error is closed."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in " ".join(message.split("\n"))
    )
    print_plain(f"contbatch: {line}")


def print_plain(text: str) -> None:
    """The text on standard error; nothing when that is closed or its reader went away."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def discard_standard_output() -> None:
    """Sends what is still buffered for standard output nowhere, so that the exit does not stumble over it."""
    if sys.stdout is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"contbatch {__version__}")
        raise typer.Exit


class ClosedOutput(io.TextIOBase):
    """Stands in for a standard output that was closed before the program began: Python would lose what is printed to it."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise EngineError("standard output is closed")


app = new_typer(cls=LazyCommands, no_args_is_help=True)


@app.callback()
def contbatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline batch generation with continuous batching."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the program with `arguments` (default: the process's own) and exits."""
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    get_command(app).main(args=arguments, prog_name="contbatch")
    raise SystemExit(0)
