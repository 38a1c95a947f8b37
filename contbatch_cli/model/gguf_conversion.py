"""Model files in other shapes made into a Hugging Face directory, once: run as a program of its own.

    python -m contbatch_cli.model.gguf_conversion gguf FILE.gguf OUT_DIR       weights in bfloat16, config, tokenizer
    python -m contbatch_cli.model.gguf_conversion tokenizer MODEL_DIR OUT_DIR  tokenizer.json for a directory without one

A process of its own keeps torch out of the caller and whatever the libraries print out of the caller's standard output.
A refusal is one line on standard error and exit status 2. OUT_DIR exists and is empty.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from contbatch_cli.errors import UsageError
from contbatch_cli.model.gguf_tokenizer import Metadata, build_tokenizer, special_token

_END_MARKS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>")


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF file. Raises UsageError for a file that is not one, or is cut short."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UsageError(f"{path} is not a whole GGUF file: {error}") from error
    metadata["tensor_names"] = [tensor.name for tensor in reader.tensors]
    if "rope_freqs.weight" in metadata["tensor_names"]:
        metadata["rope_factors"] = next(t.data.tolist() for t in reader.tensors if t.name == "rope_freqs.weight")
    return metadata


def convert_gguf(path: Path, out_dir: Path) -> None:
    """Write the whole directory. The tokenizer comes first: it is what may be refused, and is quick."""
    metadata = read_metadata(path)
    if metadata.get("split.count", 1) > 1:
        raise UsageError(f"{path} is one of {metadata['split.count']} parts: merge them with llama.cpp's gguf-split first")
    build_tokenizer(metadata).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config(metadata))
    rope = rope_parameters(metadata)
    _save_weights(path, out_dir)
    if rope is not None:
        _update_json(out_dir / "config.json", {"rope_parameters": rope})
    _update_json(out_dir / "generation_config.json", {"eos_token_id": eos_token_ids(metadata)})


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`: the named special tokens and the chat template."""
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: special_token(metadata, role) for name, role in roles.items()}
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **named,
    }
    return {key: value for key, value in config.items() if value is not None}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """The ids that end a text: the file's end tokens, and control tokens that its chat template writes after a message."""
    roles = ("eos", "eot", "eom")
    named = [metadata[key] for key in (f"tokenizer.ggml.{role}_token_id" for role in roles) if key in metadata]
    template = metadata.get("tokenizer.chat_template") or ""
    tokens = metadata["tokenizer.ggml.tokens"]
    marks = [tokens.index(mark) for mark in _END_MARKS if mark in template and mark in tokens]
    return list(dict.fromkeys([*named, *marks]))


def rope_parameters(metadata: Metadata) -> dict[str, Any] | None:
    """`rope_parameters` for a file whose RoPE is scaled, None for a plain one.

    transformers' GGUF loader leaves the scaling out. Llama 3's is recovered from the stored factors and linear scaling from its
    factor; any other is refused, since the model would run with wrong positions.
    """
    architecture = str(metadata.get("general.architecture"))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    if "rope_factors" in metadata:
        return _llama3_rope(metadata["rope_factors"], theta)
    if kind == "none" or architecture == "gpt-oss":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata[f"{architecture}.rope.scaling.factor"]), "rope_theta": theta}
    raise UsageError(f"this GGUF file's RoPE scaling {kind!r} cannot be carried over: use the model's Hugging Face directory")


def _llama3_rope(factors: list[float], theta: float) -> dict[str, Any]:
    """Llama 3.1's and 3.2's scaling, recognised by computing its factors again (the published constants: 1, 4, 8192)."""
    low, high, original = 1.0, 4.0, 8192
    factor = max(factors)
    wavelengths = [6.283185307179586 * theta ** (i / len(factors)) for i in range(len(factors))]
    expected = [_llama3_factor(original / wavelength, factor, low, high) for wavelength in wavelengths]
    if any(abs(a - b) > 1e-3 * b for a, b in zip(factors, expected, strict=True)):
        raise UsageError("this GGUF file's rope_freqs are not Llama 3's: use the model's Hugging Face directory")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
        "rope_theta": theta,
    }


def _llama3_factor(turns: float, factor: float, low: float, high: float) -> float:
    """By how much Llama 3 slows a frequency that makes `turns` turns within the original context."""
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    smooth = (turns - low) / (high - low)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _save_weights(path: Path, out_dir: Path) -> None:
    """Weights in bfloat16 and the two configs, read and dequantised by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"transformers cannot read {path}: {_first_line(error)}") from error
    kinds = {parameter.dtype for parameter in model.parameters()}
    if kinds != {torch.bfloat16}:
        raise UsageError(f"transformers did not dequantise {path}: it holds {', '.join(sorted(map(str, kinds)))}")
    # Newer releases mark the model as quantised although its weights no longer are, and refuse to save it so.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out_dir)


def convert_tokenizer(model_dir: Path, out_dir: Path) -> None:
    """`tokenizer.json` and its config for a directory that keeps its tokenizer in another form."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, use_fast=True)
    except (ValueError, ImportError, OSError, KeyError) as error:
        raise UsageError(f"{model_dir} has no tokenizer.json, and making one failed: {_first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(f"{model_dir}: {type(tokenizer).__name__} has no tokenizer.json form")
    tokenizer.save_pretrained(out_dir)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _update_json(path: Path, changes: dict[str, Any]) -> None:
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write_json(path, {**value, **changes})


def main(arguments: list[str]) -> int:
    """Run one conversion; returns the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    kind, source, out_dir = arguments
    convert = {"gguf": convert_gguf, "tokenizer": convert_tokenizer}[kind]
    try:
        convert(Path(source), Path(out_dir))
    except UsageError as error:
        print(str(error), file=sys.stderr)
        return int(error.exit_status)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
