"""What a model is, read from its directory's JSON files and safetensors headers: no weights, no torch, no transformers."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from contbatch_cli.errors import UsageError

Json = dict[str, Any]
RopeLimit = Literal["none", "dynamic", "longrope"]

_HEADER_LIMIT_BYTES = 100_000_000
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096
# Keys that configs of these types may leave out because transformers' own default differs from hidden_size / heads.
_HEAD_DIM_DEFAULTS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma3": 256, "qwen3": 128, "mistral": None}
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling settings of `generation_config.json`; None where it says nothing. Greedy when `do_sample` is not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about a model that planning needs. Token counts in tokens, sizes in bytes.

    `max_context` is the most tokens of prompt and output together. `rope_limit_tokens` is set for RoPE kinds whose frequencies
    depend on the longest row of a batch: rows up to that many tokens are exact. `layer_windows` has one entry a layer: how many
    tokens it attends to, None for all of them. `wrapper` names the multimodal class whose text part this describes.
    """

    path: Path
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    hidden_size: int
    intermediate_size: int
    num_parameters: int
    weights_bytes: int
    weights_dtype: str
    is_all_bfloat16: bool
    fingerprint: str
    layer_windows: tuple[int | None, ...] = ()
    rope_type: str = "default"
    rope_limit_tokens: int | None = None
    wrapper: str | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers, as the model's attention sees them."""
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim) * dtype_bytes

    @classmethod
    def from_directory(cls, path: Path) -> ModelInfo:
        """Read a Hugging Face directory. Raises UsageError naming the file or key at fault."""
        outer = read_json(path / "config.json")
        if outer is None:
            raise UsageError(f"model directory {path} has no config.json")
        return _model_info(path, outer)


def read_json(path: Path) -> Json | None:
    """The object in a JSON file, None when there is no file. Raises UsageError when it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _model_info(path: Path, outer: Json) -> ModelInfo:
    config = _text_config(outer)
    model_type = str(config.get("model_type") or outer.get("model_type") or "")
    generation = read_json(path / "generation_config.json") or {}
    headers = dict(_safetensors_headers(path))
    heads = _integer(path, config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _integer(path, config, "hidden_size", "n_embd", "d_model")
    layers = _integer(path, config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    head_dim, v_head_dim = _head_dims(config, model_type, hidden, heads)
    rope_type, rope = _rope(config)
    context = _max_context(path, config, rope_type, rope)
    return ModelInfo(
        path=path,
        model_type=model_type,
        architectures=tuple(outer.get("architectures") or ()),
        vocab_size=_integer(path, config, "vocab_size"),
        max_context=context,
        eos_token_ids=eos_token_ids(path, outer, config, generation),
        bos_token_id=_bos_token_id(config, generation),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, heads),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        hidden_size=hidden,
        intermediate_size=_first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden,
        num_parameters=sum(_num_elements(tensor) for header in headers.values() for tensor in header.values()),
        weights_bytes=sum(_num_bytes(tensor) for header in headers.values() for tensor in header.values()),
        weights_dtype=_main_dtype(headers, config),
        is_all_bfloat16={tensor["dtype"] for header in headers.values() for tensor in header.values()} == {"BF16"},
        fingerprint=fingerprint(path),
        layer_windows=_layer_windows(config, model_type, layers),
        rope_type=rope_type,
        rope_limit_tokens=_rope_limit(rope_type, rope, config, context),
        wrapper=str(outer.get("model_type")) if config is not outer else None,
        generation=_generation_defaults(generation),
    )


# -- config.json


def _text_config(outer: Json) -> Json:
    """The text part of a multimodal config, else the config itself."""
    nested = outer.get("text_config") or outer.get("llm_config") or outer.get("language_config")
    return nested if isinstance(nested, dict) else outer


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _integer(path: Path, config: Json, *names: str) -> int:
    value = _first(config, *names)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{path / 'config.json'}: {names[0]} is {value!r}, not a number: this model cannot be planned for")
    return value


def _num_kv_heads(config: Json, heads: int) -> int:
    if config.get("multi_query"):
        return 1
    value = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv")
    return int(value) if value is not None else heads


def _head_dims(config: Json, model_type: str, hidden: int, heads: int) -> tuple[int, int]:
    """Sizes of a key and of a value. Multi-head latent attention (DeepSeek) hands keys of two parts to the attention."""
    if config.get("qk_nope_head_dim") is not None:
        key = int(config["qk_nope_head_dim"]) + int(config.get("qk_rope_head_dim") or 0)
        return key, int(config.get("v_head_dim") or key)
    head_dim = int(config.get("head_dim") or _HEAD_DIM_DEFAULTS.get(model_type) or hidden // heads)
    return head_dim, int(config.get("v_head_dim") or head_dim)


def _rope(config: Json) -> tuple[str, Json]:
    """The kind of RoPE scaling and its numbers, under the old key (`rope_scaling`) or the new one (`rope_parameters`)."""
    rope = _first(config, "rope_parameters", "rope_scaling") or {}
    per_layer = [value for value in rope.values() if isinstance(value, dict)]
    kinds = [(_rope_type(value), value) for value in (per_layer or [rope])]
    return next((kind for kind in kinds if kind[0] != "default"), kinds[0])


def _rope_type(rope: Json) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def _max_context(path: Path, config: Json, rope_type: str, rope: Json) -> int:
    """The model's context. Kinds that stretch a shorter original write either the stretched length or the factor.

    Llama 3 and long-rope configs state the stretched length; YaRN's is the original length times the factor; linear and dynamic
    scaling multiply the stated length (but Gemma 3's states the stretched one already). The rules are those of vLLM's config.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
    stated = _integer(path, config, *names)
    factor = float(rope.get("factor") or 1.0)
    if rope_type == "yarn":
        return max(stated, int(float(rope.get("original_max_position_embeddings") or stated) * factor))
    if rope_type in ("linear", "dynamic") and "gemma3" not in str(config.get("model_type")):
        return int(stated * factor)
    return stated


def _rope_limit(rope_type: str, rope: Json, config: Json, context: int) -> int | None:
    """Up to how many tokens a length-dependent RoPE keeps its first frequencies, None for kinds that never change."""
    if rope_type not in _LENGTH_DEPENDENT_ROPE:
        return None
    original = _first(rope, "original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original is None and rope_type == "dynamic":
        original = config.get("max_position_embeddings")
    return int(original) if original is not None else context


def _layer_windows(config: Json, model_type: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer in tokens, None where a layer sees everything."""
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", not model_type.startswith(("qwen2", "qwen3")))
    if window is None or not uses_window:
        return (None,) * layers
    kinds = config.get("layer_types") or _layer_kinds(config, model_type, layers)
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:layers])


def _layer_kinds(config: Json, model_type: str, layers: int) -> list[str]:
    """`layer_types` of configs older than that key, by the rule that each family's config class applies."""
    if model_type in ("gemma3_text", "gemma3") or config.get("sliding_window_pattern"):
        pattern = int(config.get("sliding_window_pattern") or 6)
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if model_type in ("gemma2", "gpt_oss"):
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if model_type.startswith(("qwen2", "qwen3")):
        first = int(config.get("max_window_layers") or layers)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return ["sliding_attention"] * layers


# -- special ids and sampling defaults


def eos_token_ids(path: Path, outer: Json, config: Json, generation: Json) -> tuple[int, ...]:
    """The union of all places that name an end token: generation_config's list, both configs, the tokenizer's own."""
    named = [_ids(source.get("eos_token_id")) for source in (generation, config, outer)]
    tokenizer = read_json(path / "tokenizer_config.json") or {}
    own = _token_id(path, _token_text(tokenizer.get("eos_token")))
    return tuple(dict.fromkeys([*(i for ids in named for i in ids), *([own] if own is not None else [])]))


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _bos_token_id(config: Json, generation: Json) -> int | None:
    ids = _ids(config.get("bos_token_id")) or _ids(generation.get("bos_token_id"))
    return ids[0] if ids else None


def _token_text(value: Any) -> str | None:
    """A token as `tokenizer_config.json` writes it: a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token_id(path: Path, text: str | None) -> int | None:
    """The id of an added token. Only that list of `tokenizer.json` is parsed: the vocabulary behind it may be 30 MB of JSON."""
    file = path / "tokenizer.json"
    if text is None or not file.is_file():
        return None
    content = file.read_text(encoding="utf-8")
    match = re.search(r'"added_tokens"\s*:\s*(?=\[)', content)
    added = json.JSONDecoder().raw_decode(content, match.end())[0] if match else []
    return next((int(token["id"]) for token in added if token["content"] == text), None)


def _generation_defaults(generation: Json) -> GenerationDefaults:
    """What `sampling.from_model` takes over. Without `do_sample` the model's authors meant greedy decoding; with it,
    a temperature or top_k that the file leaves out is transformers' default of 1.0 and 50."""
    if not generation.get("do_sample"):
        return GenerationDefaults(repetition_penalty=generation.get("repetition_penalty"))
    return GenerationDefaults(
        temperature=_first({"t": 1.0, **generation}, "temperature", "t"),
        top_p=generation.get("top_p"),
        top_k=_first({"k": 50, **generation}, "top_k", "k"),
        min_p=generation.get("min_p"),
        repetition_penalty=generation.get("repetition_penalty"),
    )


# -- safetensors


def _safetensors_headers(path: Path) -> Iterator[tuple[str, Json]]:
    """Each weight file's name and its tensors' `dtype`, `shape` and `data_offsets` (the safetensors format's JSON header)."""
    for file in _weight_files(path):
        yield file.name, _safetensors_header(file)


def _safetensors_header(file: Path) -> Json:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        text = stream.read(size) if 0 <= size <= _HEADER_LIMIT_BYTES else b""
    try:
        header: Json = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not a whole safetensors file: its header cannot be read") from error
    header.pop("__metadata__", None)
    return header


def num_adapter_parameters(path: Path) -> int:
    """How many numbers the weights of an adapter in PEFT's format hold; 0 where there are none to read."""
    file = path / "adapter_model.safetensors"
    return sum(map(_num_elements, _safetensors_header(file).values())) if file.is_file() else 0


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files that the index names, or all of the directory when there is no index."""
    index = read_json(path / "model.safetensors.index.json")
    if index is not None:
        files = [path / name for name in sorted(set(index.get("weight_map", {}).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UsageError(f"model directory {path} lacks {len(missing)} of {len(files)} weight files, first {missing[0]}")
        return files
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def _num_elements(tensor: Json) -> int:
    count = 1
    for size in tensor["shape"]:
        count *= size
    return count


def _num_bytes(tensor: Json) -> int:
    start, end = tensor["data_offsets"]
    return int(end - start)


def _main_dtype(headers: Mapping[str, Json], config: Json) -> str:
    """The dtype that most weights have, in torch's words; the config's when there are no weight files."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    sizes: dict[str, int] = {}
    for header in headers.values():
        for tensor in header.values():
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + _num_bytes(tensor)
    if not sizes:
        return str(_first(config, "dtype", "torch_dtype") or "float32")
    main = max(sizes, key=lambda name: sizes[name])
    return names.get(main, main.lower())


def fingerprint(path: Path) -> str:
    """16 hex digits that tell models apart: names and sizes of all model files, JSON contents, and samples of the weights.

    Reads a few hundred kilobytes however large the model is, and does not look at times, so that a copy has the same one.
    """
    digest = hashlib.sha256()
    patterns = ("*.json", "*.jinja", "*.model")
    for file in sorted({*_weight_files(path), *(p for pattern in patterns for p in path.glob(pattern))}):
        if file.name == "manifest.json":
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if file.suffix == ".safetensors":
                _add_samples(digest, stream, size)
            else:
                digest.update(stream.read())
    return digest.hexdigest()[:16]


def _add_samples(digest: Any, stream: Any, size: int) -> None:
    """The header and evenly spaced pieces of the data: fine-tunes of one model have equal headers."""
    length = min(struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0], _HEADER_LIMIT_BYTES)
    digest.update(stream.read(length))
    for i in range(_SAMPLES_PER_FILE):
        stream.seek(8 + length + i * max(size - 8 - length, 0) // _SAMPLES_PER_FILE)
        digest.update(stream.read(_SAMPLE_BYTES))
