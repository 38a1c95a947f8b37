"""The families that run, one line each: a tiny random model whose tokens equal each row alone through `generate`, and whose
logits are those of transformers' eager attention. The README's table is made from FAMILIES.

Windows, soft caps and expert counts are small enough to decide tokens at these lengths.
"""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig

from contbatch_cli.core.request import SamplingParams
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import ATTENTION_NAME
from contbatch_cli.model.probe import check_class, layers_of
from tests.model.tiny import CPU, VOCAB_SIZE, draw_rows, draw_setting, one_thread, random_model, run_rows, shapes_of, windows_of
from tests.oracle import Comparison, greedy_alone

__all__ = ["one_thread"]

NUM_SETTINGS = 10
NUM_ROWS = 15
LOGIT_TOLERANCE = 1e-4

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
WINDOW = {"sliding_window": 5}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# name in the README, transformers' model type, the tiny config
FAMILIES = {
    "Llama": ("llama", GROUPED),
    "Qwen3": ("qwen3", HEADS),
    "Gemma 2": ("gemma2", {**HEADS, **ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12}),
    "Gemma 3 (text)": ("gemma3_text", {**HEADS, **ALTERNATING, "query_pre_attn_scalar": 12}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "Phi-3": ("phi3", {**GROUPED, **WINDOW}),
    "Mixtral": ("mixtral", {**GROUPED, **WINDOW, "num_local_experts": 4}),
    "GPT-OSS": ("gpt_oss", {**HEADS, **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("deepseek_v2", {**MLA, "topk_method": "greedy"}),
    "DeepSeek-V3": ("deepseek_v3", MLA),
    "Mistral": ("mistral", {**GROUPED, **WINDOW}),
    "Qwen2": ("qwen2", {**GROUPED, **ALTERNATING, "use_sliding_window": True}),
    "Qwen2-MoE": ("qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": ("qwen3_moe", {**HEADS, **EXPERTS}),
    "Gemma": ("gemma", HEADS),
    "Phi": ("phi", GROUPED),
    "GPT-NeoX": ("gpt_neox", SIZES),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128}),
    "OPT": ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128}),
    "StableLM": ("stablelm", GROUPED),
    "OLMo 2": ("olmo2", GROUPED),
    "SmolLM3": ("smollm3", {**GROUPED, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "Granite": ("granite", {**GROUPED, "attention_multiplier": 0.2}),
    "Cohere": ("cohere", {**GROUPED, "logit_scale": 1.0}),
    "Starcoder2": ("starcoder2", {**GROUPED, **WINDOW}),
}


# The first version of transformers whose class goes through the attention interface, where that is later than what we need.
SINCE = {"GPT-J": "5.24"}


def config_of(name):
    model_type, values = FAMILIES[name]
    return AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **values)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    config = config_of(name)
    if Version(transformers.__version__) < Version(SINCE.get(name, "0")):
        with pytest.raises(UsageError, match="cannot be run here"):
            check_class(config)
        pytest.skip(f"{name} runs from transformers {SINCE[name]} on; {transformers.__version__} is here, and refuses it")
    check_class(config)
    model = random_model(config)
    rng = random.Random(name)
    rows = draw_rows(rng, NUM_ROWS, 20, 8)
    model.set_attn_implementation("eager")
    oracles = [greedy_alone(model, prompt, params.max_tokens) for prompt, params in rows]
    model.set_attn_implementation(ATTENTION_NAME)
    shapes, windows = shapes_of(model), windows_of(model)
    longest = max(len(prompt) + params.max_tokens for prompt, params in rows)
    comparison, logits, num_preemptions = Comparison(), LogitsRecorder(model), 0
    for number in range(NUM_SETTINGS):
        setting = draw_setting(rng, longest, block_size=(1, 3, 16)[number % 3], prefix_caching=number % 2 == 0)
        ran = run_rows(model, shapes, rows, setting, windows=windows if number % 4 else None)
        num_preemptions += ran.num_preemptions
        for i, oracle in enumerate(oracles):
            comparison.add(f"{setting} row {i}", ran.outputs[i], oracle)
        logits.compare(ran, oracles)
    comparison.check(f"{name}, {num_preemptions} preemptions, logits off by {logits.difference:.1g}")
    assert logits.difference < LOGIT_TOLERANCE
    assert num_preemptions > 0


class LogitsRecorder:
    """Keeps the logits of each step's rows, and compares them with the oracle's as far as the tokens agree."""

    def __init__(self, model):
        self.steps = []
        self.difference = 0.0
        model.register_forward_hook(lambda _, args, output: self.steps.append(output.logits[0]))

    def compare(self, ran, oracles):
        for plan, logits in zip(ran.plans, self.steps, strict=True):
            sampling = [s for s in plan.sequences if s.samples]
            for sequence, row in zip(sampling, logits, strict=True):
                oracle, place = oracles[sequence.request_id.row], sequence.end - sequence.num_prompt_tokens
                if ran.outputs[sequence.request_id.row][:place] == oracle.token_ids[:place]:
                    self.difference = max(self.difference, float((row - oracle.logits[place]).abs().max()))
        self.steps.clear()


def test_variants_come_from_the_layers():
    """Scale, window, soft cap, sinks and head sizes of each layer, as the model passes them."""
    calls = {name: layers_of(random_model(config_of(name)), CPU) for name in ("Gemma 2", "GPT-OSS", "DeepSeek-V3", "Qwen2")}
    gemma = [call.variant for call in calls["Gemma 2"]]
    assert [(v.sliding_window, v.softcap, round(v.scaling, 6)) for v in gemma] == [(5, 2.0, 0.288675), (None, 2.0, 0.288675)]
    assert [call.variant.sinks.shape for call in calls["GPT-OSS"]] == [torch.Size([4])] * 2
    assert {call.shape for call in calls["DeepSeek-V3"]} == {(4, 4, 12, 6)}
    assert [call.variant.sliding_window for call in calls["Qwen2"]] == [5, None]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("falcon", "a table of its own"),
        ("bloom", r"its 2 layers called it for layers \[\]"),
        ("bert", "logits are off by"),
        ("llama4_text", "logits are off by"),
        ("qwen3_next", r"its 2 layers called it for layers \[1\]"),
    ],
)
def test_a_class_that_cannot_be_run_is_refused_by_name(model_type, reason):
    config = AutoConfig.for_model(model_type)
    with pytest.raises(UsageError, match=f"(?i)model: {model_type.split('_')[0]}.* cannot be run here.*{reason}"):
        check_class(config)


def test_the_probe_leaves_the_random_state_alone():
    torch.manual_seed(4)
    before = torch.random.get_rng_state()
    check_class(config_of("Llama"))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic", "longrope"])
def test_rope_kinds(kind):
    """All kinds within the length to which they are limited: tokens as alone."""
    rope = {
        "linear": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        "dynamic": {"factor": 2.0},
        "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 2.0},
    }[kind]
    length = 32
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        **GROUPED,
        max_position_embeddings=64 if kind in ("yarn", "llama3", "longrope") else length,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 100.0,
            **rope,
            **({"original_max_position_embeddings": length} if kind == "longrope" else {}),
        },
    )
    model = random_model(config)
    rng = random.Random(kind)
    rows = [
        (prompt, SamplingParams(max_tokens=min(params.max_tokens, length - len(prompt))))
        for prompt, params in draw_rows(rng, 8, 24, 12)
    ]
    model.set_attn_implementation("eager")
    oracles = [greedy_alone(model, prompt, params.max_tokens) for prompt, params in rows]
    model.set_attn_implementation(ATTENTION_NAME)
    comparison = Comparison()
    for _ in range(3):
        ran = run_rows(model, shapes_of(model), rows, draw_setting(rng, length))
        for i, oracle in enumerate(oracles):
            comparison.add(f"row {i}", ran.outputs[i], oracle)
    comparison.check(kind)
