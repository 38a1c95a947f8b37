"""Text as it grows, and stop strings in it, over scripted tokens of the real tokenizer and of a SentencePiece one."""

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.data.detokenizer import IncrementalDetokenizer, StopStringRule, StopStrings
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.model.gguf_tokenizer import build_tokenizer
from tests.data.default_model import default_tokenizer
from tests.data.tiny_gguf import sentencepiece_metadata

TEXTS = [
    " leading space",
    "日本語の漢字、テスト。",
    "👩‍👩‍👧‍👦🇫🇷🏳️‍🌈 ok",
    "e\u0301a\u0308 ก็ด้วย नमस्ते",
    "mixed 漢 a👍b\n\tend ",
    "2024-11-29 <|im_end|> after",
]


@lru_cache(maxsize=1)
def sentencepiece_tokenizer():
    return Tokenizer(build_tokenizer(sentencepiece_metadata()))


def scripted(tokenizer, text):
    """Ids of a text, one for each byte where the tokenizer can: more cuts within characters than it makes itself."""
    if tokenizer.is_byte_level:
        alphabet = {tokenizer.token_bytes(i): i for i in range(17, 300) if len(tokenizer.token_bytes(i)) == 1}
        if all(bytes([b]) in alphabet for b in text.encode()):
            return [alphabet[bytes([b])] for b in text.encode()]
        return tokenizer.encode(text)
    return [3 + byte for byte in text.encode()]


def grow(tokenizer, ids, skip=True):
    """Push all ids, checking the promises on the way; returns the final text."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    so_far = ""
    for n, token_id in enumerate(ids):
        so_far += detokenizer.push(token_id)
        assert detokenizer.text == so_far
        assert tokenizer.decode(ids[: n + 1], skip) == so_far + detokenizer.pending()
    so_far += detokenizer.finish()
    assert detokenizer.text == so_far and detokenizer.pending() == ""
    return so_far


@pytest.mark.parametrize("make", [default_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_text_cut_at_every_place_never_shows_half_a_character(make, text):
    tokenizer = make()
    for ids in (tokenizer.encode(text), scripted(tokenizer, text)):
        whole = tokenizer.decode(ids)
        for end in range(len(ids) + 1):
            assert grow(tokenizer, ids[:end]) == tokenizer.decode(ids[:end])
            detokenizer = IncrementalDetokenizer(tokenizer)
            shown = "".join(detokenizer.push(i) for i in ids[:end])
            assert "\ufffd" not in shown and whole.startswith(shown)


@given(
    st.lists(
        st.one_of(st.integers(0, 60), st.integers(0, 49300), st.sampled_from([94, 95, 96, 120, 130, 200, 250])), max_size=40
    )
)
def test_any_ids_equal_decoding_at_once(ids):
    for skip in (True, False):
        assert grow(default_tokenizer(), ids, skip) == default_tokenizer().decode(ids, skip)


@given(st.lists(st.integers(0, 290), max_size=30))
def test_any_sentencepiece_ids_equal_decoding_at_once(ids):
    for skip in (True, False):
        assert grow(sentencepiece_tokenizer(), ids, skip) == sentencepiece_tokenizer().decode(ids, skip)


def test_text_appears_as_soon_as_it_is_certain():
    tokenizer = default_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(i) for i in tokenizer.encode("Hi 語 2")] == ["Hi", " ", "", "語", " ", "2"]


def test_a_long_text_costs_the_same_for_each_token():
    """The number of tokens decoded again does not grow with the text, for either kind of stream."""
    for tokenizer in (default_tokenizer(), sentencepiece_tokenizer()):
        counting = CountingTokenizer(tokenizer)
        ids = tokenizer.encode("hello world. " * 300, add_special_tokens=False) + [10**6] * 500 + [2] * 500
        detokenizer = IncrementalDetokenizer(counting)
        for token_id in ids:
            detokenizer.push(token_id)
        assert counting.num_decoded <= 6 * len(ids)


class CountingTokenizer:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


# -- stop strings


def first_complete_match(text, stops):
    """The obvious search: the shortest beginning of the text that ends with a stop string, cut before it (the longest)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def feed(stops, pieces):
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


@pytest.mark.parametrize("text", ["say ENDING now", "aaab", "xabcabd", "日本。語。", "e\u0301nd STOP", "no match at all", ""])
@pytest.mark.parametrize(
    "stops", [["END"], ["aab", "ab"], ["abcabd", "b"], ["。語"], ["\u0301"], ["STOP", "OP"], ["xyz", "end "]]
)
def test_stop_strings_do_not_depend_on_the_cuts(text, stops):
    expected = first_complete_match(text, stops)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert feed(stops, [text[:first], text[first:second], text[second:]]) == expected


@given(st.text("abc", max_size=14), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_strings_equal_the_obvious_search(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed(stops, pieces) == first_complete_match(text, stops)


def test_only_text_that_may_begin_a_stop_string_is_held_back():
    matcher = StopStrings(["\n\nQ:"])
    assert [matcher.push(piece) for piece in ["a", "b\n", "\n", "c", "\n\nQ"]] == ["a", "b", "", "\n\nc", ""]
    assert matcher.flush() == "\n\nQ" and matcher.flush() == ""


def generate(rule, ids, stop, prompt="Q: END", min_tokens=0, tokenizer=None):
    """Append ids one at a time as the scheduler does, asking the rule after each; returns the request as it ended."""
    tokenizer = tokenizer or default_tokenizer()
    sampling = SamplingParams(stop=tuple(stop), min_tokens=min_tokens, eos_token_ids=(2,))
    request = Request.from_prompt(RequestId(0), tokenizer.encode(prompt), sampling)
    for token_id in ids:
        request.token_ids.append(token_id)
        request.finish = rule(request)
        if request.finish is not None:
            break
    return request


@pytest.mark.parametrize("text", ["one END two", "日本。END 語", "👍END👍", "no stop here 日", "xEN", "eEND\u0301"])
@pytest.mark.parametrize("make", [default_tokenizer, sentencepiece_tokenizer])
def test_a_request_ends_at_its_stop_string(text, make):
    tokenizer = make()
    for ids in (tokenizer.encode(text, add_special_tokens=False), scripted(tokenizer, text)):
        rule = StopStringRule(tokenizer)
        request = generate(rule, ids, ["END"], tokenizer=tokenizer)
        expected, stop = first_complete_match(tokenizer.decode(ids), ["END"])
        assert rule.text(request) == expected
        assert request.finish == (Finish(FinishReason.STOP, "END") if stop else None)
        if stop:
            before = request.output_ids[:-1]
            assert "END" in tokenizer.decode(request.output_ids) and "END" not in tokenizer.decode(before)


def test_the_prompt_is_not_searched():
    tokenizer, rule = default_tokenizer(), StopStringRule(default_tokenizer())
    request = generate(rule, tokenizer.encode("D is fine"), ["END"], prompt="Q: EN")
    assert request.finish is None and rule.text(request) == "D is fine"


def test_text_leaves_out_the_token_that_ended_it():
    tokenizer, rule = default_tokenizer(), StopStringRule(default_tokenizer(), skip_special_tokens=False)
    for stop in ([], ["zzz"]):
        request = generate(rule, [*tokenizer.encode(" Paris."), 2], stop)
        request.finish = Finish(FinishReason.STOP)
        assert rule.text(request) == " Paris."
        request.finish = Finish(FinishReason.LENGTH)
        rule.forget(request.request_id)
        assert rule.text(request) == " Paris.<|im_end|>"
        rule.forget(request.request_id)


def test_state_is_rebuilt_when_absent():
    """A request that was preempted, or moved to another process, ends at the same token with the same text."""
    tokenizer = default_tokenizer()
    ids = tokenizer.encode("one two 日本 ENDING")
    expected = generate(StopStringRule(tokenizer), ids, ["NDI"])
    for moment in range(1, len(ids)):
        rule = StopStringRule(tokenizer)
        request = generate(rule, ids[:moment], ["NDI"])
        if request.finish is None:
            rule.forget(request.request_id)
            for token_id in ids[moment:]:
                request.token_ids.append(token_id)
                request.finish = rule(request)
                if request.finish:
                    break
        assert (request.finish, request.token_ids) == (expected.finish, expected.token_ids)
        assert rule.text(request) == "one two 日本 E"


def test_a_stop_string_before_min_tokens_does_not_count():
    tokenizer = default_tokenizer()
    ids = tokenizer.encode("1.2.3.4")
    rule = StopStringRule(tokenizer)
    request = generate(rule, ids, ["."], min_tokens=3)
    assert rule.text(request) == "1.2" and request.num_output_tokens == 4
    rule = StopStringRule(tokenizer)
    straddling = generate(rule, ids, [".2."], min_tokens=4)
    assert rule.text(straddling) == "1" and straddling.num_output_tokens == 4


def test_rows_without_stop_strings_keep_no_state():
    rule = StopStringRule(default_tokenizer())
    request = generate(rule, default_tokenizer().encode("hello 日本"), [])
    assert not rule._rows and rule.text(request) == "hello 日本" and not rule._rows
