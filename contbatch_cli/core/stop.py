"""Stop rules: `(request) -> Finish | None`, asked once after each token that a request is given.

A rule only reads the request. Rules about text close over a detokenizer and are made where parts are wired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contbatch_cli.core.request import Finish, FinishReason, Request

StopRule = Callable[[Request], "Finish | None"]

REPETITION_WINDOW = 64
MAX_REPETITION_PERIOD = 16
REPETITION_STOP_REASON = "repetition"

_EOS = Finish(FinishReason.STOP)
_LENGTH = Finish(FinishReason.LENGTH)
_REPETITION = Finish(FinishReason.STOP, REPETITION_STOP_REASON)


def standard_stop_rule(request: Request) -> Finish | None:
    """EOS and stop token ids, then the length. A token that is both a stop and the last one allowed is a stop.

    Neither EOS nor stop ids count while fewer than `min_tokens` tokens are out (the sampler masks them until then); an EOS id
    that is also a stop token id ends the row even under `ignore_eos`, and is then reported as that stop token.
    """
    token_ids = request.token_ids
    sampling = request.sampling
    num_output = len(token_ids) - request.num_prompt_tokens
    if num_output and num_output >= sampling.min_tokens:
        token = token_ids[-1]
        if token in sampling.eos_token_ids and not sampling.ignore_eos:
            return _EOS
        if token in sampling.stop_token_ids:
            return Finish(FinishReason.STOP, token)
    return _LENGTH if num_output >= sampling.max_tokens else None


def is_runaway(token_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat one n-gram: they have a period of at most 16, so that it is seen at least four times.

    `token_ids` are output tokens; fewer than 64 of them never count.
    """
    if len(token_ids) < REPETITION_WINDOW:
        return False
    last, before = token_ids[-1], token_ids[-2]
    for period in range(1, MAX_REPETITION_PERIOD + 1):
        if last == token_ids[-1 - period] and before == token_ids[-2 - period]:
            tail = token_ids[-REPETITION_WINDOW:]
            if tail[period:] == tail[:-period]:
                return True
    return False


def repetition_rule(request: Request) -> Finish | None:
    """Ends a row that runs away, where it asked for that (`stop_on_repetition`); the stop reason is "repetition"."""
    sampling = request.sampling
    if not sampling.stop_on_repetition:
        return None
    num_output = len(request.token_ids) - request.num_prompt_tokens
    if num_output < max(REPETITION_WINDOW, sampling.min_tokens):
        return None
    return _REPETITION if is_runaway(request.token_ids[-REPETITION_WINDOW:]) else None


def first_of(*rules: StopRule) -> StopRule:
    """The rule that asks `rules` in turn; the first that ends the request decides."""

    def rule(request: Request) -> Finish | None:
        for one in rules:
            if (finish := one(request)) is not None:
                return finish
        return None

    return rules[0] if len(rules) == 1 else rule
