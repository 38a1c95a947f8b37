"""The logits processors of a row, in a fixed order, on many rows at once.

Shapes: R rows that use some processor, V vocabulary. `logits` is [R, V] float32 and is changed in place; `rows` are the R
scheduled sequences, in the same order. Each processor touches only the rows that use it, and no row's result depends on
another row: edits are scattered element by element, and every reduction is along V.

The order, as vLLM's, of everything that a greedy row sees too (`EDITS`):

    logit_bias            added (OpenAI)
    repetition_penalty    logit / p where positive, logit * p where negative, for tokens of prompt and output (transformers, CTRL)
    frequency_penalty     minus p times the number of times the token is in the output (OpenAI: the prompt does not count)
    presence_penalty      minus p where the token is in the output at all
    bad_words             -inf for the token that would complete a banned sequence; prompt and output count (transformers)
    min_tokens            -inf for EOS and stop token ids while fewer than min_tokens are out

then the grammar's mask, and for rows with a temperature (`model/sampler.py`): temperature, min_p, top_k, top_p. transformers has
the same steps, with min_p after top_p and the bias and penalties in other places; the masks commute with all the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from contbatch_cli.core.batch import ScheduledSequence
from contbatch_cli.core.request import SamplingParams

LogitsProcessor = Callable[[Tensor, Sequence[ScheduledSequence]], None]

NEGATIVE_INFINITY = float("-inf")


def num_output_tokens(row: ScheduledSequence) -> int:
    """How many tokens are out before the one to be sampled; its position is the run's end."""
    return row.end - row.num_prompt_tokens


def has_edits(row: ScheduledSequence) -> bool:
    """Whether any processor, grammar included, may change this row's logits in this iteration."""
    sampling = row.sampling
    return (
        sampling.needs_history
        or bool(sampling.logit_bias)
        or (sampling.min_tokens > 0 and num_output_tokens(row) < sampling.min_tokens)
    )


def out_of_vocabulary(sampling: SamplingParams, vocab_size: int) -> str | None:
    """The message of a parameter that names a token id which the model has no logit for; None when all are inside."""
    named = {
        "logit_bias": (token for token, _ in sampling.logit_bias),
        "bad_words": (token for word in sampling.bad_words for token in word),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{name}: token id {token} is outside of the model's vocabulary of {vocab_size}"
    return None


class _Cells:
    """Places in [R, V] with a value each, collected in Python and moved to the device at once. No place occurs twice."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, columns: Sequence[int], values: Sequence[float]) -> None:
        self.rows += [row] * len(columns)
        self.columns += columns
        self.values += values

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        both = torch.tensor([self.rows, self.columns], dtype=torch.int64).to(device, non_blocking=True)
        return both[0], both[1]

    def value(self, device: torch.device) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float32).to(device, non_blocking=True)


def add_logit_bias(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """Adds each row's bias; several entries for one token add up."""
    cells = _Cells()
    for i, row in enumerate(rows):
        if row.sampling.logit_bias:
            total: dict[int, float] = {}
            for token, bias in row.sampling.logit_bias:
                total[token] = total.get(token, 0.0) + bias
            cells.add(i, list(total), list(total.values()))
    if cells.rows:
        index = cells.index(logits.device)
        logits[index] += cells.value(logits.device)


def apply_repetition_penalty(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """Makes the tokens of prompt and output less likely (p > 1) or more (p < 1), as transformers does."""
    cells = _Cells()
    for i, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            seen = list(set(_history(row)))
            cells.add(i, seen, [row.sampling.repetition_penalty] * len(seen))
    if cells.rows:
        index, penalty = cells.index(logits.device), cells.value(logits.device)
        score = logits[index]
        logits[index] = torch.where(score < 0, score * penalty, score / penalty)


def subtract_count_penalties(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """The frequency penalty and then the presence penalty, over output tokens only."""
    cells, presence = _Cells(), list[float]()
    for i, row in enumerate(rows):
        sampling = row.sampling
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            counts = Counter(_history(row)[row.num_prompt_tokens :])
            cells.add(i, list(counts), [sampling.frequency_penalty * count for count in counts.values()])
            presence += [sampling.presence_penalty] * len(counts)
    if cells.rows:
        index = cells.index(logits.device)
        penalty = torch.tensor(presence, dtype=torch.float32).to(logits.device, non_blocking=True)
        logits[index] = logits[index] - cells.value(logits.device) - penalty


def mask_bad_words(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """Bans each token that would complete one of the row's banned sequences, as transformers' NoBadWords does."""
    _mask(logits, ((i, _completions(row)) for i, row in enumerate(rows) if row.sampling.bad_words))


def mask_early_stops(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """Bans what would end the row while fewer than min_tokens are out: stop token ids, and EOS unless it is ignored anyway."""
    _mask(logits, ((i, _early_stops(row, logits.shape[1])) for i, row in enumerate(rows) if row.sampling.min_tokens))


EDITS: tuple[LogitsProcessor, ...] = (
    add_logit_bias,
    apply_repetition_penalty,
    subtract_count_penalties,
    mask_bad_words,
    mask_early_stops,
)


def _history(row: ScheduledSequence) -> tuple[int, ...]:
    assert row.history is not None and len(row.history) == row.end, f"{row.request_id}: the plan lacks the row's history"
    return row.history


def _completions(row: ScheduledSequence) -> set[int]:
    history = _history(row)
    return {word[-1] for word in row.sampling.bad_words if len(word) == 1 or history[1 - len(word) :] == word[:-1]}


def _early_stops(row: ScheduledSequence, vocab_size: int) -> set[int]:
    sampling = row.sampling
    if num_output_tokens(row) >= sampling.min_tokens:
        return set()
    ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
    return {token for token in ending if 0 <= token < vocab_size}


def _mask(logits: Tensor, banned: Iterator[tuple[int, set[int]]]) -> None:
    cells = _Cells()
    for i, tokens in banned:
        cells.add(i, list(tokens), ())
    if cells.rows:
        logits[cells.index(logits.device)] = NEGATIVE_INFINITY


def scale_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - the row's largest) / T, so that the largest is 0 and no T, however small, overflows. `temperature` is [R], > 0."""
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def min_p_filter(scores: Tensor, min_p: Tensor) -> Tensor:
    """-inf where a token's probability is under min_p times the most likely one's. `scores` [R, V] with maximum 0; `min_p` [R]."""
    return scores.masked_fill(scores < min_p.double().log().float()[:, None], NEGATIVE_INFINITY)


def top_k_filter(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    """-inf below the row's k-th largest score; what ties with it stays, as in transformers. `top_k` has R entries, each >= 1."""
    vocab_size = scores.shape[1]
    depth = torch.tensor([min(k, vocab_size) - 1 for k in top_k]).to(scores.device)
    best = scores.topk(min(max(top_k), vocab_size), dim=-1).values
    return scores.masked_fill(scores < best.gather(1, depth[:, None]), NEGATIVE_INFINITY)


_TOP_P_UNIT = 2.0**40


def top_p_filter(scores: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside of the smallest set of most likely tokens that reaches probability p; of equal tokens the lower id comes first.

    `scores` [R, V] with maximum 0; `top_p` [R]. Probabilities are counted in whole units of 2**-40 of the largest, so that sums
    are exact: the same in any order, on any device, whoever the neighbours are. Only tokens that can be in the set are sorted:
    if V tokens of this one's weight together fit into what p leaves over, this one is outside.
    """
    weights = (scores.exp().double() * _TOP_P_UNIT).long()
    total = weights.sum(-1)
    needed = (top_p.double() * total.double()).ceil().long().clamp(min=1).minimum(total)
    possible = weights > ((total - needed) // scores.shape[1])[:, None]
    rows, columns = possible.nonzero(as_tuple=True)
    counts = possible.sum(-1)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    ranked_scores = scores.new_full((scores.shape[0], int(counts.max())), NEGATIVE_INFINITY)
    ranked_scores[rows, place] = scores[rows, columns]
    packed = torch.zeros_like(ranked_scores, dtype=torch.int64)
    packed[rows, place] = weights[rows, columns]
    order = ranked_scores.sort(dim=-1, descending=True, stable=True).indices
    ranked = packed.gather(1, order)
    kept = torch.zeros_like(packed, dtype=torch.bool).scatter_(1, order, ranked.cumsum(-1) - ranked < needed[:, None])
    kept &= packed > 0
    chosen = kept[rows, place]
    filtered = torch.full_like(scores, NEGATIVE_INFINITY)
    filtered[rows[chosen], columns[chosen]] = scores[rows[chosen], columns[chosen]]
    return filtered
