"""`--verify`: a finished row is run again alone, and the first place where its tokens differ is found.

Alone means batch size 1, no prefix cache, the reference attention and transformers' own layers; with weights of 8 bits, the run's own
kernels. Both runs have the same tokens up to the first difference, so the
logits of the lone run there are those that the row would have had, and the gap between the two candidates says whether the batch
only rounded differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from contbatch_cli.core.batch import ScheduledSequence, SequenceResult
from contbatch_cli.core.divergence import Divergence
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.noise import gumbel
from contbatch_cli.core.request import Request, RequestId
from contbatch_cli.core.scheduler import StallFreeScheduler
from contbatch_cli.model.attention import AttentionBackend, backend_named
from contbatch_cli.model.kv_cache import KVCache
from contbatch_cli.model.loading import LoadedModel
from contbatch_cli.model.runner import ModelRunner
from contbatch_cli.model.sampler import Sampler, TokenMasks

BLOCK_SIZE = 64


class RecordingSampler:
    """A sampler that keeps the logits of its last call as they came from the model."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> list[SequenceResult]:
        self.logits = logits[0].clone()
        return self._sampler.sample(logits, sequences)

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        self._sampler.forget(request_ids)


class LoneRunner:
    """Runs finished requests again, one at a time, with the layers of the model that `load` gives and the attention `backend`.

    It is loaded for the first request. `masks` hold rows to their grammars, as in the run.
    """

    def __init__(
        self, load: Callable[[], LoadedModel], masks: TokenMasks | None, backend: AttentionBackend | None = None
    ) -> None:
        self._load = functools.cache(load)
        self._masks = masks
        self._backend = backend or backend_named("reference")

    def first_divergence(self, finished: Request) -> Divergence | None:
        """None when the row has the same tokens alone."""
        loaded = self._load()
        sampler = RecordingSampler(Sampler(loaded.vocab_size, loaded.device, self._masks))
        num_blocks = -(-finished.num_tokens // BLOCK_SIZE)
        cache = KVCache(loaded.layers, num_blocks, BLOCK_SIZE, loaded.dtype, loaded.device)
        runner = ModelRunner(loaded.model, cache, self._backend, sampler, loaded.device, loaded.adapters)
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_caching=False)
        scheduler = StallFreeScheduler(kv, finished.num_tokens, 1, lambda request: None)
        sampling = replace(finished.sampling, max_tokens=finished.num_output_tokens)
        alone = Request.from_prompt(finished.request_id, finished.prompt_ids, sampling, finished.adapter)
        scheduler.add_request(alone)
        for position, token_id in enumerate(finished.output_ids):
            batch = scheduler.schedule_next_batch()
            scheduler.update(batch, runner.execute(batch))
            if alone.token_ids[-1] != token_id:
                return _divergence(alone, position, token_id, sampler.logits)
        return None


def _divergence(alone: Request, position: int, token_id: int, logits: torch.Tensor) -> Divergence:
    """At the last token of `alone`, whose logits [V] they are."""
    place = alone.num_prompt_tokens + position
    other = alone.token_ids[-1]
    scores = [_score(alone, place, one, float(logits[one])) for one in (token_id, other)]
    return Divergence(position, token_id, other, *scores)


def _score(request: Request, place: int, token_id: int, logit: float) -> float:
    sampling = request.sampling
    if sampling.temperature == 0.0:
        return logit
    return logit / sampling.temperature + gumbel(sampling.seed, request.request_id.sample, place, token_id)
