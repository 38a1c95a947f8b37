"""A rehearsal's stand-ins for model and clock: the scheduler and the engine loop are the real ones.

How long each output is comes from an `OutputScript`, what a step costs from a `CostModel`; nothing else is made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import accepted, sampled_runs
from contbatch_cli.core.noise import stream_key, uniform
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.cost_model import CostModel
from contbatch_cli.errors import UsageError
from contbatch_cli.units import counted


class SimulatedClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class KnownOutput(NamedTuple):
    """The output of one request in an earlier run; `token_ids` may be absent or shorter than `num_tokens` (EOS left out)."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()


class OutputScript:
    """How every request of a rehearsal goes on: its length and, where known, its tokens.

    A request that an earlier output does not tell about gets a length drawn by its own id, so that it is the same in every
    rehearsal: `mean` tokens in the mean (see `drawn_length`), or `max_tokens` when that is None or only length ends the row.
    `num_unknown` counts those that were asked for. Unknown tokens are each a new negative number, so that the prefix cache
    finds nothing in common between them.
    """

    def __init__(self, mean: float | None = None, known: dict[RequestId, KnownOutput] | None = None) -> None:
        self.mean = mean
        self.known = known or {}
        drawn = f"drawn for each row, {mean:g} in the mean" if mean is not None else "max_tokens"
        self.description = "a file" if known else drawn
        self._unknown: dict[RequestId, int] = {}
        self._fresh = count(-1, -1)

    @classmethod
    def parse(cls, text: str) -> OutputScript:
        """`max`, a number of tokens, or `@FILE`. Raises UsageError."""
        if text == "max":
            return cls()
        if text.startswith("@"):
            return cls.from_file(Path(text[1:]))
        try:
            mean = float(text)
        except ValueError:
            mean = 0.0
        if not 1.0 <= mean < math.inf:
            raise UsageError(f"--output-lengths {text}: should be max, a mean number of tokens from 1, or @FILE")
        return cls(mean)

    @classmethod
    def from_file(cls, path: Path) -> OutputScript:
        """Reads records of an earlier run, or lines of `{"index","completion_tokens"}`; error records count as unknown."""
        known: dict[RequestId, KnownOutput] = {}
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        known.update(_read_outputs(path, number, line))
        except OSError as error:
            raise UsageError(f"--output-lengths @{path}: {error.strerror}") from error
        script = cls(None, known)
        script.description = f"{path} ({counted(len(known), 'output')})"
        return script

    def again(self) -> OutputScript:
        """The same script from its beginning, for another rehearsal."""
        script = OutputScript(self.mean, self.known)
        script.description = self.description
        return script

    @property
    def num_unknown(self) -> int:
        return len(self._unknown)

    def length(self, request_id: RequestId, sampling: SamplingParams) -> int:
        """The number of tokens that the request samples, at most `max_tokens`."""
        output = self.known.get(request_id)
        if output is not None:
            return min(max(output.num_tokens, 1), sampling.max_tokens)
        length = self._unknown.get(request_id)
        if length is None:
            length = self._unknown[request_id] = self._drawn(request_id, sampling)
        return length

    def _drawn(self, request_id: RequestId, sampling: SamplingParams) -> int:
        only_length_ends = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
        if self.mean is None or only_length_ends:
            return sampling.max_tokens
        chance = uniform(stream_key(request_id.row, request_id.sample, 0))
        return min(max(drawn_length(self.mean, sampling.max_tokens, chance), sampling.min_tokens), sampling.max_tokens)

    def token(self, request_id: RequestId, position: int) -> int:
        """The request's output token at `position`, counted from its first output token."""
        output = self.known.get(request_id)
        if output is not None and position < len(output.token_ids):
            return output.token_ids[position]
        return next(self._fresh)

    def stop_rule(self, request: Request) -> Finish | None:
        """The scheduler's stop rule: a request ends when it is as long as the script says."""
        if request.num_output_tokens < self.length(request.request_id, request.sampling):
            return None
        is_cut = request.num_output_tokens >= request.sampling.max_tokens
        return Finish(FinishReason.LENGTH if is_cut else FinishReason.STOP)


def drawn_length(mean: float, most: int, chance: float) -> int:
    """The length, from 1 to `most`, that has this chance (above 0, below 1) of being exceeded; `mean` in the mean.

    Each token is the last one with the same probability, and `most` cuts what would go on: a geometric distribution, the one
    that supposes nothing but its mean. With `most` at the mean or below, every length is `most`.
    """
    if mean >= most:
        return most
    if mean <= 1.0:
        return 1
    return min(1 + int(math.log(chance) / math.log1p(-_end_probability(mean, most))), most)


@lru_cache(maxsize=1024)
def _end_probability(mean: float, most: int) -> float:
    """The probability p of a last token with which lengths cut at `most` have this mean: (1 - (1 - p) ** most) / p."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        found = -math.expm1(most * math.log1p(-middle)) / middle
        low, high = (middle, high) if found > mean else (low, middle)
    return high


def _read_outputs(path: Path, number: int, line: bytes) -> dict[RequestId, KnownOutput]:
    try:
        record = json.loads(line)
        return _outputs_of(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = "it should be a record of an earlier output, or an object with index and completion_tokens"
        raise UsageError(f"--output-lengths @{path}, line {number}: {wanted}") from error


def _outputs_of(record: dict[str, Any]) -> dict[RequestId, KnownOutput]:
    """The outputs that one line tells of: one for each sample; none for an error record."""
    row = int(record["index"])
    body = (record.get("response") or {}).get("body") or record
    if body.get("error") or body.get("finish_reason") == "error":
        return {}
    usage = body.get("usage") or {}
    total = body.get("completion_tokens", usage.get("completion_tokens"))
    choices = body.get("choices") or [body]
    return {RequestId(row, sample): _output_of(choice, total, len(choices)) for sample, choice in enumerate(choices)}


def _output_of(choice: dict[str, Any], total: int | None, num_choices: int) -> KnownOutput:
    token_ids = tuple(choice.get("token_ids") or ())
    own = choice.get("completion_tokens", (choice.get("usage") or {}).get("completion_tokens"))
    if own is None:
        own = total if num_choices == 1 else None
    if own is None:
        own = len(token_ids) or round((total or 0) / num_choices)
    if not isinstance(own, int) or own < 0:
        raise ValueError(f"completion_tokens {own!r}")
    return KnownOutput(own, token_ids)


class SimulatedRunner:
    """Executes a plan without a model: the script gives the tokens, the cost model the time."""

    def __init__(self, script: OutputScript, cost: CostModel, advance: Callable[[float], None]) -> None:
        self._script = script
        self._cost = cost
        self._advance = advance

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self._advance(self._cost.step_s(batch))
        return BatchResult([self._result(sequence) if sequence.samples else NO_TOKENS for sequence in batch.sequences])

    def _result(self, sequence: ScheduledSequence) -> SequenceResult:
        if sequence.num_drafts:
            return accepted(sequence, [self._sampled(run) for run in sampled_runs(sequence)])
        return self._sampled(sequence)

    def _sampled(self, sequence: ScheduledSequence) -> SequenceResult:
        """The token behind a run."""
        return SequenceResult((self._script.token(sequence.request_id, sequence.end - sequence.num_prompt_tokens),))


NO_TOKENS = SequenceResult()
