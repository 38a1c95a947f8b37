from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.core.stop import first_of, is_runaway, repetition_rule, standard_stop_rule

BASE = SamplingParams(max_tokens=5, eos_token_ids=(1, 2), stop_token_ids=(7,))


def request_with(output: list[int], sampling: SamplingParams = BASE) -> Request:
    request = Request.from_prompt(RequestId(0), [1, 7, 3], sampling)
    request.token_ids += output
    return request


def finish_of(output: list[int], sampling: SamplingParams = BASE) -> Finish | None:
    return standard_stop_rule(request_with(output, sampling))


def test_every_eos_id_ends_with_no_stop_reason():
    assert finish_of([5, 1]) == Finish(FinishReason.STOP, None)
    assert finish_of([5, 2]) == Finish(FinishReason.STOP, None)
    assert finish_of([1, 5]) is None, "only the newest token is looked at"


def test_stop_token_ids_name_themselves():
    assert finish_of([7]) == Finish(FinishReason.STOP, 7)


def test_the_prompt_never_stops_a_row():
    assert standard_stop_rule(Request.from_prompt(RequestId(0), [3, 1], BASE)) is None
    assert standard_stop_rule(Request.from_prompt(RequestId(0), [3, 7], BASE)) is None


def test_length_and_stop_before_length():
    assert finish_of([5, 5, 5, 5]) is None
    assert finish_of([5] * 5) == Finish(FinishReason.LENGTH)
    assert finish_of([5] * 4 + [1]) == Finish(FinishReason.STOP)
    assert finish_of([], replace(BASE, max_tokens=0)) == Finish(FinishReason.LENGTH)


def test_ignore_eos_leaves_stop_token_ids():
    ignoring = replace(BASE, ignore_eos=True)
    assert finish_of([1], ignoring) is None
    assert finish_of([7], ignoring) == Finish(FinishReason.STOP, 7)
    assert finish_of([1], replace(ignoring, stop_token_ids=(1,))) == Finish(FinishReason.STOP, 1)


def test_min_tokens_holds_back_both():
    patient = replace(BASE, min_tokens=3)
    assert finish_of([1, 7], patient) is None
    assert finish_of([5, 5, 7], patient) == Finish(FinishReason.STOP, 7)
    assert finish_of([5, 5, 1], patient) == Finish(FinishReason.STOP)


@given(st.integers(1, 16), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_runaway_for_every_period_up_to_16(period, lead):
    text = list(range(1000, 1000 + lead)) + [i % period for i in range(64)]
    assert is_runaway(text)
    assert not is_runaway(text[:-1] + [99])
    if not lead:
        assert not is_runaway(text[1:])


def test_runaway_needs_a_short_period_over_the_whole_window():
    assert not is_runaway([i % 17 for i in range(64)])
    assert not is_runaway([5] * 63)
    broken = [5] * 64
    broken[0] = 6
    assert not is_runaway(broken)
    assert not is_runaway([i * i % 23 for i in range(200)]), "a period of 23"


@given(st.lists(st.integers(0, 2), min_size=64, max_size=90))
@settings(max_examples=60, deadline=None)
def test_runaway_equals_its_definition(ids):
    tail = ids[-64:]
    periodic = any(all(tail[i] == tail[i - p] for i in range(p, 64)) for p in range(1, 17))
    assert is_runaway(ids) == periodic


def test_repetition_rule_only_where_asked_and_only_over_output():
    asked = SamplingParams(max_tokens=500, stop_on_repetition=True)
    assert repetition_rule(request_with([5] * 64, replace(asked, stop_on_repetition=False))) is None
    assert repetition_rule(request_with([5] * 64, asked)) == Finish(FinishReason.STOP, "repetition")
    assert repetition_rule(request_with([5] * 64, replace(asked, min_tokens=65))) is None
    repeated_prompt = Request.from_prompt(RequestId(0), [5] * 100, asked)
    repeated_prompt.token_ids += [5] * 63
    assert repetition_rule(repeated_prompt) is None


def test_first_of_asks_in_order():
    rule = first_of(repetition_rule, standard_stop_rule)
    both = SamplingParams(max_tokens=64, stop_on_repetition=True)
    assert rule(request_with([5] * 64, both)) == Finish(FinishReason.STOP, "repetition")
    assert first_of(standard_stop_rule, repetition_rule)(request_with([5] * 64, both)) == Finish(FinishReason.LENGTH)
    assert rule(request_with([5] * 10, both)) is None
    assert first_of(standard_stop_rule) is standard_stop_rule
