"""The output file: what may be written to, and the lock that keeps a second process away for the whole run."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from contbatch_cli.data.run_meta import meta_path, running_pid
from contbatch_cli.data.sources import STANDARD_INPUT
from contbatch_cli.errors import EngineError, UsageError

STANDARD_OUTPUT = "-"
OpenMode = Literal["new", "resume", "overwrite"]
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def pending_path(path: Path) -> Path:
    """Where records wait for their turn under `--order input`."""
    return path.with_name(path.name + ".pending")


class OutputFile:
    """An output that this process alone writes to, opened for appending. `is_regular` is false for devices and pipes.

    The lock is on the file itself: it ends with the process, whatever happens, and leaves nothing behind. `is_new` says that
    this process created the file.
    """

    def __init__(self, path: Path, descriptor: int, is_regular: bool, is_new: bool = False) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_regular = is_regular
        self.is_new = is_new

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size if self.is_regular else 0

    def empty(self) -> None:
        """Takes out what an earlier run left, in the file and beside it."""
        os.ftruncate(self.descriptor, 0)
        for beside in (pending_path(self.path), meta_path(self.path)):
            beside.unlink(missing_ok=True)

    def replace_with(self, temporary: Path) -> None:
        """Renames a complete file over this one without ever letting go of the lock: the new file is locked first."""
        descriptor = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            if not _locked(descriptor):
                raise EngineError(f"{temporary}: another process holds it")
            os.fsync(descriptor)
            os.rename(temporary, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self.descriptor)
        self.descriptor = descriptor
        sync_directory(self.path)

    def close(self) -> None:
        """Lets go of file and lock, and removes a file that was created for a run which never began (it has no meta file).

        A second time does nothing.
        """
        if self.descriptor >= 0:
            if self.is_new and self.size == 0 and not meta_path(self.path).exists():
                self.path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = -1


def open_output(name: str, mode: OpenMode, sources: Sequence[str] = ()) -> OutputFile:
    """Opens and locks an output. Nothing in it is touched.

    Raises UsageError when it exists in mode `new`, is one of the inputs, is locked, or cannot be written.
    """
    path = _checked(name)
    _refuse_inputs(path, sources)
    if mode == "new":
        _refuse_existing(path)
    output = _open_locked(path)
    if mode == "new" and output.is_regular and not output.is_new:
        output.close()
        raise _exists(path)
    if mode == "new" and output.is_regular:
        meta_path(path).unlink(missing_ok=True)  # of an output that was removed
    if mode == "resume" and not output.is_regular:
        output.close()
        raise UsageError(f"{path}: only regular files can be resumed")
    return output


def sync_directory(path: Path) -> None:
    """Makes a rename in the file's directory last."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot, and need not
        pass
    finally:
        os.close(descriptor)


def _checked(name: str) -> Path:
    """The output's path. Raises UsageError where there can be no file of this name, or none beside it."""
    path = Path(name)
    if not path.name or name.endswith(os.sep) or os.path.isdir(name):
        raise UsageError(f"{name}: is a directory, not a file for records" if name else "the name of the output is empty")
    for beside in (pending_path(path), meta_path(path)):
        try:
            os.lstat(beside)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"{beside}: {error.strerror}") from None
    return path


def _refuse_inputs(path: Path, sources: Sequence[str]) -> None:
    for written in (path, pending_path(path), meta_path(path)):
        for source in sources:
            if source != STANDARD_INPUT and _is_same_file(written, source):
                raise UsageError(f"{source}: is input and output at once ({written})")


def _is_same_file(written: Path, source: str) -> bool:
    try:
        return os.path.samefile(written, source) and stat.S_ISREG(os.stat(source).st_mode)
    except OSError:
        return False


def _refuse_existing(path: Path) -> None:
    for existing in (path, pending_path(path)):
        if os.path.isfile(existing):
            raise _exists(existing)


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists: --resume goes on with it, --overwrite starts anew")


def _open_locked(path: Path) -> OutputFile:
    while True:
        descriptor, is_new = _opened(path)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return OutputFile(path, descriptor, is_regular=False)
        if not _locked(descriptor):
            os.close(descriptor)
            raise UsageError(_in_use(path))
        if _is_still(path, descriptor):
            return OutputFile(path, descriptor, is_regular=True, is_new=is_new)
        os.close(descriptor)  # it was renamed over or removed between opening and locking


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether the file was created for it. Devices and pipes are opened for writing alone."""
    is_device = path.exists() and not path.is_file()
    try:
        if is_device:
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), False
        try:
            return os.open(path, _FLAGS | os.O_EXCL, 0o666), True
        except FileExistsError:
            return os.open(path, _FLAGS, 0o666), False
    except OSError as error:
        raise UsageError(f"{path}: {_reason(path, error)}") from None


def _reason(path: Path, error: OSError) -> str:
    """Why a file could not be opened; what is missing is its directory, or what a link points to."""
    if not isinstance(error, FileNotFoundError):
        return str(error.strerror)
    return (
        f"a link to {os.readlink(path)}, which cannot be made" if path.is_symlink() else f"there is no directory {path.parent}"
    )


def _in_use(path: Path) -> str:
    pid = running_pid(path)
    by = f" (process {pid})" if pid is not None else ""
    return f"{path}: another contbatch run{by} is writing to it"


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UsageError(f"the output's file system has no locks: {error.strerror}") from None
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    held = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
