"""`generate --dry-run`: reads and tokenizes all rows, runs nothing, loads no weights, and reports what a run would meet.

Rows are looked at window by window, as a run would, and dropped: memory does not grow with the job.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import NamedTuple

from contbatch_cli import build
from contbatch_cli.cli.figures import bar, clock_time, duration, printable
from contbatch_cli.cli.live import View, told
from contbatch_cli.cli.rehearsal import cost_model, rehearsal_memory
from contbatch_cli.config_files import Effective
from contbatch_cli.core.job_order import Choice, duplicate_key, shared_fraction
from contbatch_cli.core.request import Request
from contbatch_cli.core.windowed_cache import window_span
from contbatch_cli.cost_model import CostModel, StepShape
from contbatch_cli.data.prepare import PreparedRow
from contbatch_cli.data.rows import ChatPrompt, Row, RowFault, TextPrompt
from contbatch_cli.errors import ExitStatus
from contbatch_cli.sizing import DeviceMemory, LayerWindows, Sizes
from contbatch_cli.units import counted

SHOWN_FAULTS = 3
BAR_CELLS = 30
TOO_BIG = ("prompt_too_long", "exceeds_kv_cache")


@dataclass(slots=True)
class PromptLengths:
    """Prompt lengths in buckets by powers of two: bucket k counts those from 2**k to 2**(k + 1) - 1."""

    buckets: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, num_tokens: int) -> None:
        self.buckets[num_tokens.bit_length() - 1] += 1
        self.lengths[num_tokens] += 1

    def percentile(self, percent: float) -> int:
        """The nearest-rank percentile; the lengths of a job are few enough to count each."""
        rank = max(1, -(-sum(self.lengths.values()) * percent // 100))
        for length in sorted(self.lengths):
            rank -= self.lengths[length]
            if rank <= 0:
                return length
        return 0


@dataclass(slots=True)
class Work:
    """What the engine would have to do, every request running to its `max_tokens`; duplicates left out."""

    num_requests: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    prefill_pairs: int = 0
    decode_context: int = 0
    longest_output: int = 0
    largest: list[int] = field(default_factory=list)
    """The most tokens that each of the largest requests can hold, as a heap."""

    def add(self, request: Request, num_kept: int) -> None:
        prompt, output = request.num_prompt_tokens, request.sampling.max_tokens
        self.num_requests += 1
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.prefill_pairs += prompt * (prompt + 1) // 2
        self.decode_context += output * prompt + output * output // 2
        self.longest_output = max(self.longest_output, output)
        push = heappush if len(self.largest) < num_kept else heappushpop
        push(self.largest, request.max_num_tokens)


class DryRun:
    """Takes in the rows of a job, one at a time, and knows at the end what a run would meet."""

    def __init__(self, effective: Effective, model: build.TextModel, memory: DeviceMemory) -> None:
        self._config = effective.config
        self._info = model.info
        self._memory = memory
        self._window: list[Request] = []
        self._keys: set[Hashable] = set()
        self.kinds: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.first_faults: dict[str, list[RowFault]] = {}
        self.lengths = PromptLengths()
        self.work = Work()
        self.duplicates = 0
        self.duplicate_tokens = 0
        self.sizes: Sizes | None = None
        self.order: Choice | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.kinds.values()) + sum(self.faults.values())

    def take(self, row: PreparedRow | RowFault) -> None:
        if isinstance(row, RowFault):
            self.faults[row.code] += 1
            shown = self.first_faults.setdefault(row.code, [])
            if len(shown) < SHOWN_FAULTS:
                shown.append(row)
            return
        self.kinds[kind_of(row.row)] += 1
        self.lengths.add(row.requests[0].num_prompt_tokens)
        for request in row.requests:
            self._take_request(request)

    def _take_request(self, request: Request) -> None:
        if len(self._window) >= self._config.scheduler.window:
            self._end_window(is_last=False)
        key = duplicate_key(request)
        if key in self._keys:
            self.duplicates += 1
            self.duplicate_tokens += request.num_prompt_tokens + request.sampling.max_tokens
            return
        self._keys.add(key)
        self._window.append(request)

    def end(self) -> None:
        """All rows were taken."""
        self._end_window(is_last=True)

    def _end_window(self, is_last: bool) -> None:
        if self.sizes is None:
            demand = build.job_demand(self._config, self._info, self._window, is_last)
            self.sizes = build.sizes_for(self._config, self._info, self._memory, demand)
            self.order = build.job_order(self._config, self._window, self.sizes)
        seats = min(self.sizes.max_batch_size, self.sizes.token_budget)
        for request in self._window:
            self.work.add(request, seats)
        if build.shares_prefixes(self._config, self._info):
            num_tokens = sum(request.num_prompt_tokens for request in self._window)
            self.work.shared_tokens += round(shared_fraction(self._window, self.sizes.block_size) * num_tokens)
        self._window = []
        self._keys.clear()


def kind_of(row: Row) -> str:
    if row.openai is not None:
        return f"OpenAI {row.openai.kind}"
    if isinstance(row.prompt, ChatPrompt):
        return "chat"
    return "text" if isinstance(row.prompt, TextPrompt) else "token ids"


def estimated_s(work: Work, sizes: Sizes, cost: CostModel) -> float:
    """Seconds of a run in which every step is the mean one: all seats decode, and the prompts are spread over the steps."""
    if not work.num_requests:
        return 0.0
    seats = min(sizes.max_batch_size, sizes.token_budget, work.num_requests)
    computed = max(work.prompt_tokens - work.shared_tokens, work.num_requests)
    steps = max(work.output_tokens / seats, (computed + work.output_tokens) / sizes.token_budget, work.longest_output, 1.0)
    pairs = work.prefill_pairs * computed / max(work.prompt_tokens, 1)
    mean = StepShape(
        num_tokens=round((computed + work.output_tokens) / steps),
        num_runs=round(work.output_tokens / steps),
        num_samples=round(work.output_tokens / steps),
        decode_context=round(work.decode_context / steps),
        prefill_pairs=round(pairs / steps),
    )
    return steps * cost.shape_s(mean)


class Pools(NamedTuple):
    """Bytes of a block of the cache, and of one of the pool beside it that layers with a window may have (0 without one)."""

    block_bytes: int
    window_block_bytes: int
    windows: LayerWindows | None


def print_dry_run(effective: Effective, inputs: build.Inputs, view: View) -> ExitStatus:
    """The report on standard output; the status tells whether some rows are bad. Raises UsageError."""
    model = build.open_model(effective.config.model, inputs.chat_template)
    memory = rehearsal_memory(effective.config, model)
    dry_run = DryRun(effective, model, memory)
    with closing(view):
        for row in told(view, "reading rows", build.prepared_rows(effective, inputs, model, memory)):
            dry_run.take(row)
    dry_run.end()
    assert dry_run.sizes is not None and dry_run.order is not None
    cost = cost_model(effective.config, model.info, memory.kind)
    pools = Pools(
        build.block_bytes(effective.config, model.info, memory),
        build.window_block_bytes(effective.config, model.info, memory),
        build.layer_windows(model.info),
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = report_lines(dry_run, dry_run.sizes, dry_run.order, cost, pools, "utf" not in encoding.lower())
    for line in lines:
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding))
    return ExitStatus.ROW_ERRORS if dry_run.faults else ExitStatus.OK


def report_lines(
    dry_run: DryRun, sizes: Sizes, order: Choice, cost: CostModel, pools: Pools, ascii_only: bool
) -> Iterator[str]:
    yield from _rows_lines(dry_run)
    yield from _prompt_lines(dry_run, ascii_only)
    yield from _saving_lines(dry_run)
    yield from _cache_lines(dry_run.work, sizes, pools)
    yield (
        f"schedule  budget {sizes.token_budget:,} ({sizes.reasons['scheduler.token_budget']}), "
        f"batch {sizes.max_batch_size:,} ({sizes.reasons['scheduler.max_batch_size']}), order {order.value} ({order.reason})"
    )
    seconds = estimated_s(dry_run.work, sizes, cost)
    yield f"time      at most {_time(seconds)}, every row running to its max_tokens; {cost.source}"


def _time(seconds: float) -> str:
    return clock_time(seconds) if seconds >= 120 else duration(seconds)


def _rows_lines(dry_run: DryRun) -> Iterator[str]:
    num_bad = sum(dry_run.faults.values())
    kinds = [f"{count:,} {kind}" for kind, count in dry_run.kinds.most_common()]
    yield f"rows      {dry_run.num_rows:,}: " + ", ".join([*kinds, f"{num_bad:,} bad"])
    for code, count in dry_run.faults.most_common():
        yield f"  {code}: {count:,}"
        for fault in dry_run.first_faults[code]:
            yield f"    {fault.placed_message}"
    if any(dry_run.faults[code] for code in TOO_BIG):
        num_too_big = sum(dry_run.faults[code] for code in TOO_BIG)
        yield f"too big   {counted(num_too_big, 'row')} beyond the context or the cache"


def _prompt_lines(dry_run: DryRun, ascii_only: bool) -> Iterator[str]:
    lengths = dry_run.lengths
    if not lengths.lengths:
        return
    total = sum(length * count for length, count in lengths.lengths.items())
    middle = f"median {lengths.percentile(50):,}, p99 {lengths.percentile(99):,}"
    yield f"prompts   {counted(total, 'token')}: least {min(lengths.lengths):,}, {middle}, most {max(lengths.lengths):,}"
    most = max(lengths.buckets.values())
    for bucket in range(min(lengths.buckets), max(lengths.buckets) + 1):
        bounds = f"{1 << bucket:,}" + (f" to {(2 << bucket) - 1:,}" if bucket else "")
        count = lengths.buckets[bucket]
        yield f"  {bounds:>18} {bar(count / most, BAR_CELLS, ascii_only)} {count:,}"
    work = dry_run.work
    yield f"outputs   at most {counted(work.output_tokens, 'token')} in {counted(work.num_requests, 'request')}"


def _saving_lines(dry_run: DryRun) -> Iterator[str]:
    work = dry_run.work
    shares = f"{work.shared_tokens:,} of {counted(work.prompt_tokens, 'prompt token')} in shared prefixes"
    saved = counted(dry_run.duplicate_tokens, "token")
    yield f"saved     {shares}; {counted(dry_run.duplicates, 'duplicate')} not to be run (at most {saved})"


def _cache_lines(work: Work, sizes: Sizes, pools: Pools) -> Iterator[str]:
    """What a full batch of the largest rows takes, and what the run will have: of each pool."""
    blocks = [-(-tokens // sizes.block_size) for tokens in work.largest]
    windows, block_bytes = pools.windows, pools.block_bytes
    inside = blocks
    if windows is not None:
        span = window_span(windows.window, sizes.token_budget, sizes.block_size)
        inside = [min(count, span) for count in blocks]
    held = inside if windows is not None and windows.are_all else blocks
    needed, largest = sum(held), max(held, default=0)
    yield (
        f"cache     {counted(needed, 'block')} of {sizes.block_size} ({_bytes(needed * block_bytes)}) for a batch of the largest rows, "
        f"{largest:,} for the largest; the run has {sizes.num_blocks:,} ({_bytes(sizes.num_blocks * block_bytes)}, "
        f"{sizes.reasons['cache.num_blocks']})"
    )

    if windows is not None and not windows.are_all:
        own, has = sum(inside), sizes.num_window_blocks
        yield (
            f"windows   {counted(own, 'block')} of {sizes.block_size} ({_bytes(own * pools.window_block_bytes)}) more for "
            f"{len(windows.layers)} of {counted(windows.num_layers, 'layer')} with a window of {windows.window:,}; "
            f"the run has {has:,} ({_bytes(has * pools.window_block_bytes)})"
        )


def _bytes(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
