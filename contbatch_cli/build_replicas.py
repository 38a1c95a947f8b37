"""Wires the replicas of a job: on Ray for a run, in simulated time for a rehearsal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from contbatch_cli import build
from contbatch_cli.build import Executor, Job, TextModel
from contbatch_cli.cluster.cluster_engine import ClusterEngine, ReplicaPool, ReplicaState
from contbatch_cli.cluster.dispatcher import Dispatcher
from contbatch_cli.cluster.ray_pool import Probe, RayPool
from contbatch_cli.cluster.replica import Replica
from contbatch_cli.cluster.shares import Share
from contbatch_cli.cluster.simulated_pool import SimulatedPool
from contbatch_cli.config import Config
from contbatch_cli.core.job_order import Choice, JobQueue
from contbatch_cli.cost_model import CostModel
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.job_rows import JobRows, RowReader, Waiting
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.rows import Row, RowFault
from contbatch_cli.engine import Clock, Engine
from contbatch_cli.errors import UsageError
from contbatch_cli.simulate import OutputScript, SimulatedClock, SimulatedRunner
from contbatch_cli.sizing import DeviceMemory, Sizes
from contbatch_cli.units import counted

Say = Callable[[str], None]


def wants_replicas(config: Config) -> bool:
    return config.cluster.replicas is not None or config.cluster.address is not None


@dataclass(frozen=True, slots=True)
class ModelReplicaBuilder:
    """Opens and loads the config's model on the machine where the replica is."""

    config: Config
    num_threads: int

    def probe(self) -> tuple[DeviceMemory, str]:
        model = build.open_model(self.config.model)
        return build.device_memory(self.config, model), model.info.fingerprint

    def build(self, sizes: Sizes, clock: Clock) -> tuple[Replica, str]:
        model = build.open_model(self.config.model)
        job = _job_without_rows(self.config, model, sizes)
        executor = self.executor(job)
        assert executor.runner is not None, "a replica has a runner of its own"
        texts = StopStringRule(model.tokenizer)
        scheduler = build.build_scheduler(job, build.stop_rule(texts, executor))
        return Replica(scheduler, executor.runner, clock, texts.forget, executor.first_divergence), executor.description

    def executor(self, job: Job) -> Executor:
        """The model on its device, with this replica's part of the machine's cores."""
        import torch

        torch.set_num_threads(self.num_threads)
        return build.build_executor(job)


def _job_without_rows(config: Config, model: TextModel, sizes: Sizes) -> Job:
    """A replica's part of a job: it is sent requests and reads no rows."""

    def no_row(row: Row) -> PreparedRow | RowFault:
        raise AssertionError(f"a replica was given row {row.index} to prepare")

    rows = JobRows(RowReader(iter(()), is_live=False), no_row, lambda fault: None)
    memory = build.device_memory(config, model)
    return Job(
        config, model, rows, JobQueue(rows, 1), Choice("input", "as sent"), sizes, memory, build.layer_windows(model.info)
    )


@contextmanager
def open_replicas(config: Config, say: Say, waiting: Waiting) -> Iterator[Replicas | None]:
    """The replicas that the config asks for, None where it asks for none; gone at the end. Raises UsageError."""
    if not wants_replicas(config):
        yield None
        return
    with RayPool(config.cluster, config.model, partial(_builder, config), waiting) as pool:
        yield Replicas(config, pool, say)


def _builder(config: Config, share: Share) -> ModelReplicaBuilder:
    """A path is made absolute: replicas may have another working directory."""
    adapters = {name: _absolute(source) for name, source in config.model.adapters.items()}
    model = replace(config.model, name=_absolute(config.model.name), adapters=adapters, device=share.kind)
    return ModelReplicaBuilder(replace(config, model=model), share.num_threads)


def _absolute(source: str) -> str:
    return str(Path(source).resolve()) if Path(source).exists() else source


class Replicas:
    """The replicas of a run, in the place of the one engine of this process."""

    def __init__(self, config: Config, pool: RayPool, say: Say) -> None:
        self._config = config
        self._pool = pool
        self._say = say
        self._engine: ClusterEngine | None = None

    def memory(self, model: TextModel) -> DeviceMemory:
        """What each replica will have: the least of any, where some share a machine's memory each with a part of it."""
        probes = self._pool.probes()
        kind = probes[0].memory.kind
        return DeviceMemory(kind, least_bytes(probes, build.weights_bytes(self._config, kind, model)))

    def executor(self, job: Job) -> Executor:
        """Lets the replicas load; done once the first of them has."""
        description = self._pool.load(job.sizes)
        share = self._pool.share
        gpus = "a GPU" if share.num_gpus == 1 else f"{share.num_gpus} GPUs"
        each = f"{gpus if share.kind == 'cuda' else counted(share.num_threads, 'thread')} each"
        text = f"{counted(share.num_replicas, 'replica')}, {each}: {description}"
        return Executor(None, text, make_engine=self._make_engine, first_divergence=self._pool.first_divergence)

    def _make_engine(self, job: Job, clock: Clock) -> Engine:
        self._engine = cluster_engine(job, self._pool, self._say, time.monotonic)
        return self._engine

    @property
    def states(self) -> list[ReplicaState]:
        """What each replica does, for the live view; those that have not joined are missing."""
        return list(self._engine.replicas.values()) if self._engine is not None else []


def least_bytes(probes: list[Probe], weights_bytes: int) -> int:
    """Bytes for the cache of each replica. A machine's main memory is shared by those on it, and each has its own weights."""
    num_on = Counter(probe.machine for probe in probes)
    free = [
        probe.memory.free_bytes
        if probe.memory.kind == "cuda"
        else (probe.memory.free_bytes + weights_bytes) // num_on[probe.machine] - weights_bytes
        for probe in probes
    ]
    return max(min(free), 0)


def cluster_engine(job: Job, pool: ReplicaPool, say: Say, clock: Clock) -> ClusterEngine:
    """The engine of a job that the replicas of a pool share."""
    max_attempts = job.config.cluster.max_attempts
    dispatcher = Dispatcher(job.order.value, job.sizes.block_size, max_attempts)
    return ClusterEngine(pool, dispatcher, job.queue, max_attempts, say, clock)


def memory_of_each(config: Config, memory: DeviceMemory, model: TextModel) -> DeviceMemory:
    """What each replica of a rehearsal has, all of them on one machine with this memory. Raises UsageError for `auto`."""
    if not wants_replicas(config):
        return memory
    probes = [Probe("", memory, "")] * rehearsed_replicas(config)
    return DeviceMemory(memory.kind, least_bytes(probes, build.weights_bytes(config, memory.kind, model)))


def rehearsed_replicas(config: Config) -> int:
    """How many replicas a rehearsal has. Raises UsageError for `auto`."""
    if not isinstance(config.cluster.replicas, int):
        raise UsageError("cluster.replicas auto: a rehearsal has no machines to count; give a number (--replicas 4)")
    return config.cluster.replicas


def simulated_engine(job: Job, script: OutputScript, cost: CostModel) -> ClusterEngine:
    """The engine of a rehearsal with as many replicas as the config says."""
    replicas = [_simulated_replica(job, script, cost) for _ in range(rehearsed_replicas(job.config))]
    return cluster_engine(job, SimulatedPool(replicas), _never_said, lambda: 0.0)


def _never_said(message: str) -> None:
    raise AssertionError(f"a simulated replica was lost: {message}")


def _simulated_replica(job: Job, script: OutputScript, cost: CostModel) -> tuple[Replica, SimulatedClock]:
    clock = SimulatedClock()
    scheduler = build.build_scheduler(job, script.stop_rule)
    return Replica(scheduler, SimulatedRunner(script, cost, clock.advance), clock), clock
