"""The logits processors of a row, in a fixed order, on many rows at once.

Shapes: R rows that use some processor, V vocabulary. `logits` is [R, V] float32 and is changed in place; `rows` are the R
scheduled sequences, in the same order. Each processor touches only the rows that use it, and no row's result depends on
another row: edits are scattered element by element, and every reduction is along V.

The order of everything that a greedy row sees too (`EDITS`), as vLLM's:

    logit_bias            added (OpenAI)
    repetition_penalty    logit / p where positive, logit * p where negative, for tokens of prompt and output (transformers)
    frequency_penalty     minus p times the number of times the token is in the output (OpenAI: the prompt does not count)
    presence_penalty      minus p where the token is in the output at all
    bad_words             -inf for the token that would complete a banned sequence; prompt and output count (transformers)
    min_tokens            -inf for EOS and stop token ids while fewer than min_tokens are out

then the grammar's mask, and for rows with a temperature (`model/sampler.py`): temperature, min_p, top_k, top_p. transformers
has min_p after top_p, where top_p sees the tokens that min_p is to drop; the rest agrees, as masks commute with all else.
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


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """The named rows, in ascending order; `values` itself, not a copy, where these are all."""
    return values if len(rows) == values.shape[0] else values[torch.tensor(rows, device=values.device)]


def scale_by_temperature(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """(logits - the row's largest) / T in place: the largest becomes 0, and no T, however small, overflows.

    `best` [R] is where a row is largest; `temperature` [R], > 0.
    """
    return logits.sub_(logits.gather(1, best[:, None])).div_(temperature[:, None])


def min_p_filter(scores: Tensor, min_p: Sequence[float]) -> Tensor:
    """-inf, in place, where a probability is under min_p times the row's largest. `scores` [R, V] with maximum 0."""
    lowest = torch.tensor(min_p, dtype=torch.float64, device=scores.device).log().float()
    return scores.masked_fill_(scores < lowest[:, None], NEGATIVE_INFINITY)


def top_k_filter(scores: Tensor, top_k: Sequence[float]) -> Tensor:
    """-inf, in place, below the row's k-th largest score; what ties with it stays, as in transformers. Each k >= 1."""
    depths = [min(int(k), scores.shape[1]) for k in top_k]
    best = scores.topk(max(depths), dim=-1).values
    lowest = best.gather(1, torch.tensor(depths, device=scores.device)[:, None] - 1)
    return scores.masked_fill_(scores < lowest, NEGATIVE_INFINITY)


_WEIGHT_UNITS = 2.0**34
_DEPTHS = (128, 1024, 8192)


def top_p_filter(scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """-inf, in place, outside of the smallest set of most likely tokens that reaches p; of equals the lower id comes first.

    `scores` [R, V] with maximum 0. Probabilities are counted in whole units of 2**-34 of the largest, in float64: up to 2**19
    of them add up exactly, so sums are the same in any order, on any device, whoever the neighbours are.
    """
    total = _weights(scores).sum(-1)
    share = torch.tensor(top_p, dtype=torch.float64, device=scores.device)
    needed = (share * total).ceil().clamp(min=1.0).minimum(total)
    edge = torch.empty_like(scores[:, 0])
    pending = list(range(len(top_p)))
    for depth in (*(depth for depth in _DEPTHS if depth < scores.shape[1]), scores.shape[1]):
        index = torch.tensor(pending, device=scores.device)
        found, num_kept, is_tied, is_reached = _nucleus_edge(take_rows(scores, pending), needed[index], depth)
        edge[index] = found
        for place in (is_tied & is_reached).nonzero()[:, 0].tolist():
            _drop_last_ties(scores[pending[place]], found[place], int(num_kept[place]))
        pending = [i for i, done in zip(pending, is_reached.tolist(), strict=True) if not done]
        if not pending:
            break
    return scores.masked_fill_(scores < edge[:, None], NEGATIVE_INFINITY)


def _weights(scores: Tensor) -> Tensor:
    return scores.exp().double().mul_(_WEIGHT_UNITS).floor_()


def _nucleus_edge(scores: Tensor, needed: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From each row's `depth` best: the lowest score in its smallest set, the set's size, whether an equal score is left out,
    and whether `depth` was enough to tell. `scores` [R, V], `needed` [R] in units of weight, all results [R].
    """
    best = scores.topk(depth, dim=-1).values
    inside = (_weights(best).cumsum(-1) < needed[:, None]).sum(-1, keepdim=True)
    is_last = inside >= depth - 1
    edge = best.gather(1, inside.clamp(max=depth - 1))
    is_tied = (best.gather(1, (inside + 1).clamp(max=depth - 1)) == edge) & ~is_last
    is_reached = ~is_last | (depth == scores.shape[1])
    return edge[:, 0], inside[:, 0] + 1, is_tied[:, 0], is_reached[:, 0]


def _drop_last_ties(scores: Tensor, edge: Tensor, num_kept: int) -> None:
    """-inf for the highest ids that share the lowest kept score, so that `num_kept` stay. `scores` [V], changed in place."""
    tied = (scores == edge).nonzero()[:, 0]
    num_above = int((scores > edge).sum())
    scores[tied[num_kept - num_above :]] = NEGATIVE_INFINITY
