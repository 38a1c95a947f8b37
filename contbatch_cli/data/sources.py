"""Inputs as streams of physical lines: files, gzip files and standard input, split at newline bytes only, in bounded memory."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import BinaryIO, NamedTuple, cast

from contbatch_cli.errors import EngineError, RowError, UsageError

STANDARD_INPUT = "-"
MAX_LINE_BYTES = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_GZIP_MAGIC = b"\x1f\x8b"
_BUFFER_BYTES = 256 * 1024
_SKIP_BYTES = 1024 * 1024


class Line(NamedTuple):
    """One physical line that is not blank, its newline included. `number` counts all lines from 1.

    A line over the limit is not kept: `error` says so and `raw` is a digest of it.
    """

    number: int
    raw: bytes
    error: RowError | None = None


def check_source(name: str) -> None:
    """Raises UsageError for an input that cannot be opened, before anything is run."""
    if name == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("-: standard input is closed")
    elif os.path.isdir(name):
        raise UsageError(f"{name}: is a directory, not a file of prompts")
    elif not os.path.exists(name):
        raise UsageError(f"{name}: no such file")
    elif not os.access(name, os.R_OK):
        raise UsageError(f"{name}: permission denied")
    elif name.endswith(".gz") and os.path.isfile(name) and _magic(name) not in (b"", _GZIP_MAGIC):
        raise UsageError(f"{name}: is named .gz, but its content is not gzip")


def check_sources(names: Sequence[str]) -> None:
    """Raises UsageError for inputs that cannot be opened, or not together."""
    if list(names).count(STANDARD_INPUT) > 1:
        raise UsageError("-: standard input can be read once, it is given twice")
    for name in names:
        check_source(name)


def _magic(name: str) -> bytes:
    with open(name, "rb") as stream:
        return stream.read(len(_GZIP_MAGIC))


def can_be_read_twice(name: str) -> bool:
    """Whether an input is a regular file, which a second reading finds unchanged."""
    return name != STANDARD_INPUT and os.path.isfile(name)


@contextmanager
def opened_source(name: str) -> Iterator[BinaryIO]:
    """The bytes of one input, unpacked when they are gzip. Raises UsageError when it cannot be opened."""
    check_source(name)
    if name == STANDARD_INPUT:
        with _standard_input() as stream:
            yield _unpacked(stream, name)
        return
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    with open(descriptor, "rb", buffering=_BUFFER_BYTES) as stream:
        yield _unpacked(stream, name)


def _standard_input() -> BinaryIO:
    """A stream of its own on the same descriptor: a thread that waits in `sys.stdin` keeps the interpreter from exiting."""
    try:
        descriptor = os.dup(sys.stdin.buffer.fileno())
    except OSError:  # something that stands in for it and has no descriptor
        return cast(BinaryIO, sys.stdin.buffer)
    return open(descriptor, "rb", buffering=_BUFFER_BYTES)


def _unpacked(stream: BinaryIO, name: str) -> BinaryIO:
    peek = getattr(stream, "peek", None)
    if name.endswith(".gz") or (peek is not None and peek(2)[:2] == _GZIP_MAGIC):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    return stream


def split_lines(stream: BinaryIO, name: str, max_bytes: int = MAX_LINE_BYTES, keep_blank: bool = False) -> Iterator[Line]:
    """The lines that are not blank, without the byte order mark. Lines end at newline bytes only.

    At most `max_bytes` of a line are held. Raises EngineError when the input cannot be read to its end.
    """
    number = 0
    try:
        while raw := stream.readline(max_bytes + 1):
            number += 1
            if number == 1 and raw.startswith(_BOM):
                raw = raw[3:]
            if len(raw) > max_bytes and not raw.endswith(b"\n"):
                yield from _overlong(stream, number, raw, max_bytes)
            elif raw and (keep_blank or not raw.isspace() or raw.strip(_BLANK)):
                yield Line(number, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise EngineError(f"{name}: reading stopped after line {number:,}: {error}") from error


def _overlong(stream: BinaryIO, number: int, head: bytes, max_bytes: int) -> Iterator[Line]:
    """Reads a line to its end, keeping nothing of it but its length and a digest."""
    digest, length, is_blank = blake2b(digest_size=16), 0, True
    piece = head
    while piece:
        digest.update(piece)
        length += len(piece)
        is_blank = is_blank and not piece.strip(_BLANK)
        if piece.endswith(b"\n"):
            break
        piece = stream.readline(_SKIP_BYTES)
    if not is_blank:
        message = f"line {number}: {length:,} bytes long, the limit for a line is {max_bytes:,}"
        yield Line(number, digest.digest(), RowError("invalid_row", message))
