"""A `tokenizers` tokenizer from the metadata of a GGUF file, exact or refused. Imports no torch.

A GGUF file keeps the vocabulary and the merges but of the splitting rule only a name, `tokenizer.ggml.pre`. Text that is split
by another rule gets ids that the model never saw, silently; so the rule is built for the names below and any other is refused.
What a name means is defined by llama.cpp's vocabulary loader and by the `tokenizer.json` of the models it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from contbatch_cli.errors import UsageError

Metadata = Mapping[str, Any]


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_split() -> pre_tokenizers.PreTokenizer:
    """Digits one by one, then GPT-2's words."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3_split() -> pre_tokenizers.PreTokenizer:
    return _regex_split(_LLAMA3_SPLIT)


def _qwen2_split() -> pre_tokenizers.PreTokenizer:
    return _regex_split(_QWEN2_SPLIT)


BYTE_LEVEL_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_split,
    "smollm": _single_digits_split,
    "starcoder": _single_digits_split,
    "refact": _single_digits_split,
    "llama-bpe": _llama3_split,
    "llama3": _llama3_split,
    "llama-v3": _llama3_split,
    "qwen2": _qwen2_split,
}
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NFC_NAMES = frozenset({"qwen2"})
_SPM_ARCHITECTURES = frozenset({"llama"})


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that the file describes, ids as in the file. Raises UsageError for a kind that is not known exactly."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(metadata)
    else:
        raise UsageError(f"this GGUF file's tokenizer.ggml.model is {kind!r}; known are 'gpt2' and 'llama'. {_ADVICE}")
    _add_whole_tokens(tokenizer, metadata)
    _add_begin_and_end(tokenizer, metadata)
    return tokenizer


_ADVICE = "Use the model's Hugging Face directory instead."


def pre_tokenizer_name(metadata: Metadata) -> str:
    """The splitting rule of a byte-level vocabulary: the file's, or GPT-2's for a GPT-2 that names none."""
    name = metadata.get("tokenizer.ggml.pre")
    is_unnamed = name is None or name == "default"
    return "gpt-2" if is_unnamed and metadata.get("general.architecture") == "gpt2" else str(name)


def _byte_level_bpe(metadata: Metadata) -> Tokenizer:
    name = pre_tokenizer_name(metadata)
    if name not in BYTE_LEVEL_SPLITS:
        known = ", ".join(sorted(BYTE_LEVEL_SPLITS))
        raise UsageError(f"this GGUF file's tokenizer.ggml.pre {name!r} is not known exactly (known: {known}). {_ADVICE}")
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _LLAMA3_NAMES))
    if name in _NFC_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = BYTE_LEVEL_SPLITS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """SentencePiece's BPE as Llama 2 uses it: no words, spaces written as U+2581, unknown characters as bytes."""
    architecture = metadata.get("general.architecture")
    if architecture not in _SPM_ARCHITECTURES:
        raise UsageError(f"SentencePiece GGUF files of architecture {architecture!r} are not known exactly. {_ADVICE}")
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = list(_merges_by_score(vocab, scores))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(([normalizers.Prepend("\u2581")] if has_prefix else []) + spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else []))
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Every way to put a token together from two, best score of the result first: SentencePiece's order of merging."""
    for token in sorted(vocab, key=lambda token: (-scores[vocab[token]], vocab[token])):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        yield from sorted(
            ((left, right) for left, right in cuts if left in vocab and right in vocab),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens: neither is ever cut or joined."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    for token, kind in zip(tokens, types, strict=False):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and token:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED and token:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    if tokenizer.get_vocab_size(with_added_tokens=True) != size:
        raise UsageError(f"this GGUF file's vocabulary of {len(tokens)} tokens repeats a token. {_ADVICE}")


def special_token(metadata: Metadata, role: str) -> str | None:
    """The text of the file's `bos`, `eos`, `unknown`, `padding` or `eot` token, None when it has none."""
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def adds_bos(metadata: Metadata) -> bool:
    """Whether raw text starts with BOS: the file's flag, else yes for SentencePiece and Llama 3, as llama.cpp decides."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _add_begin_and_end(tokenizer: Tokenizer, metadata: Metadata) -> None:
    begin = special_token(metadata, "bos") if adds_bos(metadata) else None
    end = special_token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token") else None
    around = [token for token in (begin, end) if token is not None]
    template = [*([begin] if begin else []), "$A", *([end] if end else [])]
    if around:
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)]
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(template), special_tokens=ids)
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
