"""Logits to tokens: an ordered list of logits processors, then argmax of logit / T + keyed Gumbel noise.

Shapes: S sampled rows, R of them that need more than an argmax, V vocabulary, C candidates. Logits are [S, V] float32.

A row's token depends on its logits, settings, history and (seed, sample, position) alone, bit for bit: every reduction is
along V, sums that decide a token are exact integers, and the noise is a hash (`core/noise.py`). So which rows share the batch,
and the pieces in which the rows are worked through, cannot be seen. Ties go to the lowest token id.

Log-probabilities are those of the model's raw logits, before processors and temperature (as OpenAI's and vLLM's default), in
float32. A token that the model itself rules out has -9999.0, as JSON has no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contbatch_cli.core.batch import ScheduledSequence, SequenceResult
from contbatch_cli.core.noise import MASK32, ROUND_MULTIPLIERS, ROUND_SHIFTS, stream_key, token_word
from contbatch_cli.core.request import RequestId, TokenLogprob
from contbatch_cli.errors import RowError
from contbatch_cli.model.logits_processors import (
    EDITS,
    has_edits,
    min_p_filter,
    num_output_tokens,
    out_of_vocabulary,
    scale_by_temperature,
    take_rows,
    top_k_filter,
    top_p_filter,
)

RowFilter = Callable[[Tensor, Sequence[float]], Tensor]

LOWEST_LOGPROB = -9999.0
NEAR = 8.0
"""Scores this close under the row's best are candidates whatever their noise; lower ones only with noise enough."""
ROWS_AT_ONCE_CPU = 8
"""Rows worked on together on a CPU: their [R, V] temporaries stay in its caches. Elsewhere all rows are worked on at once."""
LOGPROB_ROWS_AT_ONCE = 64


class TokenMasks(Protocol):
    """What the sampler needs of a grammar: `model/grammar.py` has one."""

    def prepare(self, rows: Sequence[ScheduledSequence]) -> None:
        """Computes the masks of all rows of the batch. Called before the logits are waited for."""
        ...

    def apply(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> dict[int, str]:
        """Sets what a row's grammar forbids to -inf in `logits` [R, V]; rows without a grammar stay. Returns errors by row."""
        ...

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Drops what is cached for requests that are done."""
        ...


class Sampler:
    """Samples one token for each row of a batch. Stateless but for constants; `masks` holds what can be rebuilt from a plan."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", masks: TokenMasks | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.masks = masks
        self.token_words = _signed([token_word(token) for token in range(vocab_size)]).to(self.device)

    def sample(self, logits: Tensor, sequences: Sequence[ScheduledSequence]) -> list[SequenceResult]:
        """One result for each of the sampling sequences, whose logits are the rows of `logits` [S, V] float32, in order.

        `logits` is only read. A row whose logits have NaN or +inf anywhere, or -inf everywhere, gets an error, and so does one
        whose own settings leave no token, or name ids outside of the vocabulary; the others go on.
        """
        if not sequences:
            return []
        if self.masks is not None:
            self.masks.prepare(sequences)
        best = _largest(logits)
        largest, token_ids = _to_lists(best.values, best.indices)
        errors = {
            i: f"non_finite_logits: position {sequences[i].end}: the largest logit is {value}"
            for i, value in enumerate(largest)
            if not math.isfinite(value)
        }
        for chosen in self._special_rows(sequences, errors):
            index = torch.tensor(chosen, device=logits.device)
            tokens, failed = self._sample_rows(logits[index], best.indices[index], [sequences[i] for i in chosen])
            for i, token in zip(chosen, tokens, strict=True):
                token_ids[i] = token
            errors.update((chosen[place], message) for place, message in failed.items())
        logprobs = self._logprobs(logits, sequences, token_ids, errors)
        return [
            SequenceResult(error=errors[i]) if i in errors else SequenceResult((token,), logprobs.get(i, ()))
            for i, token in enumerate(token_ids)
        ]

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Drops what the masks have cached for requests that are done."""
        if self.masks is not None:
            self.masks.forget(request_ids)

    def _special_rows(self, sequences: Sequence[ScheduledSequence], errors: dict[int, str]) -> list[list[int]]:
        """The rows that need more than an argmax, in pieces to work through together; refused ones are added to `errors`."""
        groups: dict[bool, list[int]] = {True: [], False: []}
        for i, row in enumerate(sequences):
            if (row.sampling.temperature == 0.0 and not has_edits(row)) or i in errors:
                continue
            if (message := self._refusal(row)) is None:
                groups[_is_filtered(row)].append(i)
            else:
                errors[i] = message
        size = ROWS_AT_ONCE_CPU if self.device.type == "cpu" else len(sequences)
        return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]

    def _refusal(self, row: ScheduledSequence) -> str | None:
        """Why the row's settings cannot be honoured; asked before its first token, as settings never change."""
        if num_output_tokens(row) > 0:
            return None
        if row.sampling.response_format is not None and self.masks is None:
            return "invalid_parameter: response_format: this run has no grammar support"
        message = out_of_vocabulary(row.sampling, self.vocab_size)
        return None if message is None else f"invalid_parameter: {message}"

    def _sample_rows(self, logits: Tensor, best: Tensor, rows: Sequence[ScheduledSequence]) -> tuple[list[int], dict[int, str]]:
        """Tokens, and errors by place. `logits` [R, V], each row largest and finite at `best` [R], may be changed."""
        errors: dict[int, str] = {}
        if any(has_edits(row) for row in rows):
            for edit in EDITS:
                edit(logits, rows)
            if self.masks is not None:
                errors = self.masks.apply(logits, rows)
            largest, best = _largest(logits)
            for i, value in enumerate(largest.tolist()):
                if not math.isfinite(value):
                    message = f"invalid_parameter: the row's settings leave no token at position {rows[i].end} (best: {value})"
                    errors.setdefault(i, message)
        token_ids: list[int] = best.tolist()
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0 and i not in errors]
        if drawn:
            tokens = self._draw(take_rows(logits, drawn), take_rows(best, drawn), [rows[i] for i in drawn])
            for i, token in zip(drawn, tokens, strict=True):
                token_ids[i] = token
        return token_ids, errors

    def _draw(self, logits: Tensor, best: Tensor, rows: Sequence[ScheduledSequence]) -> list[int]:
        """Scores by temperature and filters, then the argmax of score + Gumbel noise. `logits` [R, V], largest at `best`."""
        temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32, device=self.device)
        scores = _filter(scale_by_temperature(logits, best, temperature), rows)
        keys = [stream_key(row.sampling.seed, row.request_id.sample, row.end) for row in rows]
        high = _signed([key >> 32 for key in keys]).to(self.device)
        low = _signed([key & MASK32 for key in keys]).to(self.device)
        only_filtered = all(_is_filtered(row) for row in rows)
        possible = scores > float("-inf") if only_filtered else self._can_win(scores, best, high, low)
        owners, columns = possible.nonzero(as_tuple=True)
        noise = gumbel(self.token_words[columns], high[owners], low[owners])
        perturbed = scores[owners, columns].double() + noise
        return _argmax_by_owner(perturbed, owners, columns, len(rows), self.vocab_size).tolist()

    def _can_win(self, scores: Tensor, best: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """Which tokens [R, V] may have the largest score + noise: never leaves out one that has.

        The best token has score 0 and noise g. One with a score under -NEAR needs noise above NEAR + g, which few have; the
        upper 16 bits of its hash tell, and they are known before the last step of the hash. So all V tokens cost a few
        integer operations, and only the candidates a full hash and two logarithms.
        """
        needed = NEAR - 1e-3 + gumbel(self.token_words[best], high, low)
        limit = ((-(-needed).exp()).exp() * 2.0**16).floor().clamp(0, 2**16 - 1) * 2.0**16 - 2.0**31
        word = self.token_words[None, :] ^ high[:, None]
        word.mul_(_as_int32(ROUND_MULTIPLIERS[0]))
        word.bitwise_xor_(_logical_shift_right(word, ROUND_SHIFTS[0]))
        # The flipped top bit passes through the odd multiplier unchanged, and lets a signed comparison order unsigned words.
        word.bitwise_xor_((low ^ _as_int32(1 << 31))[:, None]).mul_(_as_int32(ROUND_MULTIPLIERS[1]))
        return (word >= limit.to(torch.int32)[:, None]).logical_or_(scores >= -NEAR)

    def _logprobs(
        self, logits: Tensor, sequences: Sequence[ScheduledSequence], token_ids: list[int], errors: dict[int, str]
    ) -> dict[int, tuple[TokenLogprob]]:
        """By row, for the rows that asked and have a token."""
        asked = [i for i, row in enumerate(sequences) if row.sampling.logprobs is not None and i not in errors]
        size = ROWS_AT_ONCE_CPU if self.device.type == "cpu" else LOGPROB_ROWS_AT_ONCE
        found: dict[int, tuple[TokenLogprob]] = {}
        for start in range(0, len(asked), size):
            piece = asked[start : start + size]
            num_top = [sequences[i].sampling.logprobs or 0 for i in piece]
            values = token_logprobs(take_rows(logits, piece), [token_ids[i] for i in piece], num_top)
            found.update((i, (value,)) for i, value in zip(piece, values, strict=True))
        return found


class _Largest(NamedTuple):
    """Each row's largest logit [S] and its token id [S], the lowest of equals; NaN counts as largest."""

    values: Tensor
    indices: Tensor


def _largest(logits: Tensor) -> _Largest:
    if logits.device.type != "cpu":
        return _Largest(*logits.max(dim=-1))
    indices = torch.from_numpy(logits.numpy().argmax(axis=-1))  # a tenth of the time of torch's own
    return _Largest(logits.gather(-1, indices[:, None])[:, 0], indices)


def _to_lists(values: Tensor, indices: Tensor) -> tuple[list[float], list[int]]:
    """Both in one transfer from the device; a vocabulary's ids are exact in float64."""
    both = torch.stack((values.double(), indices.double())).tolist()
    return both[0], [int(index) for index in both[1]]


def _is_filtered(row: ScheduledSequence) -> bool:
    sampling = row.sampling
    return sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def _filter(scores: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor:
    """min_p, then top_k, then top_p, each on the rows that use it and on what the one before has left."""
    steps: tuple[tuple[RowFilter, list[float]], ...] = (
        (min_p_filter, [row.sampling.min_p for row in rows]),
        (top_k_filter, [float(row.sampling.top_k) for row in rows]),
        (top_p_filter, [row.sampling.top_p if row.sampling.top_p < 1.0 else 0.0 for row in rows]),
    )
    for row_filter, settings in steps:
        using = [i for i, setting in enumerate(settings) if setting > 0.0]
        if len(using) == len(rows):
            scores = row_filter(scores, settings)
        elif using:
            scores[using] = row_filter(scores[using], [settings[i] for i in using])
    return scores


def _argmax_by_owner(values: Tensor, owners: Tensor, columns: Tensor, num_owners: int, vocab_size: int) -> Tensor:
    """For each owner the column of its largest value, the lowest one of several. All of [C] but the result, [num_owners]."""
    best = values.new_full((num_owners,), float("-inf")).scatter_reduce_(0, owners, values, "amax")
    tied = torch.where(values == best[owners], columns, vocab_size)
    return columns.new_full((num_owners,), vocab_size).scatter_reduce_(0, owners, tied, "amin")


def gumbel(words: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of token words under the halves of their keys, as `core/noise.py`. All int32 [C]."""
    first = keyed_word(words, high, low).long() & MASK32
    second = keyed_word(words, low, high).long() & MASK32
    uniform = (((first << 20) | (second >> 12)).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def keyed_word(words: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`core.noise.keyed_word` in wrapping int32 arithmetic."""
    word = (words ^ first) * _as_int32(ROUND_MULTIPLIERS[0])
    word = word ^ _logical_shift_right(word, ROUND_SHIFTS[0])
    word = (word ^ second) * _as_int32(ROUND_MULTIPLIERS[1])
    return word ^ _logical_shift_right(word, ROUND_SHIFTS[1])


def _logical_shift_right(word: Tensor, shift: int) -> Tensor:
    """torch's >> on a signed type copies the sign bit downwards; the mask takes these copies away."""
    return (word >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _signed(words: Sequence[int]) -> Tensor:
    return torch.tensor([_as_int32(word) for word in words], dtype=torch.int32)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of one token a row, and that row's `num_top` most likely ones, best first, equal ones by id.

    `logits` [N, V] float32, finite at their largest.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    deepest = min(max(num_top, default=0), logits.shape[1])
    if deepest == 0:
        return [TokenLogprob(token, _finite(value)) for token, value in zip(token_ids, chosen, strict=True)]
    values, indices = logprobs.topk(deepest, dim=-1)
    ranked = [
        tuple(sorted(zip(ids, map(_finite, row), strict=True), key=lambda pair: (-pair[1], pair[0])))
        for ids, row in zip(indices.tolist(), values.tolist(), strict=True)
    ]
    return [
        TokenLogprob(token, _finite(value), top[:count])
        for token, value, top, count in zip(token_ids, chosen, ranked, num_top, strict=True)
    ]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], num_top: int, start: int = 0) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the prompt tokens after positions `start` to `start + N`, from the logits there, [N, V].

    The first token of a prompt follows nothing and has none (None in the record). Worked through in pieces of 64 positions.
    Raises RowError `non_finite_logits`, which names the position, for logits of which no distribution can be made.
    """
    found: list[TokenLogprob] = []
    for begin in range(0, len(next_ids), LOGPROB_ROWS_AT_ONCE):
        piece = logits[begin : begin + LOGPROB_ROWS_AT_ONCE].float()
        for i, value in enumerate(piece.amax(-1).tolist()):
            if not math.isfinite(value):
                raise RowError("non_finite_logits", f"prompt position {start + begin + i}: the largest logit is {value}")
        tokens = list(next_ids[begin : begin + LOGPROB_ROWS_AT_ONCE])
        found += token_logprobs(piece, tokens, [num_top] * len(tokens))
    return tuple(found)
