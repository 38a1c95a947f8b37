"""Every parameter: what is taken, in which form it comes out, what is refused."""

import pytest

from contbatch_cli.data.misspelling import is_one_edit
from contbatch_cli.data.params import PARAMETERS, misspelt_parameter, validated
from contbatch_cli.data.rows import TextPrompt, row_hash
from contbatch_cli.errors import RowError

GOOD = [
    ({"max_tokens": 0}, {"max_tokens": 0}),
    ({"max_new_tokens": 5.0}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"temperature": None, "top_p": 1}, {"top_p": 1.0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ({"n": 128}, {"n": 128}),
    ({"stop": "x"}, {"stop": ["x"]}),
    ({"stop": []}, {"stop": []}),
    ({"stop_token_ids": [0, 5]}, {"stop_token_ids": [0, 5]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"logit_bias": {"10": -100, "9": 1}}, {"logit_bias": {"9": 1.0, "10": -100.0}}),
    ({"bad_words": ["x"]}, {"bad_words": ["x"]}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
    ({"logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": 3, "top_logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": False}, {}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
    ({"response_format": {"type": "regex", "regex": "a+"}}, {"response_format": {"type": "regex", "pattern": "a+"}}),
    ({"response_format": {"type": "choice", "choices": ["a"]}}, {"response_format": {"type": "choice", "choices": ["a"]}}),
    ({"adapter": "french"}, {"adapter": "french"}),
    ({"stop_on_repetition": True}, {"stop_on_repetition": True}),
]

BAD = [
    ({"max_tokens": -1}, "from 0 to"),
    ({"max_tokens": 2**31}, "2,147,483,647"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5"),
    ({"max_tokens": True}, "max_tokens is true"),
    ({"max_tokens": 1, "max_new_tokens": 2}, "given twice"),
    ({"min_tokens": 5, "max_tokens": 4}, "above max_tokens"),
    ({"temperature": -0.1}, "from 0 to 2"),
    ({"temperature": "hot"}, 'temperature is "hot"'),
    ({"temperature": 10**400}, "from 0 to 2"),
    ({"top_p": 0}, "above 0, at most 1"),
    ({"top_p": 1.01}, "at most 1"),
    ({"top_k": -2}, "from -1"),
    ({"min_p": 2}, "from 0 to 1"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "from 1 to 128"),
    ({"stop": [""]}, "none of them empty"),
    ({"stop": 5}, "list of texts"),
    ({"stop_token_ids": [-1]}, "list of token ids"),
    ({"ignore_eos": 1}, "true or false"),
    ({"presence_penalty": 2.1}, "from -2 to 2"),
    ({"repetition_penalty": 0}, "above 0"),
    ({"logit_bias": {"x": 1}}, "no token id"),
    ({"logit_bias": {"01": 1}}, "no token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1] is 101"),
    ({"logit_bias": [1]}, "object of token id"),
    ({"bad_words": "x"}, "list of texts"),
    ({"top_logprobs": 5}, "needs logprobs: true"),
    ({"logprobs": 21}, "from 0 to 20"),
    ({"logprobs": 2, "top_logprobs": 3}, "give one number"),
    ({"prompt_logprobs": True}, "from 0 to 20"),
    ({"response_format": "json"}, "json_object"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
    ({"response_format": {"type": "regex"}}, "pattern"),
    ({"adapter": ""}, "not empty"),
]


@pytest.mark.parametrize(("given", "canonical"), GOOD)
def test_good_values_have_one_form(given, canonical):
    result = validated(given)
    assert result == canonical
    assert [type(value) for value in result.values()] == [type(value) for value in canonical.values()]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_values_are_refused_with_the_range(given, message):
    with pytest.raises(RowError) as caught:
        validated(given)
    assert caught.value.code == "invalid_parameter"
    assert message in caught.value.message


def test_each_parameter_of_the_contract_has_a_good_and_a_bad_case():
    names = {parameter.name for parameter in PARAMETERS.values()} - {"stop_on_repetition"}
    assert names - {"min_tokens"} <= {PARAMETERS[key].name for given, _ in GOOD for key in given}
    assert names - {"frequency_penalty"} <= {PARAMETERS[key].name for given, _ in BAD for key in given}


def test_unknown_keys_are_refused_where_only_parameters_stand():
    with pytest.raises(RowError) as caught:
        validated({"colour": 1})
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("max_tokns", "max_tokens"),
        ("max_toknes", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("Temperature", "temperature"),
        ("adapters", "adapter"),
        ("logprob", "logprobs"),
        ("stops", None),
        ("seeds", None),
        ("top_q", None),
        ("tokens", None),
        ("maximum_tokens", None),
    ],
)
def test_misspellings(key, name):
    assert misspelt_parameter(key) == name


def test_zero_has_one_sign():
    """Equal parameters are written alike, in the row's hash too."""
    assert "-" not in str(validated({"temperature": -0.0, "logit_bias": {"7": -0.0}}))
    zero, negative = (row_hash(TextPrompt("x"), validated({"temperature": value})) for value in (0.0, -0.0))
    assert zero == negative


def test_one_edit_agrees_with_trying_all_edits():
    alphabet, name = "abx", "abab"
    edits = {name[:i] + name[i + 1 :] for i in range(4)}
    edits |= {name[:i] + c + name[i:] for i in range(5) for c in alphabet}
    edits |= {name[:i] + c + name[i + 1 :] for i in range(4) for c in alphabet}
    edits |= {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(3)}
    words = {""}
    for _ in range(6):
        words |= {word + c for word in words for c in alphabet}
    assert {word for word in words if is_one_edit(word, name)} == edits - {name}
