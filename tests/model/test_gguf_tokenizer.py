"""Tokenizers from GGUF metadata: each splitting rule, whole special tokens, SentencePiece's merging order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.errors import UsageError
from contbatch_cli.model.gguf_conversion import eos_token_ids, rope_parameters, tokenizer_config
from contbatch_cli.model.gguf_tokenizer import build_tokenizer
from tests.data.tiny_gguf import SPECIAL, byte_level_metadata, sentencepiece_metadata


def pieces(tokenizer, text):
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


DIGITS_ALONE = ["Ġ", "1", "2", "3", "4", "Ġit", "'s", "Ġx", "=[]", "ĊĊĠĠ", "Ġy"]
SPLITS = {
    "smollm": DIGITS_ALONE,
    "starcoder": DIGITS_ALONE,
    "gpt-2": ["Ġ1234", "Ġit", "'s", "Ġx", "=[]", "ĊĊĠĠ", "Ġy"],
    "llama-bpe": ["Ġ", "123", "4", "Ġit", "'s", "Ġx", "=[]ĊĊ", "ĠĠ", "Ġy"],
    "qwen2": ["Ġ", "1", "2", "3", "4", "Ġit", "'s", "Ġx", "=[]ĊĊ", "ĠĠ", "Ġy"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_by_the_named_rule(pre):
    assert pieces(build_tokenizer(byte_level_metadata(pre)), " 1234 it's x=[]\n\n   y") == SPLITS[pre]


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", None])
def test_an_unknown_rule_is_refused_by_name(pre):
    with pytest.raises(UsageError, match=f"tokenizer.ggml.pre '{pre}' is not known exactly"):
        build_tokenizer(byte_level_metadata(pre))


def test_a_gpt2_need_not_name_its_rule():
    metadata = byte_level_metadata(None, **{"general.architecture": "gpt2"})
    assert pieces(build_tokenizer(metadata), " 1234") == ["Ġ1234"]


def test_special_and_added_tokens_are_one_id_each():
    tokenizer = build_tokenizer(byte_level_metadata())
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    for token in [*SPECIAL, "<think>"]:
        assert tokenizer.encode(f"hello{token}12").ids == [tokens.index(t) for t in ("hello", token, "1", "2")]
    assert tokenizer.decode([1, tokens.index("hello"), 2, tokens.index("<think>")]) == "hello<think>"


@pytest.mark.parametrize(("flag", "pre", "first"), [(True, "smollm", [1]), (False, "llama-bpe", []), (None, "llama-bpe", [1])])
def test_bos_follows_the_flag_and_llama_3_adds_it_by_default(flag, pre, first):
    tokenizer = build_tokenizer(byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": flag}))
    assert tokenizer.encode("h").ids[:-1] == first
    assert len(tokenizer.encode("h", add_special_tokens=False).ids) == 1


def sentencepiece_by_hand(metadata, text):
    """SentencePiece's BPE by definition: join the two neighbours whose union has the best score, the leftmost of equals."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = {token: scores[i] for i, token in enumerate(tokens) if i >= 259}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in score]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [[tokens.index(p)] if p in score else [3 + byte for byte in p.encode()] for p in parts]
    return [i for group in ids for i in group]


@given(st.text(alphabet="helowrd. éß漢", max_size=24))
def test_sentencepiece_merges_in_its_own_order(text):
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode(text, add_special_tokens=False).ids == sentencepiece_by_hand(metadata, text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_adds_bos_and_may_leave_out_the_space():
    tokenizer = build_tokenizer(sentencepiece_metadata())
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    bare = build_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.encode("hello").tokens == ["<s>", "he", "llo"]
    with pytest.raises(UsageError, match="'gemma2'"):
        build_tokenizer(sentencepiece_metadata(**{"general.architecture": "gemma2"}))
    with pytest.raises(UsageError, match="'bert'"):
        build_tokenizer(byte_level_metadata(**{"tokenizer.ggml.model": "bert"}))


def test_end_tokens_are_the_files_and_the_templates():
    assert eos_token_ids(byte_level_metadata()) == [2]
    assert eos_token_ids(byte_level_metadata(**{"tokenizer.ggml.eos_token_id": 0})) == [0, 2]
    assert tokenizer_config(byte_level_metadata())["eos_token"] == "<|im_end|>"


def test_scaled_rope_is_carried_over_or_refused():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=wanted)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = [500000.0 ** (-i / 32) for i in range(32)]
    factors = [a / b for a, b in zip(plain, scaled.tolist(), strict=True)]
    metadata = byte_level_metadata(**{"llama.rope.freq_base": 500000.0, "rope_factors": factors})
    assert rope_parameters(metadata) == pytest.approx(wanted)
    with pytest.raises(UsageError, match="not Llama 3's"):
        rope_parameters({**metadata, "rope_factors": [1.0, 2.0] * 16})
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_parameters(byte_level_metadata(**linear)) == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(UsageError, match="'yarn'"):
        rope_parameters(byte_level_metadata(**{"llama.rope.scaling.type": "yarn"}))
    assert rope_parameters(byte_level_metadata()) is None
