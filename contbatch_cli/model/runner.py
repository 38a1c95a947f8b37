"""The model as a runner: a plan in, sampled tokens out, by one flattened forward pass without padding.

Shape legend: T tokens of the step, L logit rows, S sampled rows, V vocabulary.

    plan -> flatten -> [1, T] ids and positions -> model -> logits [1, L, V] -> rows that sample [S, V] -> sampler -> results
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch

from contbatch_cli.core.batch import BatchResult, Logits, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import accepted, sampled_runs
from contbatch_cli.core.gather import FlatBatch, flatten, flatten_windows
from contbatch_cli.core.request import RequestId
from contbatch_cli.errors import RowError
from contbatch_cli.model.attention import AttentionBackend, CachedStep, attending
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.lora import Adapters, adapting
from contbatch_cli.model.sampler import prompt_logprobs
from contbatch_cli.model.staging import to_device


class LogitsSampler(Protocol):
    """Turns logits into results."""

    def sample(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> Sequence[SequenceResult]:
        """One result for each row of the float32 logits [S, V], which may be changed; `sequences[i]` is row i's run."""
        ...

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """These requests are done: what is cached for them may go."""
        ...


class ModelRunner:
    """Executes plans with a model built with our attention name; `backend` does the attention over `cache`.

    Holds nothing that a plan cannot rebuild. `num_forward_passes` and `num_forward_tokens` count what was run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        backend: AttentionBackend,
        sampler: LogitsSampler,
        device: torch.device,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.sampler = sampler
        self.device = device
        self.adapters = adapters
        self.num_forward_passes = 0
        self.num_forward_tokens = 0

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Run the plan. Results stand in the plan's order; a run that does not sample has an empty one."""
        self.sampler.forget(batch.released)
        flat = flatten(batch, self.cache.block_size)
        logits = self._forward(batch, flat)
        results = [SequenceResult()] * flat.num_sequences
        if flat.sampling:
            sampling = [batch.sequences[i] for i in flat.sampling]
            runs = sampling if not batch.num_drafts else [run for sequence in sampling for run in sampled_runs(sequence)]
            sampled = iter(self.sampler.sample(_rows(logits, flat), runs))
            for i, sequence in zip(flat.sampling, sampling, strict=True):
                results[i] = next(sampled) if not sequence.num_drafts else _accepted(sequence, sampled)
        if len(flat.logit_rows) > len(flat.sample_rows):
            self._add_prompt_logprobs(batch.sequences, flat, logits, results)
        return BatchResult(results)

    def _forward(self, batch: ScheduledBatch, flat: FlatBatch) -> torch.Tensor:
        """The logits [L, V] of the step's logit rows."""
        ids, positions, rows = to_device([flat.input_ids, flat.position_ids, flat.logit_rows], torch.int64, self.device)
        plan = self.backend.prepare(flat, self.device)
        own = self.backend.prepare(flatten_windows(batch, flat), self.device) if self.cache.window_layers else None
        step = CachedStep(self.cache, self.backend, plan, own)
        changes = self.adapters.plan(batch.sequences, flat, self.device) if self.adapters is not None else None
        with attending(step), adapting(changes):
            output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        self.num_forward_passes += 1
        self.num_forward_tokens += flat.num_tokens
        logits: torch.Tensor = output.logits[0]
        return logits

    def _add_prompt_logprobs(
        self, sequences: Sequence[ScheduledSequence], flat: FlatBatch, logits: torch.Tensor, results: list[SequenceResult]
    ) -> None:
        """Fill in the log-probabilities of the prompt tokens that follow a position of a run with all its logits."""
        for i, sequence in enumerate(sequences):
            next_ids = _next_prompt_ids(sequence)
            if next_ids:
                rows = logits[flat.logit_starts[i] :][: len(next_ids)]
                try:
                    found = prompt_logprobs(rows, next_ids, sequence.sampling.prompt_logprobs or 0, sequence.start)
                except RowError as error:
                    results[i] = SequenceResult(error=f"{error.code}: {error.message}")
                else:
                    results[i] = results[i]._replace(prompt_logprobs=found)


def _accepted(sequence: ScheduledSequence, sampled: Iterator[SequenceResult]) -> SequenceResult:
    """The result of a run with drafts; takes what was sampled for it."""
    return accepted(sequence, list(islice(sampled, 1 + sequence.num_drafts)))


def _rows(logits: torch.Tensor, flat: FlatBatch) -> torch.Tensor:
    """The float32 rows [S, V] that sample."""
    if len(flat.sample_rows) < len(flat.logit_rows):
        logits = logits[torch.tensor(flat.sample_rows, dtype=torch.int64, device=logits.device)]
    return logits.float()


def _next_prompt_ids(sequence: ScheduledSequence) -> tuple[int, ...]:
    """The prompt tokens whose log-probabilities the run gives, from its first position on."""
    if sequence.logits is not Logits.ALL or sequence.sampling.prompt_logprobs is None:
        return ()
    following = sequence.tokens[1:] if sequence.next_token is None else (*sequence.tokens[1:], sequence.next_token)
    return following[: max(0, sequence.num_prompt_tokens - 1 - sequence.start)]
