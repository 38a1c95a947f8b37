"""Rows of several LoRA adapters, and of none, in one batch: each as alone with its adapter merged into the base weights."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from contbatch_cli.config import ModelConfig
from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.request import GREEDY, RequestId, SamplingParams
from contbatch_cli.errors import UsageError
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.attention import ATTENTION_NAME
from contbatch_cli.model.loading import load_model
from contbatch_cli.model.lora import Adapters, read_checkpoint
from contbatch_cli.model.packing import pack_model
from tests.model.test_families import LOGIT_TOLERANCE, LogitsRecorder
from tests.model.tiny import CPU, VOCAB_SIZE, Setting, draw_rows, draw_setting, one_thread, random_model, run_rows, shapes_of
from tests.oracle import Comparison, greedy_alone

__all__ = ["one_thread"]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
# Rank, alpha and the ends of the names that are changed; the second leaves out one layer.
ADAPTERS = {
    "llama": {"a": (4, 8, "q_proj o_proj"), "b": (2, 6, "layers.1.mlp.down_proj v_proj"), "c": (8, 8, "proj lm_head")},
    "qwen3": {"a": (4, 8, "q_proj o_proj"), "b": (2, 6, "layers.1.mlp.down_proj v_proj"), "c": (8, 8, "proj")},
    "gpt2": {"a": (4, 8, "c_attn"), "b": (2, 6, "h.1.attn.c_proj c_fc"), "c": (8, 8, "c_attn c_proj c_fc")},
}


def linears(model, ends):
    """The linears whose names end so, with the sizes of input and output."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name.endswith(tuple(ends.split())):
            shape = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
            yield name, tuple(shape)


def write_adapter(path, model, rank, alpha, ends, seed=0, **config):
    """A random adapter in the format that PEFT writes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_in, num_out) in linears(model, ends):
        own = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(own, num_in, generator=generator) * num_in**-0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(num_out, own, generator=generator) * 0.3
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name, _ in linears(model, ends)})
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return path


def merged(model, path):
    """A copy of the model with the adapter added to its weights, by the definition."""
    changed = copy.deepcopy(model)
    checkpoint = read_checkpoint("x", path)
    for name, part in checkpoint.parts().items():
        module = changed.get_submodule(name)
        change = part.scale * part.up @ part.down
        with torch.no_grad():
            module.weight += change.T if isinstance(module, Conv1D) else change
    return changed


def load(model, paths):
    return Adapters(model, {name: read_checkpoint(name, path) for name, path in paths.items()}, torch.float32)


@pytest.mark.parametrize("model_type", MODELS)
def test_mixed_rows_equal_each_row_with_its_adapter_merged(tmp_path, model_type):
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **MODELS[model_type])
    model = random_model(config)
    paths = {
        name: write_adapter(tmp_path / name, model, *what, seed=seed)
        for seed, (name, what) in enumerate(ADAPTERS[model_type].items())
    }
    rng = random.Random(model_type)
    rows = draw_rows(rng, 16, 20, 8)
    owners = [rng.choice([None, "a", "b", "c"]) for _ in rows]
    assert {None, "a", "b", "c"} == set(owners)
    alone = {name: merged(model, path) for name, path in paths.items()} | {None: copy.deepcopy(model)}
    for one in alone.values():
        one.set_attn_implementation("eager")
    oracles = [
        greedy_alone(alone[owner], prompt, params.max_tokens) for owner, (prompt, params) in zip(owners, rows, strict=True)
    ]
    unchanged = [greedy_alone(alone[None], prompt, params.max_tokens) for prompt, params in rows]
    num_changed = sum(a.token_ids != b.token_ids for a, b in zip(oracles, unchanged, strict=True))
    assert num_changed > len(rows) // 3, "the adapters change nothing"
    longest = max(len(prompt) + params.max_tokens for prompt, params in rows)
    comparison, logits, num_preemptions = Comparison(), LogitsRecorder(model), 0
    adapters, shapes = load(model, paths), shapes_of(model)
    logits.steps.clear()
    for number in range(8):
        setting = draw_setting(rng, longest, prefix_caching=number % 2 == 0)
        ran = run_rows(model, shapes, rows, setting, owners, adapters)
        num_preemptions += ran.num_preemptions
        for i, oracle in enumerate(oracles):
            comparison.add(f"{setting} row {i}", ran.outputs[i], oracle)
        logits.compare(ran, oracles)
    comparison.check(f"{model_type}, {num_preemptions} preemptions, logits off by {logits.difference:.1g}")
    assert logits.difference < LOGIT_TOLERANCE
    assert num_preemptions > 0


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 20}},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
    ],
)
def test_the_merge_agrees_with_peft(tmp_path, config):
    peft = pytest.importorskip("peft")
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    model.set_attn_implementation("eager")
    path = write_adapter(tmp_path / "a", model, 4, 8, "q_proj v_proj", **config)
    ids = torch.arange(20)[None]
    ours = merged(model, path)(input_ids=ids).logits
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(path)).eval()(input_ids=ids).logits
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float((ours - model(input_ids=ids).logits).abs().max()) > 1e-2


def test_what_peft_writes_is_read(tmp_path):
    """A checkpoint that PEFT itself saved, loaded with its model."""
    peft = pytest.importorskip("peft")
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False, layers_to_transform=[1])
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    loaded = load_model(tmp_path / "base", ModelConfig(), {"x": tmp_path / "adapter"})
    assert loaded.adapters.names == {"x"}
    parts = read_checkpoint("x", tmp_path / "adapter").parts()
    assert len(parts) == 7 and all(".layers.1." in name and part.scale == 1.5 for name, part in parts.items())


def sequence(row, adapter, length, logits):
    return ScheduledSequence(
        RequestId(row),
        (1,) * length,
        0,
        tuple(range(row * 10, row * 10 + length)),
        length,
        GREEDY,
        True,
        logits,
        adapter=adapter,
    )


def test_rows_are_grouped_by_adapter(tmp_path):
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    adapters = load(model, {name: write_adapter(tmp_path / name, model, 2, 2, "q_proj") for name in "ab"})
    runs = [("a", 2), ("a", 1), (None, 3), ("b", 1), (None, 1), ("b", 2)]
    sequences = tuple(sequence(i, name, length, Logits.LAST) for i, (name, length) in enumerate(runs))
    batch = ScheduledBatch(sequences, 10)
    plan = adapters.plan(sequences, flatten(batch, 1), CPU)
    found = [(name, rows if isinstance(rows, slice) else rows.tolist()) for name, rows in plan.tokens]
    assert found == [("a", slice(0, 3)), ("b", [6, 8, 9])]
    found = [(name, rows if isinstance(rows, slice) else rows.tolist()) for name, rows in plan.logit_rows]
    assert found == [("a", slice(0, 2)), ("b", [3, 5])]
    plain = (sequence(0, None, 3, Logits.LAST),)
    assert adapters.plan(plain, flatten(ScheduledBatch(plain, 3), 1), CPU) is None
    with pytest.raises(AssertionError, match="names adapters"):
        other = (sequence(0, "z", 1, Logits.LAST),)
        adapters.plan(other, flatten(ScheduledBatch(other, 1), 1), CPU)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"trainable_token_indices": [1], "target_parameters": ["x"]}, "target_parameters, trainable_token_indices are set"),
        ({"some_day": 1}, "some_day is set"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "rank 4 in A and 4 in B, adapter_config.json says 5"),
        ({"rank_pattern": {"layers.0.*q_proj": 3}}, "model.layers.0.self_attn.q_proj has rank 4"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, config, reason):
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    path = write_adapter(tmp_path / "x", model, 4, 8, "q_proj")
    written = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**written, **config}))
    with pytest.raises(UsageError, match=f"model.adapters.french.*{reason}"):
        load(model, {"french": path})


def test_files_that_are_no_adapter_are_refused_by_name(tmp_path):
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    with pytest.raises(UsageError, match="holds no adapter_config.json"):
        read_checkpoint("x", tmp_path)
    path = write_adapter(tmp_path / "x", model, 4, 8, "q_proj")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"is missing \(adapter_model.bin is there"):
        read_checkpoint("x", path)
    (path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="adapter_model.safetensors cannot be read"):
        load(model, {"x": path})
    save_file({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, path / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="it holds base_model.model.lm_head.weight"):
        load(model, {"x": path})


def test_an_adapter_for_another_model_is_refused_by_name(tmp_path):
    llama = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"])
    model = random_model(llama)
    gpt2 = random_model(AutoConfig.for_model("gpt2", vocab_size=VOCAB_SIZE, **MODELS["gpt2"]))
    with pytest.raises(UsageError, match=r"x does not fit LlamaForCausalLM: there is no transformer.h.0.attn.c_attn"):
        load(model, {"x": write_adapter(tmp_path / "gpt2", gpt2, 2, 2, "c_attn")})
    wide = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **{**MODELS["llama"], "intermediate_size": 64}))
    with pytest.raises(UsageError, match="down_proj takes 48 to 32, the adapter's 64 to 32"):
        load(model, {"x": write_adapter(tmp_path / "wide", wide, 2, 2, "down_proj")})


def test_samples_of_one_prompt_keep_their_adapter(tmp_path):
    """A prefix cached by the base or another adapter is never taken over."""
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **MODELS["llama"]))
    paths = {name: write_adapter(tmp_path / name, model, 4, 32, "proj", seed=seed) for seed, name in enumerate("ab")}
    adapters = load(model, paths)
    prompt = list(range(20))
    rows = [(prompt, SamplingParams(max_tokens=6))] * 6
    owners = [None, "a", "b", "a", None, "b"]
    setting = draw_setting(random.Random(0), 400, block_size=3, prefix_caching=True, token_budget=24)
    ran = run_rows(model, shapes_of(model), rows, setting, owners, adapters)
    model.set_attn_implementation("eager")
    for i, owner in enumerate(owners):
        one = merged(model, paths[owner]) if owner else model
        assert ran.outputs[i] == greedy_alone(one, prompt, 6).token_ids
    model.set_attn_implementation(ATTENTION_NAME)
    assert [ran.requests[i].num_cached_tokens for i in range(6)] == [0, 0, 0, 18, 18, 18]


@pytest.mark.parametrize("backend", ["cpu", "cpu_native"])
def test_a_packed_model_keeps_its_adapters(tmp_path, backend):
    """Layers that an adapter changes are not swapped for kernels; packed linears, alone or fused, hand the hooks on."""
    model = random_model(AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **{**MODELS["llama"], "num_hidden_layers": 3}))
    paths = {
        "a": write_adapter(tmp_path / "a", model, 4, 8, "layers.0.self_attn.k_proj layers.1.mlp.up_proj lm_head"),
        "b": write_adapter(tmp_path / "b", model, 2, 8, "layers.0.mlp.down_proj layers.0.self_attn.v_proj", seed=1),
    }
    rows = draw_rows(random.Random(3), 9, 20, 8)
    owners = [None, "a", "b"] * 3
    alone = {name: merged(model, path) for name, path in paths.items()} | {None: copy.deepcopy(model)}
    for one in alone.values():
        one.set_attn_implementation("eager")
    shapes, adapters = shapes_of(model), load(model, paths)
    packing = pack_model(model, backend)
    if cpu_kernels.library() is not None:
        assert packing.num_layers == (1 if backend == "cpu_native" else 0) and packing.num_linears > 4
    comparison = Comparison()
    ran = run_rows(model, shapes, rows, Setting(40, 9, 4, 200, backend=backend), owners, adapters)
    for i, ((prompt, params), owner) in enumerate(zip(rows, owners, strict=True)):
        comparison.add(f"row {i}", ran.outputs[i], greedy_alone(alone[owner], prompt, params.max_tokens))
    comparison.check(backend)
