"""From a row to requests: its prompt as token ids, every parameter resolved, and whether it fits the model and its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from contbatch_cli.core.noise import row_seed
from contbatch_cli.core.request import FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.data.response_format import check_response_format
from contbatch_cli.data.rows import ChatPrompt, Prompt, Row, RowFault, TextPrompt, canonical_json
from contbatch_cli.errors import RowError
from contbatch_cli.units import counted

BUILT_IN_DEFAULTS: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
_CACHED_SETTINGS = 1024
_CONVERTERS: Mapping[str, Any] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": lambda bias: tuple((int(token), float(value)) for token, value in bias.items()),
    "response_format": canonical_json,
}
_NOT_SAMPLING = frozenset({"n", "adapter", "seed", "bad_words"})


class TextEncoder(Protocol):
    """Text to token ids. `add_special_tokens` applies the tokenizer's own rule (BOS and the like)."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class ChatRenderer(Protocol):
    """Messages to text with the model's template and its generation prompt.

    Raises RowError with `no_chat_template` or `template_error`.
    """

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model and its cache can hold. None: not known or no limit.

    `max_context` is in tokens, prompt and output together, `context_reason` says why where it is less than the model's own;
    `vocab_size` is the number of rows of the embedding. No row ever
    holds more than `most_row_blocks` blocks, where all layers give back what is out of their window. `refused` names
    parameters that this run cannot honour, each with the reason.
    """

    vocab_size: int
    max_context: int | None = None
    context_reason: str = ""
    block_size: int = 16
    num_blocks: int | None = None
    most_row_blocks: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adapters: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Parameters for rows that do not say, canonical (see `params`), strongest first.

    `from_model` is the model's generation_config when `sampling.from_model` asks for it; `run_seed` gives rows theirs.
    """

    command_line: Mapping[str, Any] = field(default_factory=dict)
    config_file: Mapping[str, Any] = field(default_factory=dict)
    from_model: Mapping[str, Any] = field(default_factory=dict)
    built_in: Mapping[str, Any] = field(default_factory=lambda: BUILT_IN_DEFAULTS)
    run_seed: int = 0

    def merged(self) -> dict[str, Any]:
        return {**self.built_in, **self.from_model, **self.config_file, **self.command_line}


class PreparedRow(NamedTuple):
    """A row that can run: `n` requests with one prompt, in order of their sample numbers."""

    row: Row
    requests: tuple[Request, ...]

    @property
    def is_determined(self) -> bool:
        """Whether its text depends on nothing but prompt and parameters: greedy, or seeded by the row itself."""
        return self.requests[0].sampling.temperature == 0.0 or "seed" in self.row.params

    @property
    def reason(self) -> FinishReason:
        """Why it ended, once all requests have: the first one's reason, or ERROR when any failed."""
        first = self.requests[0].finish
        assert first is not None, f"row {self.row.index} has not finished"
        if any(request.finish is not None and request.finish.reason is FinishReason.ERROR for request in self.requests[1:]):
            return FinishReason.ERROR
        return first.reason


class _Settings(NamedTuple):
    """The parameters of a row before its prompt and its seed are known; the same for all rows that give the same ones."""

    sampling: SamplingParams
    n: int
    adapter: str | None
    is_max_explicit: bool
    is_min_explicit: bool


class Preparer:
    """Prepares rows, one at a time. Rows with equal parameters share one SamplingParams where seed and length allow.

    Greedy rows have seed 0, since it means nothing to them. A sampled row uses its own seed exactly, else the hash of the run
    seed and its id, or its index when it has no id.
    """

    def __init__(
        self, encoder: TextEncoder, chat: ChatRenderer, limits: ModelLimits, defaults: SamplingDefaults | None = None
    ) -> None:
        self._encoder = encoder
        self._chat = chat
        self._limits = limits
        defaults = defaults or SamplingDefaults()
        self._defaults = defaults.merged()
        self._is_max_explicit = "max_tokens" in defaults.command_line
        self._run_seed = defaults.run_seed
        self._settings: dict[tuple[Any, ...], _Settings] = {}

    def limit_cache(self, num_blocks: int) -> None:
        """From here on the cache has so many blocks: what does not fit it is a fault."""
        self._limits = replace(self._limits, num_blocks=num_blocks)

    def prepare(self, row: Row) -> PreparedRow | RowFault:
        """The row's requests, or the fault that is its record."""
        try:
            ids = self._token_ids(row.prompt)
            settings = self._settings_of(row.params)
            sampling = self._fitted(len(ids), settings)
            if sampling.temperature != 0.0:
                sampling = self._seeded(row, sampling)
            check_cache(len(ids), sampling.max_tokens, self._limits)
        except RowError as error:
            return prepared_fault(row, error)
        adapter = settings.adapter
        first = Request(RequestId(row.index), ids, len(ids), sampling, adapter)
        if settings.n == 1:
            return PreparedRow(row, (first,))
        others = (Request.from_prompt(RequestId(row.index, sample), ids, sampling, adapter) for sample in range(1, settings.n))
        return PreparedRow(row, (first, *others))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, TextPrompt):
            ids = self._encoder.encode(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            ids = self._encoder.encode(self._rendered(prompt), add_special_tokens=False)
        else:
            ids = list(prompt.ids)
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        largest = max(ids)
        if largest >= self._limits.vocab_size:
            raise RowError(
                "invalid_row", f"token id {largest:,} is beyond the model's embedding of {self._limits.vocab_size:,}"
            )
        return ids

    def _rendered(self, prompt: ChatPrompt) -> str:
        text = self._chat.render(
            prompt.messages,
            tools=prompt.tools,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.chat_template_kwargs,
        )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError("template_error", f"the chat template gave half a surrogate pair: {error}") from None
        return text

    def _settings_of(self, params: dict[str, Any]) -> _Settings:
        try:
            key = tuple(params.items())
            if "seed" in params:
                key = tuple(item for item in key if item[0] != "seed")
            known = self._settings.get(key)
        except TypeError:  # a list or an object among the values
            return self._resolved(params)
        if known is None:
            if len(self._settings) >= _CACHED_SETTINGS:
                self._settings.clear()
            known = self._settings[key] = self._resolved(params)
        return known

    def _resolved(self, params: dict[str, Any]) -> _Settings:
        """Row over command line over config over model over built-in, as ids and tuples."""
        self._refuse_what_cannot_run(params)
        merged = {**self._defaults, **params}
        if "response_format" in merged:
            check_response_format(merged["response_format"])
        is_min_explicit = "min_tokens" in params
        if merged.get("min_tokens", 0) > merged["max_tokens"]:
            if is_min_explicit:
                low, high = merged["min_tokens"], merged["max_tokens"]
                raise RowError("invalid_parameter", f"min_tokens is {low:,}, above max_tokens, {high:,}")
            merged["min_tokens"] = merged["max_tokens"]
        values = {
            name: _CONVERTERS[name](value) if name in _CONVERTERS else value
            for name, value in merged.items()
            if name not in _NOT_SAMPLING
        }
        bad_words = tuple(ids for word in merged.get("bad_words", ()) for ids in self._bad_word_ids(word))
        sampling = SamplingParams(**values, eos_token_ids=self._limits.eos_token_ids, bad_words=bad_words)
        self._check_ids(sampling)
        is_max_explicit = self._is_max_explicit or "max_tokens" in params
        return _Settings(sampling, merged.get("n", 1), merged.get("adapter"), is_max_explicit, is_min_explicit)

    def _refuse_what_cannot_run(self, params: dict[str, Any]) -> None:
        for name, reason in self._limits.refused.items():
            if name in params:
                raise RowError("invalid_parameter", f"{name}: {reason}")
        adapter = params.get("adapter")
        if adapter is not None and adapter not in self._limits.adapters:
            loaded = ", ".join(sorted(self._limits.adapters)) or "none"
            raise RowError("invalid_parameter", f'adapter "{adapter}" is not loaded (loaded: {loaded})')

    def _bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that write a bad word: as it begins a text and as it follows a space, each once."""
        texts = (word, " " + word.lstrip())
        sequences = (tuple(self._encoder.encode(text, add_special_tokens=False)) for text in texts)
        return [ids for ids in dict.fromkeys(sequences) if ids]

    def _check_ids(self, sampling: SamplingParams) -> None:
        named = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        }
        for name, ids in named.items():
            if ids and max(ids) >= self._limits.vocab_size:
                message = f"{name} holds {max(ids):,}, the model's vocabulary has {self._limits.vocab_size:,}"
                raise RowError("invalid_parameter", message)

    def _fitted(self, num_prompt: int, settings: _Settings) -> SamplingParams:
        """The parameters with a default `max_tokens` clamped to the context left. Raises RowError with `prompt_too_long`."""
        sampling, context = settings.sampling, self._limits.max_context
        if context is None or num_prompt + sampling.max_tokens <= context:
            return sampling
        room = context - num_prompt
        if settings.is_max_explicit:
            total = num_prompt + sampling.max_tokens
            numbers = f"{num_prompt:,} prompt + {counted(sampling.max_tokens, 'new token')} make {total:,}"
            raise RowError("prompt_too_long", f"{numbers}, the model's context holds {context:,}{self._limits.context_reason}")
        if room < 1 or (settings.is_min_explicit and room < sampling.min_tokens):
            wanted = max(1, sampling.min_tokens if settings.is_min_explicit else 1)
            numbers = f"{num_prompt:,} prompt + at least {counted(wanted, 'new token')}"
            raise RowError("prompt_too_long", f"{numbers}, the model's context holds {context:,}{self._limits.context_reason}")
        return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))

    def _seeded(self, row: Row, sampling: SamplingParams) -> SamplingParams:
        seed = row.params.get("seed")
        if seed is None:
            seed = row_seed(self._run_seed, row.index, "index") if row.id is None else row_seed(self._run_seed, row.id)
        return replace(sampling, seed=seed)


def prepared_fault(row: Row, error: RowError) -> RowFault:
    """The fault of a row that was read and cannot run."""
    message = f"row {row.index}: {error.message}"
    return RowFault(row.index, row.id, row.line, row.file, error.code, message, row.row_hash, row.extra, row.openai)


def check_cache(num_prompt: int, max_tokens: int, limits: ModelLimits) -> None:
    """Raises RowError with `exceeds_kv_cache` when an empty cache could not hold the row to its end.

    The last token is never computed, so its keys and values need no place.
    """
    needed = -(-(num_prompt + max(max_tokens - 1, 0)) // limits.block_size)
    if limits.most_row_blocks is not None:
        needed = min(needed, limits.most_row_blocks)
    if limits.num_blocks is not None and needed > limits.num_blocks:
        blocks = f"{counted(needed, 'block')} of {limits.block_size}"
        numbers = f"{num_prompt:,} prompt + {counted(max_tokens, 'new token')} need {blocks}"
        raise RowError("exceeds_kv_cache", f"{numbers}, the cache has {limits.num_blocks:,} (cache.num_blocks)")
