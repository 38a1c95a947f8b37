"""Can a model class be run, and what does its attention look like? Asked of the class itself, not of a list.

Two probes. `check_class`, before any weights are read, builds a tiny model of the class from a shrunken config and runs two
short sequences side by side: our attention must be called exactly once by each layer, and the logits must equal those of
transformers' own eager attention for each sequence alone. That is false for a class whose attention passes the interface by,
that masks beyond causality and a window, or that takes positions from anywhere but `position_ids`. `layers_of` runs one token
through the loaded model and reads each layer's shape and variant from the calls.

Shape legend: T tokens, H query heads, K kv heads, D and E head sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import ATTENTION_NAME, AttentionVariant, attending
from contbatch_cli.model.attention.reference import attend_one
from contbatch_cli.model.kv_cache import LayerShape

VOCAB_SIZE = 128
NUM_HEADS = 4
SEQUENCE_LENS = (7, 5)
WINDOW = 3
_TOLERANCE = {torch.float32: 1e-3}
_CLASS_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ImportError)
_AT_MOST = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
}


class AttentionCall(NamedTuple):
    """One layer's call of our attention."""

    layer_index: int
    shape: LayerShape
    variant: AttentionVariant


class ProbeStep:
    """A step without a cache: whole sequences side by side, attention by the oracle, every call recorded."""

    def __init__(self, sequence_lens: tuple[int, ...]) -> None:
        self.sequence_lens = list(sequence_lens)
        self.calls: list[AttentionCall] = []

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[2], value.shape[2])
        self.calls.append(AttentionCall(layer_index, shape, variant))
        parts = zip(*(tensor.split(self.sequence_lens) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend_one(q, k, v, variant) for q, k, v in parts]).to(query.dtype)


def check_class(config: PretrainedConfig, trust_remote_code: bool = False) -> bool:
    """Raises UsageError, with the reason, when models of the config's class cannot be run.

    False when no tiny model could be made of this config; then `check_model` is to be asked of the loaded one.
    """
    try:
        model = _build_tiny(config, trust_remote_code)
    except _CLASS_ERRORS as error:
        if error.args == (ATTENTION_NAME,):
            name = (getattr(config, "architectures", None) or [config.model_type])[0]
            raise _refusal(name, "it looks its attention up in a table of its own") from error
        return False
    check_model(model)
    return True


def check_model(model: Any) -> None:
    """The same question to a model that was built with our attention. Raises UsageError when it cannot be run."""
    name, device = type(model).__name__, model.device
    num_ids = min(VOCAB_SIZE, model.config.vocab_size)
    ids = torch.randint(0, num_ids, (1, sum(SEQUENCE_LENS)), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        logits, calls = _run_ours(model, name, ids)
        called = sorted(call.layer_index for call in calls)
        if called != list(range(model.config.num_hidden_layers)):
            raise _refusal(name, f"its {model.config.num_hidden_layers} layers called it for layers {called}")
        model.set_attn_implementation("eager")
        eager = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(SEQUENCE_LENS, dim=1)], dim=1)
        model.set_attn_implementation(ATTENTION_NAME)
    difference = float((logits - eager).abs().max() / eager.abs().max().clamp(min=1.0))
    if not difference <= _TOLERANCE.get(logits.dtype, 0.1):
        raise _refusal(name, f"its logits are off by {difference:.2g} from those of its own attention")


def layers_of(model: torch.nn.Module, device: torch.device) -> tuple[AttentionCall, ...]:
    """Each layer's attention, in the order of the layers, from one token through the loaded model."""
    step = ProbeStep((1,))
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.inference_mode(), attending(step):
        model(input_ids=ids, position_ids=ids, use_cache=False)
    calls = tuple(sorted(step.calls, key=lambda call: call.layer_index))
    assert [call.layer_index for call in calls] == list(range(len(calls))), "a layer without exactly one attention call"
    return calls


def _refusal(name: str, reason: str) -> UsageError:
    return UsageError(
        f"model: {name} cannot be run here: its attention does not go through transformers' attention interface as needed "
        f"({reason}); choose a text decoder such as Llama, Qwen, Mistral, Gemma or GPT-2"
    )


def _run_ours(model: Any, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[AttentionCall]]:
    """Logits of both sequences in one flat batch, and the calls made."""
    step = ProbeStep(SEQUENCE_LENS)
    positions = torch.cat([torch.arange(length) for length in SEQUENCE_LENS]).unsqueeze(0).to(ids.device)
    rows = torch.arange(ids.shape[1], device=ids.device)
    try:
        with attending(step):
            output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    except _CLASS_ERRORS as error:
        raise _refusal(name, f"{type(error).__name__}: {error}") from error
    return output.logits, step.calls


def _build_tiny(config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """A small random model of the class, float32 on the CPU; the global random state stays as it was."""
    options = {"attn_implementation": ATTENTION_NAME, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shrink(config), **options).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """The same kind of model with few layers, one of each type, few heads of the same size, and small everything else."""
    values = config.to_dict()
    for name, limit in _AT_MOST.items():
        _lower(config, values, name, limit)
    _shrink_heads(config, values)
    _shrink_layers(config, values)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = None
    values.pop("quantization_config", None)
    return type(config).from_dict(values)


def _key(config: PretrainedConfig, name: str) -> str:
    """The config's own key for one of transformers' common names."""
    key: str = config.attribute_map.get(name, name)
    return key


def _lower(config: PretrainedConfig, values: dict[str, Any], name: str, limit: int) -> None:
    key = _key(config, name)
    if isinstance(values.get(key), int) and not isinstance(values[key], bool):
        values[key] = min(values[key], limit)


def _shrink_heads(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """NUM_HEADS heads of the model's own head size, grouped as the model groups them: all, some or one kv head."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if not isinstance(num_heads, int):
        return
    values[_key(config, "num_attention_heads")] = NUM_HEADS
    values[_key(config, "hidden_size")] = NUM_HEADS * head_size
    if "word_embed_proj_dim" in values:
        values["word_embed_proj_dim"] = NUM_HEADS * head_size
    if isinstance(num_kv_heads, int):
        values[_key(config, "num_key_value_heads")] = NUM_HEADS if num_kv_heads == num_heads else min(num_kv_heads, 2)


def _shrink_layers(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Two layers at least, the first of each type; lists with an entry a layer are cut alike."""
    num_layers = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or [])
    kept = sorted({types.index(kind) for kind in types}) or [0]
    kept = sorted({*kept, *range(min(2, num_layers))}) if len(kept) < 2 else kept
    for key, value in values.items():
        if isinstance(value, list) and len(value) == num_layers:
            values[key] = [value[i] for i in kept]
    values[_key(config, "num_hidden_layers")] = len(kept)
