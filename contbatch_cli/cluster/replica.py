"""A replica: the engine of a single device, run a stretch at a time over the rows that it is sent.

What crosses the border between replicas and the process that dispatches is here: requests in, digests of iterations out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.divergence import Divergence
from contbatch_cli.core.job_order import JobQueue
from contbatch_cli.core.request import GREEDY, Finish, FinishReason, Request, RequestId, TokenLogprob
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.engine import Clock, InferenceEngine, IterationReport, Runner
from contbatch_cli.units import counted

FIELDS_PER_RUN = 7


class Outcome(NamedTuple):
    """What became of a request."""

    request_id: RequestId
    output_ids: list[int]
    finish: Finish
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int

    @classmethod
    def of(cls, request: Request) -> Outcome:
        assert request.finish is not None, f"{request.request_id} has not finished"
        return cls(
            request.request_id,
            request.output_ids,
            request.finish,
            request.logprobs,
            request.prompt_logprobs,
            request.num_cached_tokens,
            request.num_preemptions,
            request.num_recomputed_tokens,
        )

    def fill_in(self, request: Request) -> None:
        """Make an equal request, which did not run itself, the finished one."""
        request.token_ids = [*request.prompt_ids, *self.output_ids]
        request.finish = self.finish
        request.logprobs = self.logprobs
        request.prompt_logprobs = self.prompt_logprobs
        request.num_cached_tokens = self.num_cached_tokens
        request.num_preemptions = self.num_preemptions
        request.num_recomputed_tokens = self.num_recomputed_tokens


class IterationDigest(NamedTuple):
    """One iteration of a replica in little room. Times in seconds by the clock of whoever holds it.

    `runs` is a packed array of 64-bit integers, seven for each run: row, sample, start, length, 2 * samples + is_decode, drafts,
    accepted drafts.
    """

    runs: bytes
    num_tokens: int
    preempted: tuple[RequestId, ...]
    finished: tuple[Outcome, ...]
    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    token_budget: int
    start_s: float
    elapsed_s: float


def packed_runs(sequences: Sequence[ScheduledSequence], accepted: Mapping[RequestId, int]) -> bytes:
    fields = array("q")
    for one in sequences:
        fields.extend((*one.request_id, one.start, len(one.tokens), 2 * one.samples + one.is_decode))
        fields.extend((one.num_drafts, accepted.get(one.request_id, 0)))
    return fields.tobytes()


def outlined_batch(digest: IterationDigest) -> tuple[ScheduledBatch, dict[RequestId, int]]:
    """The batch of a digest as far as tables, traces and metrics ask, and the accepted drafts of those that had some.

    Its tokens and blocks are not those that were computed.
    """
    fields = array("q")
    fields.frombytes(digest.runs)
    runs = [fields[first : first + FIELDS_PER_RUN] for first in range(0, len(fields), FIELDS_PER_RUN)]
    sequences = tuple(_outlined(*run[:-1]) for run in runs)
    accepted = {one.request_id: run[-1] for one, run in zip(sequences, runs, strict=True) if one.num_drafts}
    num_drafts = sum(one.num_drafts for one in sequences)
    return ScheduledBatch(sequences, digest.num_tokens, digest.preempted, num_drafts=num_drafts), accepted


def _outlined(row: int, sample: int, start: int, length: int, flags: int, num_drafts: int) -> ScheduledSequence:
    num_prompt_tokens = start if flags & 1 else start + length
    samples = bool(flags & 2)
    logits = Logits.LAST if samples else Logits.NONE
    return ScheduledSequence(
        RequestId(row, sample), (0,) * length, start, (), num_prompt_tokens, GREEDY, samples, logits, num_drafts=num_drafts
    )


class Inbox:
    """The source of a replica's requests: those that it was sent. More may always come."""

    is_live = True
    is_exhausted = False

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, requests: Sequence[Request]) -> None:
        self._requests.extend(requests)

    def next_request(self, wait: bool) -> Request | None:
        """The next request; None when there is none now, however the caller would wait."""
        return self._requests.popleft() if self._requests else None


class Replica:
    """An engine that runs when it is told to. `forget` is told of rows that have ended.

    `first_divergence` runs a finished request again alone and says where it differs, if there is something that can.
    """

    def __init__(
        self,
        scheduler: StallFreeScheduler,
        runner: Runner,
        clock: Clock,
        forget: Callable[[RequestId], None] = lambda request_id: None,
        first_divergence: Callable[[Request], Divergence | None] | None = None,
    ) -> None:
        self.first_divergence = first_divergence
        self._scheduler = scheduler
        self._forget = forget
        self._clock = clock
        self._inbox = Inbox()
        queue = JobQueue(self._inbox, window=1, merges_duplicates=False)
        queue.set_order("input")
        self._engine = InferenceEngine(scheduler, runner, queue, clock)

    @property
    def seats(self) -> int:
        return self._scheduler.seats

    def step(self, requests: Sequence[Request], limit_s: float, is_more: bool) -> list[IterationDigest]:
        """Take the requests, run until `limit_s` seconds have passed or nothing is left, and tell what happened.

        With a seat free it returns sooner: after an iteration in which a row ended, and, when there `is_more` to be had, after
        one iteration.
        """
        self._inbox.put(requests)
        began_s = self._clock()
        digests = []
        for report in self._engine.run():
            digests.append(self._digest(report, began_s))
            for request in report.finished:
                self._forget(request.request_id)
            if self._clock() - began_s >= limit_s or (self._is_hungry and (is_more or report.finished)):
                break
        return digests

    @property
    def _is_hungry(self) -> bool:
        scheduler = self._scheduler
        return not self._inbox and len(scheduler.waiting) + len(scheduler.running) < scheduler.seats

    def _digest(self, report: IterationReport, began_s: float) -> IterationDigest:
        return IterationDigest(
            runs=packed_runs(report.batch.sequences, report.accepted_drafts),
            num_tokens=report.batch.num_tokens,
            preempted=report.batch.preempted,
            finished=tuple(Outcome.of(request) for request in report.finished),
            num_running=report.num_running,
            num_waiting=report.num_waiting + len(self._inbox),
            blocks_used=report.blocks_used,
            num_blocks=report.num_blocks,
            token_budget=report.token_budget,
            start_s=began_s + report.start_s,
            elapsed_s=report.elapsed_s,
        )


def lost_outcome(request: Request, attempts: int) -> Outcome:
    """The outcome of a row that no replica survived."""
    message = f"replica_lost: its replica was lost {counted(attempts, 'time')} while it ran (cluster.max_attempts)"
    return Outcome(request.request_id, [], Finish(FinishReason.ERROR, message=message), [], [], 0, 0, 0)
