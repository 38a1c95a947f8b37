"""`OUTPUT.meta.json`: what shaped the records of an output, so that a resumed run cannot mix two kinds in one file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from contbatch_cli.errors import EngineError, UsageError

VERSION = 1


def meta_path(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def write_meta(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings that shape the text, and this process's id, in one step: there is never half a file.

    Raises EngineError when the disk does not take it.
    """
    put_meta(path, written_meta(path, settings))


def written_meta(path: Path, settings: Mapping[str, Any]) -> Path:
    """What `write_meta` writes, whole and on the disk in a temporary file beside it, for `put_meta`. Raises EngineError."""
    temporary = meta_path(path).with_name(meta_path(path).name + ".tmp")
    content = json.dumps({"version": VERSION, "pid": os.getpid(), "settings": dict(settings)}, indent=1, allow_nan=False)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise EngineError(f"{meta_path(path)}: {error.strerror}") from error
    return temporary


def put_meta(path: Path, temporary: Path) -> None:
    """Renames what `written_meta` wrote to its place. Raises EngineError."""
    try:
        os.replace(temporary, meta_path(path))
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EngineError(f"{meta_path(path)}: {error.strerror}") from error


def read_meta(path: Path) -> dict[str, Any] | None:
    """What `write_meta` wrote for this output, None when there is none. Raises UsageError when it is not what it wrote."""
    target = meta_path(path)
    try:
        meta = json.loads(target.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{target}: cannot be read: {error}") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("settings"), dict):
        raise UsageError(f"{target}: is not the record of a run")
    if meta.get("version") != VERSION:
        raise UsageError(f"{target}: has version {meta.get('version')}, this contbatch writes {VERSION}")
    return meta


def refuse_other_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises UsageError that names the first setting in which this run differs from the one that wrote the output."""
    meta = read_meta(path)
    if meta is None:
        raise UsageError(
            f"{meta_path(path)} is missing: whether {path} was made with these settings cannot be told; --overwrite starts anew"
        )
    before = meta["settings"]
    now = json.loads(json.dumps(dict(settings)))
    for field in [*now, *(field for field in before if field not in now)]:
        if before.get(field) != now.get(field):
            old, new = (json.dumps(one.get(field))[:200] for one in (before, now))
            changed = f"{field} was {old} when {path} was begun and is {new} now"
            raise UsageError(f"--resume: {changed}; --overwrite starts anew")


def running_pid(path: Path) -> int | None:
    """The process that wrote the meta file last, None when that cannot be told."""
    try:
        pid = (read_meta(path) or {}).get("pid")
    except UsageError:
        return None
    return pid if isinstance(pid, int) else None
