"""From a model directory to a model that is ready to run; what cannot be run is refused by name before weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from contbatch_cli.config import ModelConfig
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import ATTENTION_NAME, AttentionBackend, backend_named, resolve_backend
from contbatch_cli.model.kv_cache import LayerShape
from contbatch_cli.model.lora import Adapters, read_checkpoint
from contbatch_cli.model.probe import check_class, check_model, layers_of
from contbatch_cli.units import counted

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIXED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})


class Choice(str):
    """A resolved `auto` value's name, and why it was chosen."""

    reason: str

    def __new__(cls, value: str, reason: str) -> Choice:
        choice = super().__new__(cls, value)
        choice.reason = reason
        return choice


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, and what the rest of the program needs to know of it.

    `layers` and `windows` (None: all positions) are in the order of the layers. Token ids from `num_embeddings` on have no
    embedding. `eos_token_ids` is the union of generation_config's and config's; the tokenizer's is its reader's to add.
    `adapters` is what a runner needs for rows that name one, None when none were asked for.
    """

    model: Any
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    layers: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]
    vocab_size: int
    num_embeddings: int
    eos_token_ids: tuple[int, ...]
    device_choice: Choice
    dtype_choice: Choice
    attention_choice: Choice
    adapters: Adapters | None = None


def load_model(
    directory: Path, settings: ModelConfig, adapters: Mapping[str, Path] | None = None, as_stored: bool = False
) -> LoadedModel:
    """The model in `directory`, a Hugging Face directory with config.json and safetensors, and its LoRA adapters by name.

    `as_stored` is for a directory whose weights are all bfloat16: for a float32 model they then stay so, in half the memory, and
    `pack_model` makes float32 of them layer by layer before anything is computed with them.
    Raises UsageError, naming the model and the reason, for a directory that holds no model or one that cannot be run.
    transformers' own warnings and progress bars are silenced for the process.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = read_config(directory, settings.trust_remote_code)
    device_choice = resolve_device(settings.device)
    device = torch.device(device_choice)
    dtype_choice = resolve_dtype(settings.dtype, device, getattr(config, "dtype", None))
    attention_choice = Choice(*resolve_backend(settings.attention, device))
    refuse_quantisation(config, device)
    checkpoints = {name: read_checkpoint(name, path) for name, path in (adapters or {}).items()}
    is_checked = check_class(config, settings.trust_remote_code)
    model = _read_weights(directory, config, device, _DTYPES[dtype_choice], settings, as_stored)
    if not is_checked:
        check_model(model)
    calls = layers_of(model, device)
    return LoadedModel(
        model=model,
        config=config,
        device=device,
        dtype=_DTYPES[dtype_choice],
        backend=backend_named(attention_choice),
        layers=tuple(call.shape for call in calls),
        windows=tuple(call.variant.sliding_window for call in calls),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        num_embeddings=model.get_input_embeddings().weight.shape[0],
        eos_token_ids=eos_token_ids(directory, config),
        device_choice=device_choice,
        dtype_choice=dtype_choice,
        attention_choice=attention_choice,
        adapters=Adapters(model, checkpoints, _DTYPES[dtype_choice]) if checkpoints else None,
    )


def read_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The directory's config, of a kind that may be run. Raises UsageError, with the reason and what to do, if it is not."""
    values = _config_values(directory)
    name = (values.get("architectures") or [values.get("model_type") or "?"])[0]
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise _unknown_type(directory, name, model_type, values)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, TypeError, OSError, LookupError) as error:
        raise UsageError(f"model: {directory / 'config.json'} cannot be read: {error}") from error
    _refuse_kinds(name, config, values)
    return config


def _config_values(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"model: {directory} holds no config.json, so it is not a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"model: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"model: {path} is not a JSON object")
    return values


def _unknown_type(directory: Path, name: str, model_type: object, values: dict[str, Any]) -> UsageError:
    if "auto_map" in values:
        return UsageError(
            f"model: {name} needs the Python code that comes with its files; if you trust {directory}, "
            "set model.trust_remote_code=true"
        )
    return UsageError(
        f"model: {name} has the model type {model_type!r}, which the installed transformers does not know; "
        "a newer transformers may, or choose another model"
    )


def _refuse_kinds(name: str, config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Raises UsageError for the kinds of model that are not text decoders with attention alone."""
    parts = [key.removesuffix("_config") for key in ("vision_config", "audio_config", "speech_config") if values.get(key)]
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it is an encoder-decoder; only decoders run here", "choose a decoder-only model")
    if parts:
        raise _refused(name, f"it takes {' and '.join(parts)} inputs", "choose the text-only model of the same family")
    recurrent = sorted(set(getattr(config, "layer_types", None) or ()) - _FIXED_LAYERS)
    model_class = _class_of(config)
    if model_class is not None and getattr(model_class, "_is_stateful", False):
        raise _refused(name, "it has recurrent layers (Mamba or alike), whose state is no KV cache", "choose a transformer")
    if recurrent:
        raise _refused(name, f"it has layers of the kind {', '.join(recurrent)}", "choose a model with attention layers alone")
    if model_class is None and "AutoModelForCausalLM" not in values.get("auto_map", {}):
        raise _refused(name, "transformers has no text generator of its kind", "choose a causal language model")


def refuse_quantisation(config: PretrainedConfig, device: torch.device) -> None:
    """Raises UsageError, with transformers' own reason, for quantised weights that it cannot load on this device."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    values = stored if isinstance(stored, dict) else stored.to_dict()
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    method = values.get("quant_method") or "of no named method"
    try:
        quantizer = AutoHfQuantizer.from_config(values, pre_quantized=True)
        quantizer.validate_environment(device_map=None if device.type == "cpu" else {"": device}, weights_only=True)
    except (ImportError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].strip().rstrip(".") if str(error) else type(error).__name__
        advice = "install what it names, or choose the model without quantisation"
        raise _refused(name, f"its weights are quantised ({method}): {reason}", advice) from error


def _class_of(config: PretrainedConfig) -> Any:
    """transformers' own causal language model of the config's kind, None if it has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _refused(name: str, reason: str, advice: str) -> UsageError:
    return UsageError(f"model: {name} cannot be run: {reason}; {advice}")


def _read_weights(
    directory: Path,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    settings: ModelConfig,
    as_stored: bool = False,
) -> Any:
    """The model, in eval mode, or this rank's part of it. bfloat16 weights become float32 exactly, or, `as_stored`, stay so.

    A model that computes constants of its own in its dtype would have them rounded: it is not left as stored.
    """
    if as_stored and dtype == torch.float32:
        model = _read_weights(directory, config, device, torch.bfloat16, settings)
        model.config.dtype = dtype
        if all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point()):
            return model
        del model
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=True,
            **_placement(device, settings.tensor_parallel),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"model: the weights in {directory} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def _placement(device: torch.device, num_devices: int) -> dict[str, Any]:
    """Where transformers puts the weights: on a device, or split over those of the process group that we are in."""
    if num_devices > 1:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=num_devices)}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def resolve_device(wanted: str) -> Choice:
    """The device for `model.device`. Raises UsageError for one that is not there."""
    if wanted == "auto":
        found = torch.cuda.is_available()
        return Choice("cuda", "a CUDA device is there") if found else Choice("cpu", "there is no CUDA device")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"model.device: {wanted!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"model.device: {wanted!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = counted(torch.cuda.device_count(), "CUDA device")
        raise UsageError(f"model.device: {wanted!r} is not here; torch sees {there}")
    return Choice(wanted, "as configured")


def resolve_dtype(wanted: str, device: torch.device, stored: torch.dtype | str | None) -> Choice:
    """The dtype for `model.dtype`, `stored` being that of the weights."""
    if wanted != "auto":
        return Choice(wanted, "as configured")
    stored_name = str(stored).removeprefix("torch.") if stored is not None else "float32"
    if device.type == "cpu":
        return Choice("float32", f"on a CPU, for text that does not depend on the batch; weights stored as {stored_name}")
    if stored_name in _DTYPES:
        return Choice(stored_name, "as the weights are stored")
    return Choice("bfloat16", f"for weights stored as {stored_name}")


def eos_token_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Every end-of-sequence id that generation_config.json and config.json name, ascending."""
    sources = [getattr(config, "eos_token_id", None)]
    if (directory / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id)
    ids = [source if isinstance(source, (list, tuple)) else [source] for source in sources if source is not None]
    return tuple(sorted({int(token) for group in ids for token in group}))
