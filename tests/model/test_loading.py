"""Loading: what is refused by name before weights are read, what `auto` becomes, and what the program learns of a model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from contbatch_cli.config import ModelConfig
from contbatch_cli.errors import UsageError
from contbatch_cli.model.loading import context_limit, load_model, read_config, resolve_device, resolve_dtype
from tests.model.tiny import VOCAB_SIZE, one_thread, random_model

__all__ = ["one_thread"]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def tiny_llama(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=VOCAB_SIZE, **{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes})


def write_config(directory, **values):
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama in bfloat16, in two shards, with EOS ids in both places."""
    directory = tmp_path_factory.mktemp("model")
    model = random_model(tiny_llama())
    model.config.eos_token_id = 7
    model.generation_config.eos_token_id = [9, 7]
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    return directory, model


def test_a_sharded_bfloat16_model(saved):
    directory, model = saved
    assert len(list(directory.glob("*.safetensors"))) > 1
    loaded = load_model(directory, ModelConfig(device="cpu"))
    assert not loaded.model.training
    assert (loaded.dtype, loaded.dtype_choice) == (torch.float32, "float32")
    assert "bfloat16" in loaded.dtype_choice.reason
    wanted = {name: weight.float() for name, weight in model.state_dict().items()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.model.state_dict().items())
    assert loaded.layers == ((4, 2, 8, 8),) * 3
    assert loaded.windows == (None,) * 3
    assert (loaded.vocab_size, loaded.num_embeddings, loaded.context.tokens) == (VOCAB_SIZE, VOCAB_SIZE, 256)
    assert loaded.eos_token_ids == (7, 9)
    assert loaded.attention_choice in ("cpu", "native")


def test_a_wished_dtype_is_taken(saved):
    assert load_model(saved[0], ModelConfig(device="cpu", dtype="bfloat16")).model.dtype == torch.bfloat16


def test_missing_weights_are_one_clear_line(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    with pytest.raises(UsageError, match="the weights in .* cannot be loaded"):
        load_model(tmp_path, ModelConfig(device="cpu"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5For.* encoder-decoder"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* recurrent"),
        ({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}, "JambaForCausalLM .* recurrent"),
        ({"model_type": "gemma3", "vision_config": {"hidden_size": 8}}, "vision inputs; choose the text-only"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "ViTModel .*no text generator"),
        ({"model_type": "newest"}, "'newest', which the installed transformers does not know"),
        ({"model_type": "mine", "architectures": ["MineLM"], "auto_map": {"AutoConfig": "x.Y"}}, "trust_remote_code=true"),
    ],
)
def test_refused_by_name_before_weights_are_read(tmp_path, values, reason):
    with pytest.raises(UsageError, match=reason):
        load_model(write_config(tmp_path, **values), ModelConfig(device="cpu"))


def test_a_class_that_the_probe_refuses_needs_no_weights(tmp_path):
    with pytest.raises(UsageError, match="FalconForCausalLM cannot be run here"):
        load_model(write_config(tmp_path, model_type="falcon", architectures=["FalconForCausalLM"]), ModelConfig(device="cpu"))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_config(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="config.json"):
        read_config(tmp_path)


def test_devices():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="model.device: 'gpu' is not one of auto, cpu, cuda, cuda:N"):
        resolve_device("gpu")
    with pytest.raises(UsageError, match="'cuda:99' is not here"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(
    ("wanted", "device", "stored", "chosen"),
    [
        ("auto", CPU, torch.bfloat16, "float32"),
        ("auto", CPU, None, "float32"),
        ("bfloat16", CPU, torch.float32, "bfloat16"),
        ("auto", CUDA, torch.bfloat16, "bfloat16"),
        ("auto", CUDA, "float16", "float16"),
        ("auto", CUDA, None, "float32"),
        ("auto", CUDA, torch.float64, "bfloat16"),
    ],
)
def test_dtypes(wanted, device, stored, chosen):
    choice = resolve_dtype(wanted, device, stored)
    assert choice == chosen and choice.reason


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, **more}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (tiny_llama(), 256),
        (tiny_llama(rope_parameters=rope("linear", factor=2.0)), 256),
        (tiny_llama(rope_parameters=rope("dynamic", factor=2.0)), 256),
        (tiny_llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=256)), 1024),
        (tiny_llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)), 256),
        (
            tiny_llama(
                rope_parameters=rope(
                    "longrope",
                    short_factor=[1.0] * 4,
                    long_factor=[2.0] * 4,
                    factor=4.0,
                    original_max_position_embeddings=64,
                )
            ),
            64,
        ),
        (AutoConfig.for_model("gpt2", n_positions=77), 77),
        (AutoConfig.for_model("gemma3_text", max_position_embeddings=512), 512),
    ],
)
def test_context_limits(config, tokens):
    limit = context_limit(config)
    assert limit.tokens == tokens and limit.reason
