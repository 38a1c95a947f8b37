"""Preparing: token ids, precedence of parameters, clamping, seeds, and what does not fit."""

from dataclasses import replace

import pytest

from contbatch_cli.core.job_order import duplicate_key
from contbatch_cli.core.noise import row_seed
from contbatch_cli.core.request import RequestId, SamplingParams
from contbatch_cli.data.params import validated
from contbatch_cli.data.prepare import ModelLimits, PreparedRow, Preparer, SamplingDefaults
from contbatch_cli.data.rows import ChatPrompt, Row, RowFault, TextPrompt, TokenPrompt, row_hash
from contbatch_cli.errors import RowError


class Letters:
    """A tokenizer of code points; special tokens are one 1 in front."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]


class Chat:
    def render(self, messages, *, tools=None, continue_final_message=False, variables=None):
        if messages[0]["role"] == "broken":
            raise RowError("template_error", "no such role")
        return "|".join(message["content"] for message in messages)


LIMITS = ModelLimits(vocab_size=1000, max_context=100, eos_token_ids=(2, 3))


def row_of(prompt="ab", index=0, id=None, **params):
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else prompt
    canonical = validated(params)
    return Row(index, id, index + 1, "in.jsonl", prompt, canonical, {}, row_hash(prompt, canonical))


def prepare(row, limits=LIMITS, **defaults):
    return Preparer(Letters(), Chat(), limits, SamplingDefaults(**defaults)).prepare(row)


def sampling_of(row, limits=LIMITS, **defaults):
    return prepare(row, limits, **defaults).requests[0].sampling


def test_prompts_become_token_ids():
    assert prepare(row_of("ab")).requests[0].token_ids == [1, 97, 98]
    assert prepare(row_of(ChatPrompt([{"role": "user", "content": "ab"}]))).requests[0].token_ids == [97, 98]
    assert prepare(row_of(TokenPrompt([5, 6]))).requests[0].token_ids == [5, 6]


def test_defaults_are_greedy_and_clamped_to_the_context():
    sampling = sampling_of(row_of("ab"))
    assert sampling == SamplingParams(max_tokens=97, eos_token_ids=(2, 3))
    assert sampling_of(row_of("ab"), replace(LIMITS, max_context=None)).max_tokens == 256


def test_precedence():
    layers = {"from_model": {"temperature": 0.1}, "config_file": {"temperature": 0.2}, "command_line": {"temperature": 0.3}}
    assert sampling_of(row_of(temperature=0.4), **layers).temperature == 0.4
    for name, value in [("command_line", 0.3), ("config_file", 0.2), ("from_model", 0.1)]:
        assert sampling_of(row_of(), **layers).temperature == value
        del layers[name]
    assert sampling_of(row_of()).temperature == 0.0


def test_a_row_can_take_back_a_default():
    assert sampling_of(row_of(stop=[]), command_line={"stop": ["x"]}).stop == ()
    assert sampling_of(row_of(), command_line={"stop": ("x",)}).stop == ("x",)


def test_explicit_lengths_are_never_clamped():
    for fault in (prepare(row_of(max_tokens=98)), prepare(row_of(), command_line={"max_tokens": 98})):
        assert fault.code == "prompt_too_long"
        assert fault.message == "row 0: 3 prompt + 98 new tokens make 101, the model's context holds 100"
    assert sampling_of(row_of(max_tokens=97)).max_tokens == 97
    assert sampling_of(row_of(), config_file={"max_tokens": 98}).max_tokens == 97


def test_a_prompt_that_leaves_no_room():
    assert sampling_of(row_of("x" * 98)).max_tokens == 1
    fault = prepare(row_of("x" * 99))
    assert fault.code == "prompt_too_long"
    assert fault.message == "row 0: 100 prompt + at least 1 new token, the model's context holds 100"
    assert sampling_of(row_of("x" * 99, max_tokens=0)).max_tokens == 0


def test_min_tokens_against_max_tokens():
    assert prepare(row_of(min_tokens=300)).code == "invalid_parameter"
    assert prepare(row_of("x" * 90, min_tokens=20)).code == "prompt_too_long"
    assert sampling_of(row_of(max_tokens=5), config_file={"min_tokens": 9}).min_tokens == 5
    assert sampling_of(row_of("x" * 95), config_file={"min_tokens": 9}).min_tokens == 4


def test_rows_beyond_the_cache_are_refused_with_the_numbers():
    limits = ModelLimits(vocab_size=2, num_blocks=512)
    fault = prepare(row_of(TokenPrompt([1] * 9214), index=17, max_tokens=512), limits)
    assert fault.code == "exceeds_kv_cache"
    assert fault.message == (
        "row 17: 9,214 prompt + 512 new tokens need 608 blocks of 16, the cache has 512 (cache.num_blocks)"
    )
    assert isinstance(prepare(row_of(TokenPrompt([1] * 8192), max_tokens=1), limits), PreparedRow)
    assert isinstance(prepare(row_of(TokenPrompt([1] * 8192), max_tokens=0), limits), PreparedRow)
    assert isinstance(prepare(row_of(TokenPrompt([1] * 8192), max_tokens=2), limits), RowFault)


def test_ids_beyond_the_vocabulary_are_refused():
    assert prepare(row_of(TokenPrompt([1000]))).code == "invalid_row"
    assert prepare(row_of(stop_token_ids=[1000])).code == "invalid_parameter"
    assert prepare(row_of(logit_bias={"1000": 1})).code == "invalid_parameter"


def test_faults_keep_the_row():
    row = row_of(ChatPrompt([{"role": "broken", "content": ""}]), index=3, id="x")
    fault = prepare(row)
    assert (fault.index, fault.id, fault.line, fault.code) == (3, "x", 4, "template_error")
    assert fault.message == "row 3: no such role"
    assert fault.row_hash == row.row_hash


def test_a_prompt_without_tokens_is_empty():
    assert prepare(row_of(ChatPrompt([{"role": "user", "content": ""}]))).code == "empty_prompt"


def test_seeds():
    assert sampling_of(row_of(temperature=1, seed=-5)).seed == -5
    assert sampling_of(row_of(temperature=1, index=4), run_seed=9).seed == row_seed(9, 4, "index")
    assert sampling_of(row_of(temperature=1, index=4, id="a"), run_seed=9).seed == row_seed(9, "a")
    assert sampling_of(row_of(seed=7)).seed == 0


def test_determined_rows_and_their_duplicates():
    preparer = Preparer(Letters(), Chat(), LIMITS)
    rows = [row_of(), row_of(index=1, seed=3), row_of(index=2, temperature=1), row_of(index=3, temperature=1)]
    rows += [row_of(index=4, temperature=1, seed=1), row_of(index=5, temperature=1, seed=1)]
    prepared = [preparer.prepare(row) for row in rows]
    assert [one.is_determined for one in prepared] == [True, True, False, False, True, True]
    keys = [duplicate_key(one.requests[0]) for one in prepared]
    assert keys[0] == keys[1] and keys[2] != keys[3] and keys[4] == keys[5]


def test_samples_share_prompt_and_settings():
    prepared = prepare(row_of(n=3, temperature=1))
    assert [request.request_id for request in prepared.requests] == [RequestId(0, 0), RequestId(0, 1), RequestId(0, 2)]
    assert len({request.sampling for request in prepared.requests}) == 1
    prepared.requests[0].token_ids.append(5)
    assert prepared.requests[1].token_ids == [1, 97, 98]


def test_words_become_ids():
    sampling = sampling_of(row_of(bad_words=["no", " yes"], logit_bias={"7": -1}, response_format={"type": "json_object"}))
    assert sampling.bad_words == ((110, 111), (32, 110, 111), (32, 121, 101, 115))
    assert sampling.logit_bias == ((7, -1.0),)
    assert sampling.response_format == '{"type":"json_object"}'


def test_adapters_and_parameters_that_this_run_cannot_honour():
    assert "(loaded: none)" in prepare(row_of(adapter="x")).message
    limits = replace(LIMITS, adapters=frozenset({"x"}), refused={"response_format": "needs the grammar extra"})
    assert prepare(row_of(adapter="x"), limits).requests[0].adapter == "x"
    assert "needs the grammar extra" in prepare(row_of(response_format={"type": "json_object"}), limits).message


def test_rows_with_equal_parameters_share_one_value_and_seeds_stay_apart():
    preparer = Preparer(Letters(), Chat(), LIMITS)
    one, two = (preparer.prepare(row_of(index=i, max_tokens=5)).requests[0].sampling for i in range(2))
    assert one is two
    seeds = [preparer.prepare(row_of(temperature=1, seed=seed)).requests[0].sampling.seed for seed in (1, 2)]
    assert seeds == [1, 2]


@pytest.mark.parametrize("count", [3000])
def test_many_different_parameters_stay_bounded(count):
    preparer = Preparer(Letters(), Chat(), LIMITS)
    for top_k in range(count):
        assert preparer.prepare(row_of(top_k=top_k)).requests[0].sampling.top_k == top_k
    assert len(preparer._settings) <= 1024
