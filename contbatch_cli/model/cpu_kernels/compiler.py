"""Compiles the C sources beside this file on first use, once for each compiler, processor and version of the sources.

The library lies in the user's cache directory under a name that is the hash of all that it depends on, so a stale one is never
loaded. Processes that start together wait for one another's compilation by a file lock; the file appears by a rename.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contbatch_cli import machine

logger = logging.getLogger(__name__)

SOURCES = ("vector.h", "team.h", "gemm.h", "attention.h", "int8.h", "amx.h", "linear.h", "layer.h", "kernels.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TUNING = (("-march=native",), ("-mcpu=native",), ())
"""Flags for this very processor, tried in this order."""
TIMEOUT_S = 120.0


class CompileError(Exception):
    """There is no library: no compiler, or it failed. The message says which."""


def library_path(cache_dir: Path | None = None) -> Path:
    """The compiled library, made now if need be. Raises CompileError."""
    compiler = find_compiler()
    directory = cache_dir or default_cache_dir()
    target = directory / f"kernels-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise CompileError(f"{directory}: {error}") from error
    return target


def default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "contbatch" / "kernels"


def find_compiler() -> tuple[str, ...]:
    """The C compiler's command. Raises CompileError where there is none."""
    if os.name != "posix":
        raise CompileError(f"not supported on {os.name}")
    found = machine.c_compiler()
    if found is None:
        raise CompileError("no C compiler: none of cc, gcc, clang is on the path")
    return found


def _fingerprint(compiler: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update(repr((FLAGS, TUNING, compiler, _version(compiler), platform.machine(), _processor())).encode())
    return digest.hexdigest()[:20]


def _version(compiler: tuple[str, ...]) -> str:
    """The compiler's own word on its version; its path and time would miss an upgrade in place."""
    path = shutil.which(compiler[0]) or compiler[0]
    try:
        status = os.stat(path)
    except OSError as error:
        raise CompileError(f"{path}: {error}") from error
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def _processor() -> str:
    """What the processor can do, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            wanted = ("model name", "flags", "Features", "CPU part")
            found = {line.split(":", 1)[0].strip(): line for line in lines if line.startswith(wanted)}
    except OSError:
        return platform.processor()
    return "".join(found.values())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: tuple[str, ...], target: Path) -> None:
    source = Path(__file__).parent / "kernels.c"
    errors = []
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / "kernels.so"
        for tuning in TUNING:
            message = _run([*compiler, *FLAGS, *tuning, str(source), "-o", str(output), "-lm"])
            if message is None:
                os.replace(output, target)
                logger.info("compiled %s with %s", target, shlex.join([*compiler, *tuning]))
                return
            errors.append(message)
    raise CompileError(f"{shlex.join(compiler)} failed: {errors[-1]}")


def _run(command: list[str]) -> str | None:
    """None when the command succeeds, else the end of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]
