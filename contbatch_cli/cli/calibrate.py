"""`contbatch calibrate`: measures this machine and model, so that a rehearsal's clock tells this machine's time."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import typer

from contbatch_cli import build
from contbatch_cli.cli.figures import duration, three_figures
from contbatch_cli.cli.options import Assignments, ConfigFile, ModelName, effective_config
from contbatch_cli.cli.rehearsal import calibration_path, num_threads
from contbatch_cli.config import Config
from contbatch_cli.config_files import Effective
from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.request import GREEDY, Request, RequestId, SamplingParams
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.cost_model import CostModel, MeasuredStep, StepShape, fit_cost_model, shape_of
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.engine import InferenceEngine
from contbatch_cli.errors import EngineError, UsageError
from contbatch_cli.simulate import OutputScript, SimulatedClock, SimulatedRunner
from contbatch_cli.sizing import DeviceMemory, block_size_of, most_blocks
from contbatch_cli.units import counted

if TYPE_CHECKING:
    from contbatch_cli.engine import Runner

TIME_LIMIT_S = 50.0
MAX_ROUNDS = 5
CACHE_TOKENS = 16_384
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 256, 1024)
PREFILLS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SAMPLE_KNOTS = (1, 8, 32, 64, 256)


def calibrate(config: ConfigFile = None, assignments: Assignments = None, model: ModelName = None) -> None:
    """Measure this machine and model for the rehearsal's clock; takes less than a minute once the model is loaded."""
    effective = effective_config(config, assignments, model=model)
    text_model = build.open_model(effective.config.model)
    memory = build.device_memory(effective.config, text_model)
    num_blocks = _num_blocks(effective.config, text_model, memory)
    effective = effective_config(config, [*(assignments or ()), f"cache.num_blocks={num_blocks}"], model=model)
    job = build.without_windows(_job(effective, text_model, memory))
    runner = build.build_executor(job).runner
    limits = StepLimits(num_blocks, job.sizes.block_size, job.sizes.token_budget, text_model.info.max_context)
    batches = calibration_batches(limits, with_unsampled=memory.kind == "cpu")
    typer.echo(f"contbatch: {len(batches)} kinds of steps, at most {TIME_LIMIT_S:.0f} s", err=True)
    measured = measure(batches, runner)
    arithmetic = build.arithmetic_name(effective.config.model, memory.kind, text_model.info)
    threads = f", {counted(num_threads(effective.config), 'thread')}" if memory.kind == "cpu" else ""
    cost = fit(measured, loop_costs(), f"measured on this machine ({memory.kind}{threads}, {arithmetic})")
    path = calibration_path(effective.config, text_model.info, memory.kind)
    store(path, cost)
    for line in report_lines(cost, measured):
        typer.echo(line)
    typer.echo(f"stored in {path}")


def _num_blocks(config: Config, model: build.TextModel, memory: DeviceMemory) -> int:
    """Blocks for the longest contexts to be measured, or what fits."""
    block_size = int(block_size_of(config.cache).value)
    bytes_per_value = build.DTYPE_BYTES[build.dtype_name(config.model, memory.kind, model.info)]
    limit = int(most_blocks(config.cache, block_size * model.info.kv_bytes_per_token(bytes_per_value), memory).value)
    return min(limit, CACHE_TOKENS // block_size)


def _job(effective: Effective, model: build.TextModel, memory: DeviceMemory) -> build.Job:
    """A job of one row: the parts of a run, for their runner."""
    with tempfile.TemporaryDirectory(prefix="contbatch-") as directory:
        rows = Path(directory) / "rows.jsonl"
        rows.write_text('{"prompt_token_ids":[1],"max_tokens":1}\n')
        inputs = build.Inputs((str(rows),), InputOptions())
        return build.prepare_job(effective, inputs, model, memory, lambda fault: None)


class RunKind(NamedTuple):
    """One run of a step to be measured; its first `shared` tokens are those of the step's other runs too."""

    length: int
    start: int
    samples: bool
    shared: int = 0


class StepLimits(NamedTuple):
    """What the steps may be at most."""

    num_blocks: int
    block_size: int
    token_budget: int
    max_context: int


def calibration_batches(limits: StepLimits, with_unsampled: bool) -> list[ScheduledBatch]:
    """Steps that vary tokens, runs, samples, context and pairs apart from one another, within the limits.

    Without `with_unsampled` each step samples at least one row, which on an accelerator is what makes a step wait for its end.
    """
    kinds = (step for step in _steps() if with_unsampled or any(run.samples for run in step))
    return [_batch(step, limits.block_size) for step in kinds if _fits(step, limits)]


def _fits(step: Sequence[RunKind], limits: StepLimits) -> bool:
    ends = [run.start + run.length for run in step]
    num_blocks = sum(-(-end // limits.block_size) for end in ends) - (len(step) - 1) * (step[0].shared // limits.block_size)
    num_tokens = sum(run.length for run in step)
    return max(ends) <= limits.max_context and num_tokens <= limits.token_budget and num_blocks <= limits.num_blocks


def _steps() -> Iterator[list[RunKind]]:
    for count in DECODES:
        for context in CONTEXTS:
            yield [RunKind(1, context - 1, True)] * count
    for count in (4, 16, 64):
        for shared in (256, 1024):
            yield [RunKind(1, shared + 63, True, shared)] * count
    for length in PREFILLS:
        yield [RunKind(length, 0, True)]
        yield [RunKind(length, 0, False)]
        yield [RunKind(length, 512, True)]
    for count in (4, 16):
        for length in (16, 64):
            yield [RunKind(length, 0, True)] * count
    for count in (8, 24, 56):
        for length in (8, 64, 256):
            yield [RunKind(1, 255, True)] * count + [RunKind(length, 0, False)]


def _batch(step: Sequence[RunKind], block_size: int) -> ScheduledBatch:
    """The step as a plan, each run with blocks of its own but for whole blocks of what it shares."""
    common = tuple(range(step[0].shared // block_size))
    sequences, first = [], len(common)
    for index, run in enumerate(step):
        needed = -(-(run.start + run.length) // block_size) - len(common)
        blocks = (*common, *range(first, first + needed))
        first += needed
        prompt = run.start if run.length == 1 else run.start + run.length
        logits = Logits.LAST if run.samples else Logits.NONE
        tokens = tuple(1 + position % 7 for position in range(run.length))
        sequences.append(
            ScheduledSequence(RequestId(index), tokens, run.start, blocks, max(prompt, 1), GREEDY, run.samples, logits)
        )
    return ScheduledBatch(tuple(sequences), sum(run.length for run in step))


def measure(
    batches: Sequence[ScheduledBatch],
    runner: Runner,
    clock: Callable[[], float] = time.perf_counter,
    limit_s: float = TIME_LIMIT_S,
) -> list[MeasuredStep]:
    """The median seconds of each step over as many rounds as the time allows; the first round may take twice as long."""
    end, latest = clock() + limit_s, clock() + 2 * limit_s
    seconds: list[list[float]] = [[] for _ in batches]
    if batches:
        runner.execute(batches[0])
    for number in range(MAX_ROUNDS):
        for batch, taken in zip(batches, seconds, strict=True):
            if clock() > (end if number else latest):
                break
            began = clock()
            runner.execute(batch)
            taken.append(clock() - began)
    done = [MeasuredStep(shape_of(batch), median(taken)) for batch, taken in zip(batches, seconds, strict=True) if taken]
    if len(done) < len(batches) / 2:
        raise EngineError(
            f"only {len(done)} of {len(batches)} kinds of steps were measured in {2 * limit_s:.0f} s: too slow to calibrate"
        )
    return done


class LoopCosts(NamedTuple):
    """What scheduling and bookkeeping take beside the model: seconds a step, and seconds a run."""

    step_s: float
    run_s: float


class _Endless:
    """Requests of sixteen prompt tokens without end."""

    is_live = False
    is_exhausted = False

    def __init__(self) -> None:
        self._row = 0

    def next_request(self, wait: bool) -> Request | None:
        self._row += 1
        return Request.from_prompt(RequestId(self._row), [self._row] * 16, SamplingParams(max_tokens=64))


def loop_costs(clock: Callable[[], float] = time.perf_counter) -> LoopCosts:
    """Measured on the real loop with a runner that takes no time."""
    one, many = (_loop_s(seats, clock) for seats in (1, 64))
    run_s = max((many - one) / 63, 0.0)
    return LoopCosts(max(one - run_s, 0.0), run_s)


def _loop_s(seats: int, clock: Callable[[], float], steps: int = 300) -> float:
    script = OutputScript()
    free = CostModel("free", True, ((1.0, 0.0),), ((1.0, 0.0),))
    scheduler = StallFreeScheduler(KVCacheManager(2048, 16), 512, seats, script.stop_rule)
    queue = JobQueue(_Endless(), 1000)
    queue.set_order("input")
    engine = InferenceEngine(scheduler, SimulatedRunner(script, free, lambda seconds: None), queue, SimulatedClock())
    reports = engine.run()
    next(reports)
    began = clock()
    for _ in islice(reports, steps):
        pass
    return (clock() - began) / steps


def fit(measured: Sequence[MeasuredStep], loop: LoopCosts, source: str) -> CostModel:
    """The cost model of the measured steps, the loop's own costs added."""
    whole = [MeasuredStep(step.shape, step.seconds + loop.step_s + loop.run_s * step.shape.num_runs) for step in measured]
    tokens = sorted({step.shape.num_tokens for step in measured})
    knots = [knot for knot in (1, *PREFILLS) if tokens[0] <= knot <= tokens[-1]]
    most_samples = max(step.shape.num_samples for step in measured)
    return fit_cost_model(whole, knots, [knot for knot in SAMPLE_KNOTS if knot <= most_samples], source)


def store(path: Path, cost: CostModel) -> None:
    """Writes the cost model, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(cost.as_dict(), indent=1) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: the calibration cannot be stored") from error


def report_lines(cost: CostModel, measured: Sequence[MeasuredStep]) -> Iterator[str]:
    """What was found: how long typical steps take, and how well the model tells the measured ones."""
    errors = sorted(abs(cost.shape_s(step.shape) / step.seconds - 1) for step in measured)
    for count in (1, 16, 64):
        shape = StepShape(count, count, count, count * 256, 0)
        step_s = cost.shape_s(shape)
        yield f"{count:>4} decodes at 256 tokens: {duration(step_s)} a step, {three_figures(count / step_s)} tokens/s"
    shape = StepShape(512, 1, 1, 0, 512 * 513 // 2)
    yield f" 512 prompt tokens: {duration(cost.shape_s(shape))}, {three_figures(512 / cost.shape_s(shape))} tokens/s"
    yield f"{len(measured)} kinds of steps; the model is off by {median(errors):.1%} in the median, {errors[-1]:.0%} at most"
