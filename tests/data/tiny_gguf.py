"""A tiny random Llama as a GGUF file, and the metadata of tokenizers of both kinds."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from contbatch_cli.data.tokenizer import byte_alphabet

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level_metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """The metadata, as read from a file, of a byte-level tokenizer with a few merges, digits among them."""
    merges = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ hello"]
    tokens = [*SPECIAL, *byte_alphabet(), "<think>"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3 if token in SPECIAL else 4 if token == "<think>" else 1 for token in tokens]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of a small Llama-2-like tokenizer: scores fall with the rank of the merge."""
    words = ["▁h", "he", "ll", "▁he", "llo", "▁hello", "lo", "▁w", "or", "wor", "▁wor", "ld", "▁world", "el", "hel"]
    letters = [*"▁helowrd.,!", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0 - i for i in range(len(letters))]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def write_tiny_gguf(path: Path, pre: str = "smollm", seed: int = 0) -> dict[str, Any]:
    """Write the file; returns its metadata."""
    metadata = byte_level_metadata(pre)
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(metadata["tokenizer.ggml.tokens"]))
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, shape in _shapes(len(metadata["tokenizer.ggml.tokens"])).items():
        writer.add_tensor(name, np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return metadata


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN)}
        block |= {"attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
        block |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes
