"""A request: a list of tokens and one number, how many of them have been computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class RequestId(NamedTuple):
    """Names one request of a job: the index of its row and which of the row's `n` samples it is."""

    row: int
    sample: int = 0


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"


class Finish(NamedTuple):
    """Why a request ended. `stop_reason` is the stop string or stop token id that ended it, None for EOS and for length."""

    reason: FinishReason
    stop_reason: str | int | None = None
    message: str | None = None


class TokenLogprob(NamedTuple):
    """The log-probability of one chosen token (natural logarithm) and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one row asks of the sampler and the stop rules, fully resolved: every default filled in, words turned into ids.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is the row's own or derived from the run seed.
    `logprobs` and `prompt_logprobs` are None when not asked for, else how many alternatives to report (0: the token's own
    only). `response_format` is canonical JSON. `eos_token_ids` is the union of the model's sources.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: str | None = None
    stop_on_repetition: bool = False

    needs_history: bool = field(init=False, repr=False, compare=False)
    """Whether a logits processor reads the request's own tokens, so that its plan has to carry them."""

    def __post_init__(self) -> None:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        needs_history = any(penalties) or bool(self.bad_words) or self.response_format is not None
        object.__setattr__(self, "needs_history", needs_history)

    def __hash__(self) -> int:
        """Of what mostly tells rows apart: they are looked up by equal ones for every row of a job."""
        return hash((self.max_tokens, self.temperature, self.seed))


GREEDY = SamplingParams()


@dataclass(slots=True, eq=False)
class Request:
    """The one mutable record of a request's state; everything else about it is derived.

    `token_ids` holds the prompt and then the output. The first `num_computed_tokens` of them have their keys and values in
    the cache. `adapter` names what changes those values, so that blocks are never shared across it.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = GREEDY
    adapter: str | None = None
    num_computed_tokens: int = 0
    finish: Finish | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0
    """Tokens that the last preemption gave back and no later admission has accounted for."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def from_prompt(
        cls, request_id: RequestId, prompt_ids: list[int], sampling: SamplingParams = GREEDY, adapter: str | None = None
    ) -> Request:
        """A new request; `prompt_ids` is copied. Raises ValueError for an empty prompt."""
        if not prompt_ids:
            raise ValueError(f"row {request_id.row}: the prompt has no tokens")
        return cls(request_id, list(prompt_ids), len(prompt_ids), sampling, adapter)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_num_tokens(self) -> int:
        """The most tokens whose keys and values are ever cached: the last sampled token is never computed."""
        num_asked = self.sampling.max_tokens
        return self.num_prompt_tokens + num_asked - 1 if num_asked else self.num_prompt_tokens

    @property
    def is_prefill_done(self) -> bool:
        """All known tokens but the newest are computed: the next run is a decode."""
        return self.num_computed_tokens >= self.num_prompt_tokens and self.num_computed_tokens == self.num_tokens - 1

    @property
    def is_complete(self) -> bool:
        return self.finish is not None
