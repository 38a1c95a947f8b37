"""What a model is, from its files: against transformers' own configs, and on hand-made directories."""

import json

import pytest

from contbatch_cli.data.model_files import GenerationDefaults, ModelInfo, fingerprint
from contbatch_cli.errors import UsageError
from tests.data.default_model import default_model_dir

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


def info(path, files=None, **config):
    (path / "config.json").write_text(json.dumps({**BASE, **config}))
    for name, value in (files or {}).items():
        (path / name).write_text(json.dumps(value))
    return ModelInfo.from_directory(path)


def write_safetensors(path, tensors):
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.full(shape, value, dtype=torch.bfloat16) for name, (shape, value) in tensors.items()}, path)


def test_the_default_model():
    model = ModelInfo.from_directory(default_model_dir())
    assert (model.model_type, model.architectures, model.vocab_size) == ("llama", ("LlamaForCausalLM",), 49152)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size) == (30, 9, 3, 64, 576)
    assert (model.max_context, model.eos_token_ids, model.bos_token_id) == (8192, (2,), 1)
    assert (model.num_parameters, model.weights_bytes, model.weights_dtype) == (134_515_008, 269_030_016, "bfloat16")
    assert model.is_all_bfloat16
    assert model.kv_bytes_per_token(4) == 30 * 2 * 3 * 64 * 4
    assert model.layer_windows == (None,) * 30 and model.rope_limit_tokens is None


def test_eos_is_the_union_of_its_sources(tmp_path):
    added = [{"id": 7, "content": "<|end|>"}, {"id": 8, "content": "</s>"}]
    files = {
        "generation_config.json": {"eos_token_id": [5, 2]},
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>", "special": True}},
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": {"vocab": {"a": 0}}},
    }
    assert info(tmp_path, files).eos_token_ids == (5, 2, 7)
    assert info(tmp_path, {**files, "generation_config.json": {}}).eos_token_ids == (2, 7)
    nothing = {**files, "generation_config.json": {}, "tokenizer_config.json": {}}
    assert info(tmp_path, nothing, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("rope", "context", "kind", "limit"),
    [
        (None, 2048, "default", None),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 2048, "llama3", None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192, "yarn", None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, "yarn", None),
        ({"type": "linear", "factor": 2.0}, 4096, "linear", None),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, "dynamic", 2048),
        ({"type": "su", "original_max_position_embeddings": 512, "short_factor": [1.0]}, 2048, "longrope", 512),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, 2048, "default", None),
    ],
)
def test_the_context_follows_the_rope_kind(tmp_path, rope, context, kind, limit):
    for key in ("rope_scaling", "rope_parameters"):
        model = info(tmp_path, **{key: rope})
        assert (model.max_context, model.rope_type, model.rope_limit_tokens) == (context, kind, limit)


def test_layer_windows(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    assert info(tmp_path, sliding_window=16, layer_types=kinds).layer_windows == (16, None, 16, None)
    assert info(tmp_path, sliding_window=16, model_type="mistral").layer_windows == (16,) * 4
    assert info(tmp_path, sliding_window=16, model_type="qwen2").layer_windows == (None,) * 4
    qwen = info(tmp_path, sliding_window=16, model_type="qwen2", use_sliding_window=True, max_window_layers=3)
    assert qwen.layer_windows == (None, None, None, 16)


def family_configs():
    from transformers import AutoConfig

    small = {"num_hidden_layers": 8, "sliding_window": 16}
    for kind in (
        "llama",
        "gpt2",
        "gemma2",
        "gemma3_text",
        "qwen3",
        "phi3",
        "mixtral",
        "gpt_oss",
        "opt",
        "gpt_neox",
        "olmo2",
        "cohere2",
    ):
        yield kind, AutoConfig.for_model(kind, **(small if kind not in ("gpt2", "opt", "gpt_neox", "llama", "olmo2") else {}))
    yield "deepseek_v3", AutoConfig.for_model("deepseek_v3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def test_facts_equal_transformers_configs(tmp_path):
    for kind, config in family_configs():
        config.save_pretrained(tmp_path)
        model = ModelInfo.from_directory(tmp_path)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if kind == "deepseek_v3":
            head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
            assert model.v_head_dim == config.v_head_dim == 128
        expected = (config.num_hidden_layers, heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)
        assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == expected, kind
        assert (model.hidden_size, model.vocab_size) == (config.hidden_size, config.vocab_size), kind
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * model.num_layers
        if kind not in ("phi3", "mixtral"):
            windows = tuple(config.sliding_window if k == "sliding_attention" else None for k in kinds)
            assert model.layer_windows == windows, kind
        else:
            assert set(model.layer_windows) == {16}, kind


def test_older_configs_without_layer_types_get_the_same_windows(tmp_path):
    from transformers import AutoConfig

    for kind in ("gemma2", "gemma3_text", "gpt_oss"):
        config = AutoConfig.for_model(kind, num_hidden_layers=12, sliding_window=16)
        values = config.to_dict()
        expected = tuple(16 if k == "sliding_attention" else None for k in values.pop("layer_types"))
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert ModelInfo.from_directory(tmp_path).layer_windows == expected, kind


def test_a_multimodal_config_is_read_and_flagged(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "architectures": ["Llava"], "text_config": BASE}))
    model = ModelInfo.from_directory(tmp_path)
    assert (model.wrapper, model.model_type, model.hidden_size) == ("llava", "llama", 32)
    assert info(tmp_path).wrapper is None


def test_generation_defaults(tmp_path):
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    model = info(tmp_path, {"generation_config.json": sampled})
    assert model.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=50, repetition_penalty=1.1)
    assert info(tmp_path, {"generation_config.json": {"temperature": 0.6}}).generation == GenerationDefaults()


def test_weights_are_counted_over_shards_and_missing_ones_named(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"x": ((2, 3), 1.0)})
    write_safetensors(tmp_path / "b.safetensors", {"y": ((5,), 1.0)})
    write_safetensors(tmp_path / "other.safetensors", {"z": ((100,), 1.0)})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    model = info(tmp_path, {"model.safetensors.index.json": index})
    assert (model.num_parameters, model.weights_bytes) == (11, 22)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UsageError, match="lacks 1 of 2 weight files, first b.safetensors"):
        ModelInfo.from_directory(tmp_path)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(UsageError, match="no config.json"):
        ModelInfo.from_directory(tmp_path)
    with pytest.raises(UsageError, match="num_attention_heads is None"):
        info(tmp_path, num_attention_heads=None)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="holds a list"):
        ModelInfo.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        ModelInfo.from_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UsageError, match="model.safetensors is not a whole safetensors file"):
        info(tmp_path)


def test_the_fingerprint_tells_models_apart_and_copies_not(tmp_path):
    first, copy, tuned, renamed = (tmp_path / name for name in ("first", "copy", "tuned", "renamed"))
    for path, value, file in ((first, 1, "model"), (copy, 1, "model"), (tuned, 2, "model"), (renamed, 1, "weights")):
        path.mkdir()
        write_safetensors(path / f"{file}.safetensors", {"w": ((64, 64), float(value))})
        (path / "config.json").write_text(json.dumps(BASE))
    assert fingerprint(first) == fingerprint(copy)
    assert len({fingerprint(path) for path in (first, tuned, renamed)}) == 3
    before = fingerprint(first)
    (first / "config.json").write_text(json.dumps({**BASE, "rms_norm_eps": 1e-5}))
    assert fingerprint(first) != before
    (copy / "manifest.json").write_text("{}")
    assert fingerprint(copy) == before
