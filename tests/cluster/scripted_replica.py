"""Replicas with the scripted runner of the command line's tests. Imported by Ray's workers too.

Environment variables, beside those of `tests.cli.scripted`:

    SCRIPTED_POISON     a row whose prompt has this token id kills the process that runs it
    SCRIPTED_PIDS       a directory in which each replica leaves a file named after its process id, with its node's id in it
    SCRIPTED_NO_START   how many replicas fail to load, told by the number of files in SCRIPTED_PIDS
    SCRIPTED_TOGETHER   how many replicas have to be there before the first of them begins
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from contbatch_cli import build
from contbatch_cli.build_replicas import ModelReplicaBuilder
from contbatch_cli.core.batch import BatchResult, ScheduledBatch
from tests.cli.scripted import ScriptedRunner, build_scripted_executor


class DeadlyRunner(ScriptedRunner):
    """Dies where a row is poisoned."""

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        poison = os.environ.get("SCRIPTED_POISON")
        if poison is not None and any(int(poison) in sequence.tokens for sequence in batch.sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(batch)


def _scripted_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SCRIPTED_")}


def _wait_for_replicas(directory: Path, number: int) -> None:
    """Without it the first replica may be through the whole job before a busy machine has started the second."""
    while len(os.listdir(directory)) < number:
        time.sleep(0.02)


@dataclass(frozen=True)
class ScriptedReplicaBuilder(ModelReplicaBuilder):
    """Everything but the model is the product's. The settings travel from the process that dispatches."""

    settings: dict[str, str] = field(default_factory=_scripted_settings)

    def executor(self, job: build.Job) -> build.Executor:
        import ray

        os.environ.update(self.settings)
        build_scripted_executor(job)
        directory = os.environ.get("SCRIPTED_PIDS")
        if directory is not None:
            (Path(directory) / str(os.getpid())).write_text(ray.get_runtime_context().get_node_id())
            if len(os.listdir(directory)) <= int(os.environ.get("SCRIPTED_NO_START", "0")):
                raise RuntimeError("scripted: this one does not start")
            _wait_for_replicas(Path(directory), int(os.environ.get("SCRIPTED_TOGETHER", "1")))
        return build.Executor(DeadlyRunner(job), "scripted")
