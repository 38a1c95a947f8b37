"""Loading: what is refused by name before weights are read, what `auto` becomes, and what the program learns of a model."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig

from contbatch_cli import build, machine
from contbatch_cli.build import Inputs, open_model, prepared_rows
from contbatch_cli.config import ModelConfig
from contbatch_cli.config_files import load_config
from contbatch_cli.data.model_files import ModelInfo
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.data.rows import RowFault
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import attending
from contbatch_cli.model.loading import load_model, read_config, resolve_device, resolve_dtype
from contbatch_cli.model.packing import pack_model
from contbatch_cli.model.probe import ProbeStep, layers_of
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import write_model
from tests.model.tiny import VOCAB_SIZE, one_thread, random_model

__all__ = ["one_thread"]

PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
}
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
    assert (loaded.vocab_size, loaded.num_embeddings) == (VOCAB_SIZE, VOCAB_SIZE)
    assert loaded.eos_token_ids == (7, 9)
    assert loaded.attention_choice in ("cpu", "cpu_native")


def test_a_wished_dtype_is_taken(saved):
    assert load_model(saved[0], ModelConfig(device="cpu", dtype="bfloat16")).model.dtype == torch.bfloat16


@pytest.mark.parametrize("is_tied", [True, False])
@torch.inference_mode()
def test_weights_left_as_stored_compute_the_same_once_packed(is_tied, tmp_path):
    """In bfloat16 until they are packed, and in half the bytes from then on where the kernels are; the same numbers all the way."""
    random_model(tiny_llama(tie_word_embeddings=is_tied)).to(torch.bfloat16).save_pretrained(tmp_path)
    info = ModelInfo.from_directory(tmp_path)
    assert info.is_all_bfloat16 and build.stays_bfloat16(load_config().config, "cpu", info) is machine.has_kernels()
    plain = load_model(tmp_path, ModelConfig(device="cpu"))
    stored = load_model(tmp_path, ModelConfig(device="cpu"), as_stored=True)
    assert {weight.dtype for weight in stored.model.parameters()} == {torch.bfloat16}
    assert stored.dtype == stored.model.config.dtype == torch.float32 and stored.dtype_choice == plain.dtype_choice
    ids = torch.randint(0, VOCAB_SIZE, (1, 9))
    for loaded in (plain, stored):
        pack_model(loaded.model, "cpu", dtype=loaded.dtype)
    assert {weight.dtype for weight in stored.model.parameters()} == {torch.float32}
    assert torch.equal(plain.model.get_input_embeddings()(ids), stored.model.get_input_embeddings()(ids))
    logits = (loaded.model(input_ids=ids, use_cache=False).logits for loaded in (plain, stored))
    with attending(ProbeStep((9,))):
        assert torch.equal(*logits)


def test_a_model_that_rounds_its_constants_is_not_left_as_stored(tmp_path):
    """Gemma 3 scales its embeddings by a number that it keeps in the model's type."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 40, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    random_model(Gemma3TextConfig(vocab_size=VOCAB_SIZE, **sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, ModelConfig(device="cpu"), as_stored=True).model
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float32}
    assert model.get_input_embeddings().embed_scale.item() == pytest.approx(40**0.5, rel=1e-6)


def test_weights_of_several_types_are_not_read_as_stored(tmp_path):
    """In bfloat16 a float32 norm would be rounded."""
    model = random_model(tiny_llama()).to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    info = ModelInfo.from_directory(tmp_path)
    assert info.weights_dtype == "bfloat16" and not build.stays_bfloat16(load_config().config, "cpu", info)


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
        (tiny_llama(rope_parameters=rope("linear", factor=2.0)), 512),
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
def test_context_limits(tmp_path, config, tokens):
    """The most tokens of a row, from the config as transformers writes it."""
    config.save_pretrained(tmp_path)
    info = ModelInfo.from_directory(tmp_path)
    assert min(info.max_context, info.rope_limit_tokens or info.max_context) == tokens


def test_the_embedding_decides_which_ids_there_are(tmp_path):
    """A vocabulary beyond the tokenizer's may be given by its ids, up to the embedding's end."""
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, **{**config, "vocab_size": 300})
    model = random_model(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt_token_ids": [1, token]}) + "\n" for token in (258, 299, 300, 5000)))
    text_model = open_model(ModelConfig(name=str(tmp_path)))
    prepared = prepared_rows(load_config(), Inputs((str(rows),), InputOptions()), text_model, DeviceMemory("cpu", 1 << 30))
    found = [row.message if isinstance(row, RowFault) else row.requests[0].prompt_ids for row in prepared]
    assert found[:2] == [[1, 258], [1, 299]]
    assert found[2] == "row 2: token id 300 is beyond the model's embedding of 300"
    assert found[3] == "row 3: token id 5,000 is beyond the model's embedding of 300"
    loaded = load_model(tmp_path, ModelConfig(device="cpu"))
    assert loaded.num_embeddings == text_model.info.vocab_size == 300


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "no-such-method"])
def test_quantised_weights_that_cannot_be_loaded_are_refused_by_name(tmp_path, method):
    if method != "no-such-method" and find_spec(PACKAGES[method]) is not None:
        pytest.skip(f"{PACKAGES[method]} is installed")
    stored = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    config = tiny_llama(architectures=["LlamaForCausalLM"])
    write_config(tmp_path, **{**config.to_dict(), "quantization_config": stored})
    with pytest.raises(UsageError, match=rf"LlamaForCausalLM cannot be run: its weights are quantised \({method}\): .{{20}}"):
        load_model(tmp_path, ModelConfig(device="cpu"))


def test_quantised_weights_that_transformers_turns_back_are_run(tmp_path):
    """FP8 in blocks of 16, which on a CPU becomes the float weights that it stands for."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": False}
    model = random_model(tiny_llama(architectures=["LlamaForCausalLM"], **sizes))
    tensors, wanted = {}, {}
    for name, weight in model.state_dict().items():
        tensors[name] = wanted[name] = weight
        if "proj" in name:
            blocks = weight.reshape(weight.shape[0] // 16, 16, weight.shape[1] // 16, 16)
            scale = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            wanted[name] = (tensors[name].float().reshape(blocks.shape) * scale[:, None, :, None]).reshape(weight.shape)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    stored = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    write_config(tmp_path, **{**model.config.to_dict(), "quantization_config": stored})
    loaded = load_model(tmp_path, ModelConfig(device="cpu"))
    found = loaded.model.state_dict()
    difference = max(float((found[name].float() - weight).abs().max()) for name, weight in wanted.items())
    assert loaded.model.dtype == loaded.dtype == torch.float32 and difference < 1e-2
    assert layers_of(loaded.model, CPU)[0].shape == (4, 2, 8, 8)
