"""Where a job's time goes: one run of the command, in this process, its parts timed from outside.

    python tests/benchmarks/phases.py ROWS.jsonl [--model DIR] [--threads N] [--set KEY=VALUE]... [--json]

Phases, each without what is timed within it:

    schedule           plans, stop rules, the bookkeeping of tokens and blocks; the queue with rows read ahead
    gather             a plan as flat lists, the lists as tensors, the attention's own plan
    matrix products    the decoder layers less their attention, and the LM head
    attention          estimated: a layer of six runs it once more by itself, on the same cache; that time counts nowhere
    rest of the model  embedding, rotary tables, the last norm, torch's own overhead
    sample             logits to tokens
    write              text, records, metrics, the view
    loop               what is left

On a CPU whose layers run as compiled kernels; elsewhere attention stands among the matrix products, in the rest of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
MODEL_PHASES = ("matrix products", "attention", "rest of the model")
PHASES = ("schedule", "gather", *MODEL_PHASES, "sample", "write", "loop")
LAYERS_FOR_ONE = 6
"""Of so many layers, one's attention is timed."""


class Stopwatch:
    """Seconds by phase; a phase within another is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inner: list[float] = [0.0]

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began_s = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                took_s = time.perf_counter() - began_s
                self.seconds[phase] += took_s - self._inner.pop()
                self._inner[-1] += took_s

        return wrapper

    def wrap(self, phase: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(phase, getattr(owner, name)))

    def exclude(self, function: Callable[[], float]) -> None:
        """Run something that belongs to no phase; it tells the seconds of attention that its findings stand for."""
        began_s = time.perf_counter()
        attention_s = function()
        self._inner[-1] += time.perf_counter() - began_s
        self.seconds["attention"] += attention_s
        self.seconds["matrix products"] -= attention_s


def attend_again(layer: Any) -> float:
    """The seconds that this layer's attention takes in the step under way, whose keys and values lie in the cache already."""
    import torch

    from contbatch_cli.model.attention import AttentionVariant, cpu_native, current_step

    step, shape = current_step(), layer._layer.shape
    plan, cache = step.plan_of(layer._index), step.cache.layers[layer._index]
    slots = torch.tensor(plan.flat.slot_mapping)
    keys, values = (part.flatten(0, 1)[slots] for part in (cache.keys, cache.values))
    query = torch.randn(len(slots), shape.heads, shape.key_size)
    variant = AttentionVariant(shape.scaling, shape.window or None, shape.softcap or None)
    began_s = time.perf_counter()
    cpu_native.attend(query, keys, values, cache, plan, variant)
    return time.perf_counter() - began_s


def watch_model(watch: Stopwatch, runner: Any) -> None:
    """Time a built model from its call inwards."""
    from contbatch_cli.model.native_layer import NativeDecoderLayer
    from contbatch_cli.model.packed_linear import NativeLinear

    watch.wrap("rest of the model", runner.model, "forward")
    watch.wrap("matrix products", NativeLinear, "forward")
    timed = watch.timed("matrix products", NativeDecoderLayer.forward)

    def forward(layer: Any, *arguments: Any, **named: Any) -> Any:
        output = timed(layer, *arguments, **named)
        if layer._index % LAYERS_FOR_ONE == 0:
            num_layers = len(runner.model.model.layers)
            stands_for = num_layers / -(-num_layers // LAYERS_FOR_ONE)
            watch.exclude(lambda: stands_for * attend_again(layer))
        return output

    NativeDecoderLayer.forward = forward  # type: ignore[method-assign]


def watch_command(watch: Stopwatch) -> None:
    """Time the command's parts; the run itself, from its first iteration on, is the loop."""
    from contbatch_cli import build
    from contbatch_cli.cli.batch_run import BatchRun
    from contbatch_cli.core.job_order import JobQueue
    from contbatch_cli.core.policies import POLICIES
    from contbatch_cli.core.scheduler import StallFreeScheduler
    from contbatch_cli.model import runner as runner_module
    from contbatch_cli.model.attention import cpu, cpu_native
    from contbatch_cli.model.sampler import Sampler

    watch.wrap("loop", BatchRun, "execute")
    watch.wrap("schedule", StallFreeScheduler, "schedule_next_batch", "update", "add_request")
    assert POLICIES["stall_free"] is StallFreeScheduler
    watch.wrap("schedule", JobQueue, "take", "finish")
    watch.wrap("write", BatchRun, "_take")
    watch.wrap("gather", runner_module, "flatten", "to_device")
    watch.wrap("gather", cpu_native, "prepare")
    watch.wrap("gather", cpu, "prepare")
    watch.wrap("sample", Sampler, "sample")
    build_executor = build.build_executor

    def built(job: build.Job) -> build.Executor:
        executor = build_executor(job)
        watch_model(watch, executor.runner.runner)  # type: ignore[union-attr]
        return executor

    build.build_executor = built


def measure(rows: str, model: str, settings: list[str]) -> dict[str, Any]:
    """Seconds by phase of one run, their sum, and its tokens."""
    from contbatch_cli.cli.app import main as contbatch

    watch = Stopwatch()
    watch_command(watch)
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out.jsonl"
        chosen = [part for setting in ("model.device=cpu", *settings) for part in ("--set", setting)]
        status: object = 0
        try:
            contbatch(["generate", rows, "-m", model, "-o", str(output), "-q", *chosen])
        except SystemExit as end:
            status = end.code
        assert not status, f"the run ended with status {status}"
        usages = [json.loads(line)["usage"] for line in output.read_text(encoding="utf-8").splitlines()]
    return {
        "seconds": watch.seconds,
        "total_s": sum(watch.seconds.values()),
        "rows": len(usages),
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "output_tokens": sum(usage["completion_tokens"] for usage in usages),
    }


def report_lines(found: dict[str, Any]) -> list[str]:
    total_s, seconds = found["total_s"], found["seconds"]
    outside_s = sum(seconds[phase] for phase in PHASES if phase not in MODEL_PHASES)
    return [
        f"{found['rows']} rows, {found['prompt_tokens']:,} prompt and {found['output_tokens']:,} output tokens",
        "| phase | s | share |",
        "|---|---|---|",
        *(f"| {phase} | {seconds[phase]:.3f} | {seconds[phase] / total_s:.2%} |" for phase in PHASES),
        f"| all | {total_s:.3f} | |",
        f"| all but the model | {outside_s:.3f} | {outside_s / total_s:.2%} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]  # its files would hide packages
    answers = os.fdopen(os.dup(1), "w")  # the command claims standard output
    import torch

    torch.set_num_threads(asked.threads)
    found = measure(asked.rows, asked.model, asked.set)
    print(json.dumps(found) if asked.json else "\n".join(report_lines(found)), file=answers, flush=True)


if __name__ == "__main__":
    main()
