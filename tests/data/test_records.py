"""Records: the contract's shape to the byte, strict JSON, and OpenAI's shape by its own types."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams, TokenLogprob
from contbatch_cli.data.records import Completion, RecordOptions, _native, cancelled_record, fault_record, json_line, row_record
from contbatch_cli.data.rows import OpenAIEnvelope, Row, RowFault, TextPrompt

OPTIONS = RecordOptions(lambda token: bytes([token]), "tiny", 1_700_000_000)
STOP = Finish(FinishReason.STOP)


def row_of(index=0, id="a", openai=None, **extra):
    return Row(index, id, index + 1, "in.jsonl", TextPrompt("x"), {}, extra, "9f0c51e2a77b3d10", openai)


def completion(text="Paris.", finish=STOP, sample=0, logprobs=(), prompt_logprobs=(), reasoning=None, **sampling):
    request = Request(RequestId(0, sample), [1, 2, 3, 65, 66], 3, SamplingParams(**sampling), num_cached_tokens=2)
    request.finish = finish
    request.logprobs, request.prompt_logprobs = list(logprobs), list(prompt_logprobs)
    return Completion(request, text, reasoning)


def record_of(*completions, row=None, options=OPTIONS, **more):
    return json.loads(row_record(row or row_of(), completions or (completion(),), options, **more))


def test_a_good_record_to_the_byte():
    assert row_record(row_of(), [completion()], OPTIONS) == (
        b'{"index":0,"id":"a","text":"Paris.","finish_reason":"stop","stop_reason":null,'
        b'"usage":{"prompt_tokens":3,"completion_tokens":2,"cached_tokens":2},"error":null,"row_hash":"9f0c51e2a77b3d10"}\n'
    )


def test_an_error_record_to_the_byte():
    fault = RowFault(1, "b", 2, "in.jsonl", "invalid_json", "line 2, column 14: x", "03d1000000000000", {})
    assert fault_record(fault, OPTIONS) == (
        b'{"index":1,"id":"b","line":2,"text":null,"finish_reason":"error","stop_reason":null,"usage":null,'
        b'"error":{"code":"invalid_json","message":"line 2, column 14: x"},"row_hash":"03d1000000000000"}\n'
    )


def test_a_cancelled_record_keeps_its_data():
    record = json.loads(cancelled_record(row_of(tag=1), "--max-time 5 s is over", OPTIONS))
    assert record["finish_reason"] == "cancelled"
    assert record["error"] == {"code": "cancelled", "message": "--max-time 5 s is over"}
    assert record["extra"] == {"tag": 1}


def test_file_stands_only_with_several_inputs():
    several = RecordOptions(OPTIONS.token_bytes, several_inputs=True)
    assert "file" not in record_of()
    assert list(record_of(options=several))[:3] == ["index", "id", "file"]
    fault = RowFault(1, "b", 2, "in.jsonl", "invalid_json", "x", "0" * 16, {})
    assert list(json.loads(fault_record(fault, several)))[:4] == ["index", "id", "file", "line"]


def test_stop_reason_reasoning_and_extra():
    record = record_of(completion(finish=Finish(FinishReason.STOP, "END"), reasoning="hm"), row=row_of(tag=[1]))
    assert (record["stop_reason"], record["reasoning"], record["extra"]) == ("END", "hm", {"tag": [1]})


def test_on_demand_parts():
    logprobs = [TokenLogprob(65, -0.5, ((65, -0.5), (66, -math.inf)))]
    prompt = [TokenLogprob(66, -1.0)]
    options = RecordOptions(OPTIONS.token_bytes, token_ids=True)
    record = record_of(
        completion(logprobs=logprobs, prompt_logprobs=prompt),
        options=options,
        metrics={"ttft_s": 0.5},
    )
    assert record["token_ids"] == [65, 66]
    assert "logprobs" not in record
    assert record["metrics"] == {"ttft_s": 0.5}
    assert record["prompt_logprobs"][:2] == [None, None]
    assert record["prompt_logprobs"][2] == {"token": "B", "logprob": -1.0, "bytes": [66], "top_logprobs": []}


def asked_for_logprobs():
    top = ((65, -0.5), (200, -math.inf))
    one = completion(logprobs=[TokenLogprob(65, -0.5, top), TokenLogprob(66, -math.inf)])
    request = Request(RequestId(0), [1, 2, 3, 65, 66], 3, SamplingParams(logprobs=2), finish=STOP)
    request.logprobs = one.request.logprobs
    return Completion(request, "AB")


def test_logprobs_have_openais_shape_and_no_infinity():
    content = record_of(asked_for_logprobs())["logprobs"]["content"]
    assert content[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [200]}
    assert content[1] == {"token": "B", "logprob": -9999.0, "bytes": [66], "top_logprobs": []}


def test_choices_with_several_samples():
    record = record_of(completion("one"), completion("two", Finish(FinishReason.LENGTH), 1))
    assert record["text"] == "one"
    assert record["choices"] == [
        {"index": 0, "text": "one", "finish_reason": "stop", "stop_reason": None},
        {"index": 1, "text": "two", "finish_reason": "length", "stop_reason": None},
    ]
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2}


@pytest.mark.parametrize(
    ("message", "code", "shown"),
    [
        ("non_finite_logits: position 3", "non_finite_logits", "row 0: position 3"),
        ("invalid_parameter: logit_bias: no token is left", "invalid_parameter", "row 0: logit_bias: no token is left"),
        ("NaN: everywhere", "non_finite_logits", "row 0: NaN: everywhere"),
    ],
)
def test_a_row_that_failed_while_running(message, code, shown):
    record = record_of(completion(), completion("", Finish(FinishReason.ERROR, None, message), 1))
    assert record["error"] == {"code": code, "message": shown}
    assert (record["line"], record["text"], record["row_hash"]) == (1, None, "9f0c51e2a77b3d10")


def test_lines_are_single_lines_by_every_measure():
    line = json_line({"text": "a\u2028b\u2029c\x85d\ne\x0bf\x1cg\r"}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == "a\u2028b\u2029c\x85d\ne\x0bf\x1cg\r"


def test_strict_json():
    assert json.loads(json_line({"text": "a\ud800b"}))["text"] == "a\ufffdb"
    assert json_line({"text": "é😀"}) == '{"text":"é😀"}\n'.encode()
    with pytest.raises(ValueError):
        json_line({"x": math.nan})


def test_openai_chat_line_is_what_the_client_library_reads():
    row = row_of(openai=OpenAIEnvelope("c1", "chat"))
    line = record_of(asked_for_logprobs(), completion("two", sample=1), row=row)
    assert list(line) == ["id", "custom_id", "response", "error", "index", "row_hash"]
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("c1", None, 200)
    chat = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert [choice.message.content for choice in chat.choices] == ["AB", "two"]
    assert chat.choices[0].logprobs.content[0].top_logprobs[0].bytes == [65]
    assert (chat.usage.total_tokens, chat.usage.prompt_tokens_details.cached_tokens) == (7, 0)


def test_openai_completion_line_is_what_the_client_library_reads():
    row = row_of(openai=OpenAIEnvelope("c1", "completion"))
    body = record_of(asked_for_logprobs(), row=row)["response"]["body"]
    parsed = OpenAICompletion.model_validate(body, strict=True)
    assert parsed.choices[0].text == "AB"
    assert parsed.choices[0].logprobs.text_offset == [0, 1]
    assert parsed.choices[0].logprobs.top_logprobs[0] == {"A": -0.5, "\ufffd": -9999.0}


def test_openai_error_line():
    fault = RowFault(4, "c1", 5, "in.jsonl", "prompt_too_long", "m", "0" * 16, {}, OpenAIEnvelope("c1", "chat"))
    line = json.loads(fault_record(fault, OPTIONS))
    assert (line["custom_id"], line["response"], line["index"]) == ("c1", None, 4)
    assert line["error"] == {"code": "prompt_too_long", "message": "m"}


@given(
    index=st.integers(0, 2**40),
    id=st.one_of(st.none(), st.integers(), st.text(max_size=12)),
    text=st.text(max_size=30),
    finish=st.builds(
        Finish,
        st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
        st.one_of(st.none(), st.integers(), st.text(max_size=5)),
    ),
)
@example(index=0, id='"\\\u2028\ud800', text="\x00\x1f\x7f\x85\u2029\ud83d", finish=Finish(FinishReason.STOP, "\ud800"))
def test_the_short_way_to_a_plain_record_gives_the_same_bytes(index, id, text, finish):
    row, plain = row_of(index, id), completion(text, finish)
    assert row_record(row, [plain], OPTIONS) == json_line(_native(row, [plain], OPTIONS, None))
