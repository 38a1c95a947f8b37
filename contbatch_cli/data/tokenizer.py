"""Text to token ids and back, by the model's `tokenizer.json` alone: no torch, no transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from contbatch_cli.data.model_files import read_json
from contbatch_cli.errors import UsageError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """The byte behind each character of byte-level BPE (GPT-2's table): printable bytes as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A model's tokenizer. Ids that it does not know decode to nothing instead of failing.

    `special_tokens` maps the names of `tokenizer_config.json` (`bos_token`, ...) to their texts, for the chat template.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        # The library's thread pool would compete with the model's threads, and warns after a fork. A user's setting holds.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added_ids = frozenset(added)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load `tokenizer.json` and the special tokens of `tokenizer_config.json`. Raises UsageError when it cannot.

        What is put around a text is `tokenizer.json`'s rule; the config's `add_bos_token` does not count beside it, as in
        transformers 5.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"model directory {path} has no tokenizer.json: only rows of token ids can be run with it")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        # The library raises plain Exception for a file that it cannot parse.
        except Exception as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        config = read_json(path / "tokenizer_config.json") or {}
        special = _special_tokens(config, read_json(path / "special_tokens_map.json") or {})
        known = [token for token in special.values() if backend.token_to_id(token) is not None]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in dict.fromkeys(known)])
        return cls(backend, special)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are. The model's embedding may have more rows."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; by default with what the tokenizer itself puts around a text (a BOS, often nothing)."""
        # Without the offsets that `encode` adds it takes a sixth less.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Incomplete characters come out as U+FFFD, unknown ids as nothing."""
        known = list(ids)
        if known and not (min(known) >= 0 and max(known) < 1 << 32):
            known = [index for index in known if 0 <= index < 1 << 32]
        text: str = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding leaves this id out: unknown, or special when those are skipped."""
        return (skip_special_tokens and token_id in self.special_ids) or self._piece(token_id) is None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text, special tokens included; empty for an unknown id."""
        piece = self._piece(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            return piece_bytes(piece)
        if token_id in self._added_ids:
            return piece.encode()
        byte = fallback_byte(piece) if self.has_byte_fallback else None
        return bytes([byte]) if byte is not None else piece.replace(_SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token's text for people: bytes that are no whole character come out as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _piece(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    @cached_property
    def _decoder_types(self) -> tuple[str, ...]:
        decoder = self.backend.decoder
        if decoder is None:
            return ()
        state: dict[str, Any] = json.loads(decoder.__getstate__())
        return tuple(step["type"] for step in state.get("decoders", [state]))

    @property
    def is_byte_level(self) -> bool:
        """Whether decoding is nothing but joining the bytes that the tokens stand for."""
        return self._decoder_types == ("ByteLevel",)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are written as tokens of one byte each, `<0xE6>`."""
        return "ByteFallback" in self._decoder_types


_BYTE_ALPHABET = byte_alphabet()


def piece_bytes(piece: str) -> bytes:
    """Bytes of a byte-level token. A piece with a character outside the alphabet is plain text, as in the library's decoder."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte that a `<0xNN>` token stands for, None for any other token."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _special_tokens(config: dict[str, Any], fallback: dict[str, Any]) -> dict[str, str]:
    """The named special tokens, each a string or an object with `content`; `special_tokens_map.json` fills what is missing."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name) or fallback.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
