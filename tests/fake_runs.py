"""Made-up runs for the views' tests: a plain continuous batcher over plain integers, and the reports it would give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.request import GREEDY, Finish, FinishReason, Request, RequestId
from contbatch_cli.engine import IterationReport


@dataclass
class FakeJob:
    """Prompts and output lengths by row; `preempt_every` throws the youngest running request out every so many iterations."""

    prompts: list[int]
    outputs: list[int]
    token_budget: int = 32
    seats: int = 4
    block_size: int = 4
    num_blocks: int = 256
    preempt_every: int = 0
    step_s: float = 0.03
    error_every: int = 0

    @classmethod
    def drawn(cls, seed: int, rows: int, **settings: Any) -> FakeJob:
        rng = random.Random(seed)
        return replace(
            cls([rng.randint(1, 60) for _ in range(rows)], [rng.randint(1, 30) for _ in range(rows)]),
            **settings,
        )


def reports(job: FakeJob) -> Iterator[IterationReport]:
    """The iterations of a job, each request's tokens being its position numbers."""
    waiting = [
        Request.from_prompt(RequestId(index), list(range(prompt)), replace(GREEDY, max_tokens=output))
        for index, (prompt, output) in enumerate(zip(job.prompts, job.outputs, strict=True))
    ]
    running: list[Request] = []
    now = 0.0
    iteration = 0
    while waiting or running:
        preempted = _preempt(job, iteration, waiting, running)
        while waiting and len(running) < job.seats and all(r.is_prefill_done for r in running):
            running.append(waiting.pop(0))
        sequences = _plan(job, running)
        elapsed = job.step_s * (1 + sum(len(s.tokens) for s in sequences) / 100)
        finished = _advance(job, running, sequences)
        num_tokens = sum(len(s.tokens) for s in sequences)
        batch = ScheduledBatch(tuple(sequences), num_tokens, preempted)
        used = sum(-(-r.num_computed_tokens // job.block_size) for r in running)
        yield IterationReport(
            iteration, batch, finished, (), len(running), len(waiting), used, job.num_blocks, job.token_budget, now, elapsed
        )
        running = [request for request in running if not request.is_complete]
        now += elapsed
        iteration += 1


def _preempt(job: FakeJob, iteration: int, waiting: list[Request], running: list[Request]) -> tuple[RequestId, ...]:
    if not job.preempt_every or iteration % job.preempt_every != job.preempt_every - 1 or len(running) < 2:
        return ()
    victim = running.pop()
    victim.num_preemptions += 1
    victim.num_computed_tokens = 0
    waiting.insert(0, victim)
    return (victim.request_id,)


def _plan(job: FakeJob, running: list[Request]) -> list[ScheduledSequence]:
    left = job.token_budget
    sequences = []
    for request in running:
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + left)
        if end == start:
            break
        left -= end - start
        samples = end == request.num_tokens
        sequences.append(
            ScheduledSequence(
                request.request_id,
                tuple(request.token_ids[start:end]),
                start,
                tuple(range(-(-end // job.block_size))),
                request.num_prompt_tokens,
                request.sampling,
                samples,
                Logits.LAST if samples else Logits.NONE,
            )
        )
    return sequences


def _advance(job: FakeJob, running: list[Request], sequences: list[ScheduledSequence]) -> tuple[Request, ...]:
    by_id = {request.request_id: request for request in running}
    finished = []
    for sequence in sequences:
        request = by_id[sequence.request_id]
        request.num_computed_tokens = sequence.end
        if not sequence.samples:
            continue
        if job.error_every and request.request_id.row % job.error_every == job.error_every - 1:
            request.finish = Finish(FinishReason.ERROR, message="non-finite logits")
        else:
            request.token_ids.append(request.num_tokens)
            if request.num_output_tokens >= request.sampling.max_tokens:
                request.finish = Finish(FinishReason.LENGTH)
        if request.is_complete:
            finished.append(request)
    return tuple(finished)
