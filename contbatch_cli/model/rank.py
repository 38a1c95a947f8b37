"""The process of one rank of a split model: plans come through a pipe, each is one forward pass, and no logits leave.

    parent (rank 0)   task ->         go ->                             plan -> ...   end
    this process             <- ready        group, weights, cache      forward       exit

The process lives by the pipe: when it is closed, however the parent ended, a thread ends the process, whatever the main thread
is waiting for; where the system can, it kills the process with its parent, also one that is stopped. Signals that a terminal or a
kill of the process group sends to all are the parent's to decide on. Only when all this holds are torch and transformers imported.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from contbatch_cli.config import ModelConfig

if TYPE_CHECKING:
    from contbatch_cli.model.kv_cache import WindowPool

READY = b"ready"
GO = b"go"
END = b""
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process is sent when the thread that started it has ended."""


class RankTask(NamedTuple):
    """What a rank is to be: `settings` name its own device, the rest is its cache and how many threads it has."""

    rank: int
    size: int
    port: int
    directory: Path
    settings: ModelConfig
    num_blocks: int
    block_size: int
    window_pool: WindowPool | None
    num_threads: int


def serve(descriptor: int, parent_pid: int) -> None:
    """The whole life of the process; does not return. What goes wrong is told to the parent in one line.

    With a `parent_pid` of 0 the pipe alone tells of the parent's end.
    """
    if parent_pid and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = Connection(descriptor)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(parent, inbox), name="parent", daemon=True).start()
    try:
        _run(parent, inbox)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        parent.send_bytes(f"{in_one_line(error)} ({Path(frame.filename).name}, line {frame.lineno})".encode())
    os._exit(1)


def _receive(parent: Connection, inbox: SimpleQueue[bytes]) -> None:
    """Hands on what the parent sends, and ends the process when it says so or is gone."""
    try:
        while message := parent.recv_bytes():
            inbox.put(message)
    except (EOFError, OSError):
        pass
    os._exit(0)


def _run(parent: Connection, inbox: SimpleQueue[bytes]) -> None:
    task: RankTask = pickle.loads(inbox.get())
    from contbatch_cli.model.tensor_parallel import join_group, load_rank

    parent.send_bytes(READY)
    assert inbox.get() == GO, "the first message after the task"
    join_group(task)
    runner = load_rank(task)
    while True:
        runner.execute(pickle.loads(inbox.get()))


def in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
