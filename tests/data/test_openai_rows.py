"""OpenAI batch rows in: what is honoured, what is let pass, what is refused."""

import json

import pytest

from contbatch_cli.data.readers import read_rows
from contbatch_cli.data.rows import ChatPrompt, OpenAIEnvelope, TextPrompt, TokenPrompt

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def row_of(tmp_path, body, url="/v1/chat/completions", **changes):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "c1", "method": "POST", "url": url, "body": body, **changes}))
    (row,) = read_rows([str(path)])
    return row


def test_chat(tmp_path):
    body = {**CHAT, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "user": "u", "stream": False, "top_k": 4}
    row = row_of(tmp_path, body)
    assert row.prompt == ChatPrompt([{"role": "user", "content": "Hi"}])
    assert row.params == {"max_tokens": 9, "logprobs": 2, "top_k": 4}
    assert (row.id, row.openai, row.extra) == ("c1", OpenAIEnvelope("c1", "chat"), {})


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a", TextPrompt("a")), (["a"], TextPrompt("a")), ([1, 2], TokenPrompt([1, 2])), ([[1, 2]], TokenPrompt([1, 2]))],
)
def test_completion_prompts(tmp_path, prompt, wanted):
    row = row_of(tmp_path, {"prompt": prompt, "logprobs": 3}, "/v1/completions")
    assert row.prompt == wanted
    assert row.params == {"logprobs": 3}


REFUSED = [
    ({**CHAT, "stream": True}, "invalid_parameter", "stream cannot be true"),
    ({**CHAT, "functions": []}, "invalid_parameter", "functions"),
    ({**CHAT, "tool_choice": "required"}, "invalid_parameter", "tool_choice"),
    ({**CHAT, "modalities": ["audio"]}, "invalid_parameter", "modalities"),
    ({**CHAT, "best_of": 2}, "invalid_parameter", "best_of"),
    ({**CHAT, "colour": "red"}, "unknown_parameter", "colour"),
    ({**CHAT, "meta_data": {}}, "unknown_parameter", 'the right name is "metadata"'),
    ({**CHAT, "max_tokns": 1}, "unknown_parameter", 'the right name is "max_tokens"'),
    ({**CHAT, "temperature": 2.5}, "invalid_parameter", "from 0 to 2"),
    ({"prompt": "x"}, "invalid_row", '"messages"'),
    ({**CHAT, "prompt": "x"}, "invalid_row", '"prompt"'),
    ("x", "invalid_row", '"body" is a string'),
]


@pytest.mark.parametrize(("body", "code", "message"), REFUSED)
def test_refused_bodies_keep_their_envelope(tmp_path, body, code, message):
    fault = row_of(tmp_path, body)
    assert fault.code == code
    assert message in fault.message
    assert fault.openai == OpenAIEnvelope("c1", "chat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_id": None}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"method": "GET"}, "POST"),
        ({"url": "/v1/embeddings"}, "/v1/chat/completions or /v1/completions"),
        ({"url": ["x"]}, "/v1/chat/completions"),
    ],
)
def test_bad_envelopes(tmp_path, changes, message):
    fault = row_of(tmp_path, CHAT, **changes)
    assert fault.code == "invalid_row"
    assert message in fault.message


def test_several_prompts_in_a_row_are_refused(tmp_path):
    assert "list of 2 prompts" in row_of(tmp_path, {"prompt": ["a", "b"]}, "/v1/completions").message


def test_accepted_without_effect(tmp_path):
    plain = row_of(tmp_path, CHAT)
    for extra in (
        {"store": True},
        {"parallel_tool_calls": True},
        {"tool_choice": "none"},
        {"suffix": None},
        {"n": 2, "best_of": 2},
    ):
        row = row_of(tmp_path, {**CHAT, **extra})
        assert row.prompt == plain.prompt
        assert row.params == ({"n": 2} if "n" in extra else {})


def test_custom_ids_are_unique(tmp_path):
    path = tmp_path / "in.jsonl"
    line = json.dumps({"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT})
    path.write_text(f"{line}\n{line}")
    first, second = read_rows([str(path)])
    assert second.code == "duplicate_id"
    assert second.openai == first.openai
