"""Rehearses a job: the real rows, scheduler and engine loop over a simulated runner and clock. No weights, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contbatch_cli import machine
from contbatch_cli.build import (
    DTYPE_BYTES,
    Inputs,
    Job,
    TextModel,
    arithmetic_name,
    build_engine,
    bytes_per_weight,
    device_kind,
    device_memory,
    dtype_name,
    open_model,
    prepare_job,
    resolved_config,
)
from contbatch_cli.build_replicas import memory_of_each, simulated_engine, wants_replicas
from contbatch_cli.cli.replica_lines import ReplicaTotals
from contbatch_cli.cli.schedule_view import Schedule
from contbatch_cli.config import Config
from contbatch_cli.config_files import Effective
from contbatch_cli.cost_model import VERSION, CostModel, ModelShape, device_figures, roofline
from contbatch_cli.data.model_files import ModelInfo, read_json
from contbatch_cli.data.model_store import cache_dir
from contbatch_cli.data.rows import RowFault
from contbatch_cli.engine import Engine
from contbatch_cli.simulate import OutputScript, SimulatedClock, SimulatedRunner
from contbatch_cli.sizing import DeviceMemory
from contbatch_cli.trace import TraceIteration, header_fields, iteration_of
from contbatch_cli.units import counted

ASSUMED_GPU_BYTES = 40 * 2**30

Overrides = tuple[tuple[str, str], ...]


def assigned(overrides: Overrides) -> list[str]:
    """Overrides as assignments."""
    return [f"{key}={value}" for key, value in overrides]


@dataclass(slots=True)
class Rehearsals:
    """Makes schedules of one job under varied configs.

    `configure` gives the effective config for a sequence of `key=value` assignments. Models are opened once.
    """

    configure: Callable[[Sequence[str]], Effective]
    inputs: Inputs
    script: Callable[[], OutputScript]
    _models: dict[object, TextModel] = field(default_factory=dict)

    def schedule(self, title: str, overrides: Overrides = ()) -> Schedule:
        """One schedule, ready to be walked; an empty title stands for the policy's name.

        Raises UsageError for what makes the job impossible.
        """
        effective = self.configure(assigned(overrides))
        config = effective.config
        model = self._model(config)
        memory = memory_of_each(config, rehearsal_memory(config, model), model)
        script = self.script()
        faults: list[RowFault] = []
        job = prepare_job(effective, self.inputs, model, memory, faults.append)
        cost = cost_model(config, model.info, memory.kind)
        totals = ReplicaTotals()
        return Schedule(
            title=title or config.scheduler.policy,
            header=header_fields(resolved_config(job), asdict(memory), job.rows.num_rows if job.rows.is_read else None),
            iterations=_iterations(job, script, cost, totals),
            clock=cost.source,
            notes=lambda: (*totals.lines(), *_notes(config, memory, script, faults)),
            overrides=overrides,
        )

    def _model(self, config: Config) -> TextModel:
        key = (config.model.name, config.model.revision, *sorted(config.model.adapters.items()))
        if key not in self._models:
            self._models[key] = open_model(config.model, self.inputs.chat_template)
        return self._models[key]


def _iterations(job: Job, script: OutputScript, cost: CostModel, totals: ReplicaTotals) -> Iterator[TraceIteration]:
    for report in _engine(job, script, cost).run():
        iteration = iteration_of(report, job.rows.name_of)
        totals.add(iteration)
        yield iteration
        for request in (*report.finished, *report.duplicates):
            job.rows.finish(request)


def _engine(job: Job, script: OutputScript, cost: CostModel) -> Engine:
    if wants_replicas(job.config):
        return simulated_engine(job, script, cost)
    clock = SimulatedClock()
    return build_engine(job, SimulatedRunner(script, cost, clock.advance), script.stop_rule, clock)


def _notes(config: Config, memory: DeviceMemory, script: OutputScript, faults: Sequence[RowFault]) -> tuple[str, ...]:
    """What the reader of the figures should know; complete once the schedule was walked."""
    notes = [f"output lengths: {script.description}"]
    if script.known and script.num_unknown:
        notes.append(f"{counted(script.num_unknown, 'row')} not in that file, taken to be as long as max_tokens allows")
    if faults:
        first = f"row {faults[0].index}: {faults[0].code}"
        notes.append(f"{counted(len(faults), 'row')} left out, which cannot run (the first, {first})")
    if memory.kind == "cuda" and config.cache.num_blocks == "auto":
        notes.append(
            f"GPU memory is taken as {memory.free_bytes / 2**30:.0f} GiB free; cache.num_blocks or cache.memory sets it"
        )
    return tuple(notes)


def rehearsal_memory(config: Config, model: TextModel) -> DeviceMemory:
    """The memory that a real run would find. A GPU's cannot be asked without torch: a middling one is assumed."""
    if device_kind(config.model) == "cuda":
        return DeviceMemory("cuda", ASSUMED_GPU_BYTES)
    return device_memory(config, model)


def calibration_path(config: Config, info: ModelInfo, kind: str) -> Path:
    """Where the measured cost model of this model, type and devices is kept; on a CPU also of this number of threads."""
    threads = f"-{num_threads(config)}t" if kind == "cpu" else ""
    devices = f"-{config.model.tensor_parallel}d" if config.model.tensor_parallel > 1 else ""
    name = f"{info.fingerprint[:16]}-{kind}{threads}{devices}-{arithmetic_name(config.model, kind, info)}-{VERSION}.json"
    return cache_dir() / "calibrations" / name


def num_threads(config: Config) -> int:
    """How many threads an engine of the run computes with on a CPU: replicas share this machine's."""
    replicas = config.cluster.replicas if isinstance(config.cluster.replicas, int) else 1
    return max(machine.num_threads() // max(replicas, 1), 1)


def cost_model(config: Config, info: ModelInfo, kind: str) -> CostModel:
    """The measured cost model where there is one, else an estimate."""
    stored = read_json(calibration_path(config, info, kind))
    if stored is not None:
        return CostModel.from_dict(stored)
    figures = device_figures(machine.gpu_name() if kind == "cuda" else "cpu", num_threads(config))
    value_bytes, weight_bytes = DTYPE_BYTES[dtype_name(config.model, kind, info)], bytes_per_weight(config, kind, info)
    return roofline(ModelShape.from_config(_config_json(info)), figures, value_bytes, weight_bytes)


def _config_json(info: ModelInfo) -> dict[str, Any]:
    return read_json(info.path / "config.json") or {}
