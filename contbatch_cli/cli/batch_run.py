"""A run of a batch job: the engine's iterations become records, a view, a trace, and at the end an exit status."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from contbatch_cli import build
from contbatch_cli.build_replicas import Replicas, open_replicas
from contbatch_cli.cli.app import print_plain
from contbatch_cli.cli.live import STDERR, RunHeader, View, make_view, told
from contbatch_cli.cli.output import Output, OutputOptions, claim_standard_output
from contbatch_cli.cli.replica_lines import live_lines
from contbatch_cli.cli.signals import Interrupted, Interrupts
from contbatch_cli.cli.summary import RunSummary
from contbatch_cli.cli.trace_file import TraceFile
from contbatch_cli.cli.verify import Sample, verify
from contbatch_cli.config_files import Effective
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.job_rows import OutOfTime, ReadRow
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.recorder import Recorder
from contbatch_cli.data.records import RecordOptions
from contbatch_cli.data.rows import RowFault
from contbatch_cli.data.writer import ReaderGone
from contbatch_cli.engine import IterationReport
from contbatch_cli.errors import ContbatchError, EngineError, ExitStatus, UsageError
from contbatch_cli.metrics import Metrics, RequestMetrics, RowCounts
from contbatch_cli.trace import header_line, iteration_line

COLLECT_AFTER_OBJECTS = 1_000_000


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says of the run beyond config, input and output."""

    on_error: Literal["record", "fail"] = "record"
    max_time_s: float | None = None
    verify: int = 0
    trace: Path | None = None
    live: bool | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class RunRequest:
    """All that a command line asks for."""

    effective: Effective
    inputs: build.Inputs
    output: OutputOptions
    options: RunOptions


def run(asked: RunRequest) -> ExitStatus:
    """The whole job; the status with which the process ends. Raises ContbatchError for what goes wrong as a whole."""
    began_s = time.monotonic()
    descriptor = claim_standard_output(asked.output)  # first of all, while the closed ones are closed
    with Interrupts() as interrupts:
        try:
            with ExitStack() as stack:
                return _run(asked, interrupts, stack, descriptor, began_s)
        except Interrupted:
            assert interrupts.status is not None
            if not asked.options.quiet:
                print_plain(f"contbatch: interrupted; rows without a record were not finished: {_how_to_go_on(asked)}")
            return interrupts.status
        except ReaderGone:
            return ExitStatus.SIGPIPE
        except ContbatchError:
            raise
        except Exception as error:  # a bug, or a library's failure: its traceback is kept, and it is not the status of bad rows
            print_plain(traceback.format_exc().rstrip("\n"))
            raise EngineError(f"the engine failed ({type(error).__name__}): {_how_to_go_on(asked)}") from None


def _run(asked: RunRequest, interrupts: Interrupts, stack: ExitStack, descriptor: int, began_s: float) -> ExitStatus:
    output = Output(asked.output, asked.inputs)
    stack.callback(output.close)
    stack.enter_context(collector_at_rest())
    with interrupts.may_raise():
        batch_run = BatchRun(asked, output, interrupts, descriptor, began_s)
        stack.callback(batch_run.close)
        replicas = stack.enter_context(open_replicas(asked.effective.config, batch_run.view.message, batch_run.waiting))
        batch_run.prepare(replicas)
        executor = batch_run.load(replicas.executor if replicas else build.build_executor)
        output.settle()
    gc.freeze()
    if executor is not None:
        batch_run.execute(executor)
    elif batch_run.job.has_work:
        batch_run.cancel_rest()
    return batch_run.finish(executor)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keeps the cyclic collector from walking over rows and model again and again: neither has cycles, and both live long.

    What is frozen within (`gc.freeze`) is freed like anything else once nothing refers to it.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


def _how_to_go_on(asked: RunRequest) -> str:
    name = asked.output.name
    return "use -o FILE to be able to go on" if name == "-" else f"the same command with --resume goes on with {name}"


class BatchRun:
    """One run of a job, from the opened model to the summary."""

    job: build.Job

    def __init__(self, asked: RunRequest, output: Output, interrupts: Interrupts, descriptor: int, began_s: float) -> None:
        config = asked.effective.config
        self._asked = asked
        self._output = output
        self._interrupts = interrupts
        self._descriptor = descriptor
        self._model = build.open_model(config.model, asked.inputs.chat_template)
        self._texts = StopStringRule(self._model.tokenizer)
        self._metrics = Metrics()
        self._first_metrics: dict[int, RequestMetrics] = {}
        self._verified = Sample(asked.options.verify)
        self._replicas: Replicas | None = None
        self._wants_metrics = config.output.metrics
        self._is_executing = False
        self._is_cancellable = False
        self._began_s = began_s
        options = asked.options
        self._trace = TraceFile(options.trace, (*asked.inputs.sources, asked.output.name), self._complain)
        self.view: View = make_view(
            self._metrics,
            quiet=options.quiet,
            live=options.live,
            name_of=self._name_of,
            fds=(descriptor, STDERR),
            more_lines=self._replica_lines,
        )
        self.recorder = Recorder(
            RecordOptions(
                self._model.tokenizer.token_bytes,
                model=config.model.name,
                created=int(time.time()),
                several_inputs=len(asked.inputs.sources) > 1,
                token_ids=config.output.token_ids,
            ),
            output.write,
            lambda request, row: build.complete(self._texts, self._model, request, row),
        )

    def _replica_lines(self) -> list[str]:
        return live_lines(self._replicas.states) if self._replicas is not None else []

    def _complain(self, message: str) -> None:
        """Says what went wrong, `--quiet` or not, without ending the run."""
        text = f"contbatch: {message}"
        if self._asked.options.quiet:
            print_plain(text)
        else:
            self.view.message(text)

    def _name_of(self, index: int) -> str | int | None:
        return self.job.rows.name_of(index)

    def close(self) -> None:
        """Takes the view off the screen and ends the trace."""
        with suppress(OSError):  # a terminal that went away
            self.view.close()
        self._trace.close()

    def prepare(self, replicas: Replicas | None = None) -> None:
        """Repair or begin the output, and read the first window of rows."""
        effective, inputs, self._replicas = self._asked.effective, self._asked.inputs, replicas
        memory = replicas.memory(self._model) if replicas else build.device_memory(effective.config, self._model)
        size = effective.config.model.tensor_parallel
        if self._asked.options.verify and size > 1 and memory.kind == "cuda":
            raise UsageError(f"--verify: a row is run alone on one device, and the model is on {size} (model.tensor_parallel)")
        self._check(build.prepared_rows(effective, inputs, self._model, memory))
        settings = build.text_settings(effective, inputs, self._model, memory.kind)
        self._output.begin(settings, self.view.record, self._descriptor)
        self.job = build.prepare_job(
            effective,
            inputs,
            self._model,
            memory,
            self._on_fault,
            self._rows_to_run,
            self._interrupts.may_raise,
            self._seconds_left,
        )

    def _rows_to_run(self, rows: Iterator[ReadRow]) -> Iterator[ReadRow]:
        """Those that the output has no good record of. A pipe's are read in a thread, from which nothing may be shown."""
        read = rows if self._asked.inputs.are_live else told(self.view, "reading rows", rows)
        return self._output.remaining(read)

    def _check(self, rows: Iterator[PreparedRow | RowFault]) -> None:
        """Refuses what cannot run while the output is still as it was: with `--on-error fail` that is any bad row of a file."""
        if self._asked.options.on_error == "fail" and not self._asked.inputs.are_live:
            for row in told(self.view, "checking rows", rows):
                if isinstance(row, RowFault):
                    self._on_fault(row)

    def _on_fault(self, fault: RowFault) -> None:
        if self._asked.options.on_error == "fail":
            message = f"--on-error fail: {fault.placed_message}"
            raise EngineError(message) if self._is_executing else UsageError(message)
        self.recorder.fault(fault)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Entered for each wait on replicas: a signal raises within, and the time limit before, once there are rows to cancel."""
        if self._is_cancellable and self._is_out_of_time():
            raise OutOfTime
        with self._interrupts.may_raise():
            yield

    def load(self, build_executor: build.BuildExecutor) -> build.Executor | None:
        """The executor; None when there is nothing to run, or no time is left for it (there is work then)."""
        if not self.job.has_work:
            return None
        self._is_cancellable = True
        self.view.stage("loading the model")
        try:
            executor = build_executor(self.job)
        except OutOfTime:
            return None
        self.job = executor.job or self.job
        return executor

    def execute(self, executor: build.Executor) -> None:
        """All iterations, unless a signal or the time limit ends them."""
        self._is_executing = True
        job = self.job
        num_rows = job.rows.num_rows if job.rows.is_read else None
        self.view.start(RunHeader(tuple(build.header_lines(job, executor)), num_rows))
        if self._trace.is_wanted:
            unlike = {"rehearsable": False} if job.rows.is_live else {}
            self._trace.write(header_line(build.resolved_config(job), asdict(job.memory), num_rows, **unlike))
        engine = build.engine_of(job, executor, build.stop_rule(self._texts, executor), time.monotonic)
        try:
            for report in engine.run():
                self._take(report)
                self._interrupts.refuse()
                if self._is_out_of_time():
                    raise OutOfTime
        except OutOfTime:
            self.cancel_rest()
        self._is_cancellable = False

    def finish(self, executor: build.Executor | None) -> ExitStatus:
        """The summary, and the finished rows that are to be verified."""
        self._count_rows()
        self.view.finish(self._summary())
        if self._asked.options.verify and executor is not None:
            for line in verify(self._verified, executor, self._model.tokenizer.token_text):
                self.view.message(line)
        recorder = self.recorder
        return ExitStatus.ROW_ERRORS if recorder.num_bad or recorder.num_cancelled else ExitStatus.OK

    def _take(self, report: IterationReport) -> None:
        """Everything that follows from one iteration."""
        if self._trace.is_wanted:
            self._trace.write(iteration_line(report, self._name_of))
        rows = self.job.rows
        self._metrics.total_requests = rows.num_requests if rows.is_read else None
        request_metrics = self._metrics.observe(report)
        for request in report.finished:
            self._verified.offer(request)
        if self._wants_metrics:
            self._first_metrics.update({id.row: found for id, found in request_metrics.items() if id.sample == 0})
        for request in (*report.finished, *report.duplicates):
            done = rows.finish(request)
            if done is not None:
                self._record(done)
        self._count_rows()
        self.view.iteration(report)

    def _count_rows(self) -> None:
        rows, recorder = self.job.rows, self.recorder
        done = recorder.num_good + recorder.num_bad + recorder.num_cancelled
        self._metrics.rows = RowCounts(done, recorder.num_bad, rows.num_rows if rows.is_read else None)

    def _record(self, done: PreparedRow) -> None:
        """The record of a row whose last sample has ended; its metrics are its first sample's."""
        found = self._first_metrics.pop(done.row.index) if self._wants_metrics else None
        self.recorder.done(done, None if found is None else found.as_record())

    def _seconds_left(self) -> float | None:
        """Of the time that the user allows; None for any."""
        limit_s = self._asked.options.max_time_s
        return None if limit_s is None else self._began_s + limit_s - time.monotonic()

    def _is_out_of_time(self) -> bool:
        left_s = self._seconds_left()
        return left_s is not None and left_s <= 0

    def cancel_rest(self) -> None:
        """A cancelled record for every row that has none."""
        message = f"not finished within --max-time, {self._asked.options.max_time_s:g} s"
        for row in self.job.rows.unfinished():
            self.recorder.cancelled(row, message)
            self._interrupts.refuse()

    def _summary(self) -> RunSummary:
        name = self._asked.output.name
        recorder = self.recorder
        return RunSummary(
            self._metrics.snapshot(),
            rows_good=recorder.num_good,
            rows_bad=recorder.num_bad,
            rows_cancelled=recorder.num_cancelled,
            rows_kept=self._output.plan.num_kept,
            runaway_rows=recorder.num_runaway,
            output=None if name == "-" else name,
        )
