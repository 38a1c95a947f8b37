"""Makes a loaded model fast on a CPU, in place: decoder layers run as kernels, other linears are packed, each weight has one copy.

This goes layer by layer, so that beside the finished ones there is at no time more than a few layers' worth of weights in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.memory import release_unused
from contbatch_cli.model.native_layer import NativeDecoderLayer, swap_layer
from contbatch_cli.model.packed_linear import NativeLinear, PackedEmbedding, ShortEmbedding, pack_linears
from contbatch_cli.units import counted

RELEASE_EVERY = 8
"""Layers after which the memory of their old weights is given back: both copies of these are held until then."""


class Packing(NamedTuple):
    """What was done to a model. `num_layers` decoder layers run in one call each; `num_linears` other weights are packed.

    `dtypes` are those in which the compiled kernels hold the weights: bfloat16 where that is all of them. `is_whole` tells whether all
    decoder layers and the LM head run as kernels.
    """

    num_layers: int
    num_linears: int
    dtypes: frozenset[torch.dtype] = frozenset()
    is_whole: bool = False

    def __str__(self) -> str:
        library = cpu_kernels.library()
        kind = "oneDNN" if library is None else "compiled kernels"
        if torch.uint8 in self.dtypes:
            kind += ", int8"
        elif library is not None and library.uses_amx:
            kind += ", AMX"
        if self.dtypes == {torch.bfloat16}:
            kind += ", weights in 16 bits as stored"
        return f"{counted(self.num_layers, 'layer')} native, {counted(self.num_linears, 'weight')} packed ({kind})"


def pack_model(model: PreTrainedModel, backend: str, is_int8: bool = False, dtype: torch.dtype = torch.float32) -> Packing:
    """Pack a model that lies on a CPU and runs with that attention backend. The original weights are given up.

    Weights that were left as stored, in bfloat16, become `dtype`, that of the arithmetic, before they are packed. With `is_int8`, which
    needs the compiled kernels and a float32 model, the weights of all linear layers are rounded to 8 bits; an embedding stays as it
    was, also where the LM head has its weight.
    """
    assert not is_int8 or cpu_kernels.library() is not None
    num_layers = num_linears = 0
    layers = getattr(getattr(model, "model", None), "layers", None)
    for index in range(len(layers) if isinstance(layers, nn.ModuleList) else 0):
        _widen(layers[index], dtype)
        if backend == "cpu_native" and swap_layer(model, layers, index, is_int8):
            num_layers += 1
        else:
            num_linears += pack_linears(layers[index], is_int8)
        if index % RELEASE_EVERY == RELEASE_EVERY - 1:
            release_unused(torch.device("cpu"))
    is_tied = _has_plain_embedding(model) and _is_tied(model)
    if _has_plain_embedding(model) and (is_int8 or not is_tied):
        _keep_short(model, dtype)
    _widen(model, dtype)
    num_linears += pack_linears(model, is_int8)
    if is_tied and not is_int8 and isinstance(head := model.get_output_embeddings(), NativeLinear):
        model.set_input_embeddings(PackedEmbedding(head))
    release_unused(torch.device("cpu"))
    is_whole = isinstance(layers, nn.ModuleList) and num_layers == len(layers)
    is_whole = is_whole and isinstance(model.get_output_embeddings(), NativeLinear)
    return Packing(num_layers, num_linears, frozenset(_packed_dtypes(model)), is_whole)


def _packed_dtypes(model: nn.Module) -> Iterator[torch.dtype]:
    for module in model.modules():
        if isinstance(module, NativeLinear):
            yield module.packed.panels.dtype
        elif isinstance(module, NativeDecoderLayer):
            yield from (weight.panels.dtype for weight in module.packed)


def _widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Make `dtype` of the weights that are shorter, exactly."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)


def _has_plain_embedding(model: PreTrainedModel) -> bool:
    """Whether ids are looked up and nothing more, and nobody (an adapter) listens."""
    embedding = model.get_input_embeddings()
    return type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding._forward_hooks


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the embedding has the LM head's very weight."""
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and model.get_input_embeddings().weight is head.weight


def _keep_short(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Leave an embedding as stored where that is shorter than `dtype`: rows are made longer as they are looked up."""
    weight = model.get_input_embeddings().weight
    if isinstance(weight, torch.Tensor) and weight.dtype.itemsize < dtype.itemsize:
        model.set_input_embeddings(ShortEmbedding(weight, dtype))
