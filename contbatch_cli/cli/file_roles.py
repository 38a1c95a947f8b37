"""Which of a command's files are read and which are written: none may be both, and none be written twice."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from contbatch_cli.data.output_file import meta_path, pending_path
from contbatch_cli.errors import UsageError

STANDARD_STREAM = "-"


class NamedFile(NamedTuple):
    """A file of a command line: the option that names it, and its path."""

    option: str
    path: str

    def __str__(self) -> str:
        return f"{self.option} {self.path}".lstrip()


def named_files(**paths: str | Path | None) -> Iterator[NamedFile]:
    """The files of options, by the options' names with underscores for hyphens; None for one that was not given."""
    for name, path in paths.items():
        if path is not None:
            yield NamedFile(f"--{name.replace('_', '-')}", str(path))


def at_file(option: str, text: str | None) -> Iterator[NamedFile]:
    """The file of an option that takes a text or `@FILE`."""
    if text is not None and text.startswith("@"):
        yield NamedFile(option, text[1:])


def input_files(sources: Iterable[str]) -> Iterator[NamedFile]:
    return (NamedFile("the input", source) for source in sources if source != STANDARD_STREAM)


def output_files(name: str) -> Iterator[NamedFile]:
    """The output and what is kept beside it."""
    path = Path(name)
    if name != STANDARD_STREAM and path.name:
        yield NamedFile("--output", name)
        yield from (NamedFile("--output", str(beside(path))) for beside in (meta_path, pending_path))


def refuse_shared(read: Iterable[NamedFile], written: Iterable[NamedFile]) -> None:
    """Raises UsageError, before anything is opened, for a file that would be written over although it is in use."""
    taken = [(file, "is read") for file in read]
    for file in written:
        for other, use in taken:
            if _is_same(file.path, other.path):
                raise UsageError(f"{file}: is the same file as {other}, which {use}: name another one")
        taken.append((file, "is written too"))


def _is_same(first: str, second: str) -> bool:
    """Whether two paths are one regular file, or would be. Devices and pipes may be shared."""
    try:
        return os.path.samefile(first, second) and stat.S_ISREG(os.stat(first).st_mode)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)
