"""The torch-free tokenizer on the default model: fixed strings, special tokens, bytes, ids that nobody knows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.data.tokenizer import Tokenizer, byte_alphabet, piece_bytes
from contbatch_cli.errors import UsageError
from contbatch_cli.model.gguf_tokenizer import build_tokenizer
from tests.data.default_model import default_model_dir, default_tokenizer
from tests.data.tiny_gguf import sentencepiece_metadata

FIXED = {
    "In 2024, 3.14!": ["In", " ", "2", "0", "2", "4", ",", " ", "3", ".", "1", "4", "!"],
    "def f(x):\n    return x**2": ["def", " f", "(", "x", "):", "\n   ", " return", " x", "**", "2"],
    " Paris": [" Paris"],
    "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "\n", "hi", "<|im_end|>"],
}
TEXTS = [*FIXED, "日本語 漢字テスト", "👩‍👩‍👧 🇫🇷 hi", "e\u0301 a\u0308 ก็", "½ ٣٤ ²", "\t\r\n  x", "naïve café"]


@pytest.mark.parametrize("text", FIXED)
def test_fixed_strings_have_the_tokens_the_model_was_trained_on(text):
    tokenizer = default_tokenizer()
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == FIXED[text]


def test_cjk_and_emoji_ids_are_fixed():
    assert default_tokenizer().encode("日本語") == [23274, 115, 40993, 179, 120, 248]
    assert default_tokenizer().encode("👩 2024") == [10813, 235, 119, 216, 34, 32, 34, 36]


def test_each_special_token_is_one_id():
    tokenizer = default_tokenizer()
    assert tokenizer.special_ids == frozenset(range(17))
    for index in sorted(tokenizer.special_ids):
        assert tokenizer.encode("a" + tokenizer.token_text(index) + "1") == [
            *tokenizer.encode("a"),
            index,
            *tokenizer.encode("1"),
        ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.decode([1, 28, 2]) == ","
    assert tokenizer.decode([1, 28, 2], skip_special_tokens=False) == "<|im_start|>,<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(text):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model_dir())
    ids = default_tokenizer().encode(text)
    assert ids == theirs.encode(text)
    assert default_tokenizer().decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# The model's vocabulary has no piece for some control characters and for planes 4 to 15; like any BPE it leaves them out.
KNOWN_CHARACTERS = st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"])


@given(st.text(KNOWN_CHARACTERS))
def test_bytes_of_the_tokens_join_to_the_text(text):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text == tokenizer.decode(ids, skip_special_tokens=False)


def test_unknown_ids_decode_to_nothing():
    tokenizer = default_tokenizer()
    assert tokenizer.decode([49152, 28, 10**6, -1, 2**40]) == ","
    assert tokenizer.token_bytes(49152) == b"" == tokenizer.token_bytes(-1)
    assert tokenizer.is_skipped(49152, False) and not tokenizer.is_skipped(2, False) and tokenizer.is_skipped(2, True)


def test_sentencepiece_tokens_have_bytes_too():
    tokenizer = Tokenizer(build_tokenizer(sentencepiece_metadata()))
    ids = tokenizer.encode("hello 漢", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " hello 漢".encode()
    assert tokenizer.token_text(ids[0]) == " hello" and tokenizer.token_text(3 + 0xE6) == "\ufffd"


def test_the_byte_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert piece_bytes("Ġé") == b" \xe9" and piece_bytes("a b") == b"a b"


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_what_is_put_around_a_text_is_as_in_transformers(tmp_path, flags, begins_with_bos):
    from transformers import AutoTokenizer

    source = default_model_dir()
    config = json.loads((source / "tokenizer_config.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    if begins_with_bos:
        special = [("<|im_start|>", 1)]
        backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", special_tokens=special)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("5") == ([1] if begins_with_bos else []) + [37] == AutoTokenizer.from_pretrained(tmp_path).encode("5")
    assert ours.decode(ours.encode("5", add_special_tokens=False), skip_special_tokens=False) == "5"


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(UsageError, match="no tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="tokenizer.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_loading_and_encoding_import_no_torch():
    code = """
import sys, warnings
from pathlib import Path
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.data.chat_template import ChatTemplate
tokenizer = Tokenizer.from_directory(Path(sys.argv[1]))
ChatTemplate.from_directory(Path(sys.argv[1]), tokenizer.special_tokens).render([{"role": "user", "content": "hi"}])
tokenizer.encode("a")
import os
if os.fork() == 0:
    tokenizer.encode("a")
    os._exit(0)
os.wait()
assert not {"torch", "transformers"} & set(sys.modules)
"""
    command = [sys.executable, "-c", code, str(default_model_dir())]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (result.returncode, result.stderr) == (0, "")
