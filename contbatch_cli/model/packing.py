"""Makes a loaded model fast on a CPU, in place: decoder layers run as kernels, other linears are packed, each weight has one copy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.memory import release_unused
from contbatch_cli.model.native_layer import swap_layers
from contbatch_cli.model.packed_linear import NativeLinear, PackedEmbedding, pack_linears
from contbatch_cli.units import counted


class Packing(NamedTuple):
    """What was done to a model. `num_layers` decoder layers run in one call each; `num_linears` other weights are packed."""

    num_layers: int
    num_linears: int
    is_int8: bool = False

    def __str__(self) -> str:
        library = cpu_kernels.library()
        kind = "oneDNN" if library is None else "compiled kernels"
        if self.is_int8:
            kind += ", int8"
        elif library is not None and library.uses_amx:
            kind += ", AMX"
        return f"{counted(self.num_layers, 'layer')} native, {counted(self.num_linears, 'weight')} packed ({kind})"


def pack_model(model: PreTrainedModel, backend: str, is_int8: bool = False) -> Packing:
    """Pack a model that lies on a CPU and runs with that attention backend. The original weights are given up.

    With `is_int8`, which needs the compiled kernels and a float32 model, the weights of all linear layers are rounded to 8 bits; an
    embedding stays as it was, also where the LM head has its weight.
    """
    assert not is_int8 or cpu_kernels.library() is not None
    num_layers = swap_layers(model, is_int8) if backend == "cpu_native" else 0
    is_tied = _is_tied(model)
    packing = Packing(num_layers, pack_linears(model, is_int8), is_int8)
    if is_tied and not is_int8 and isinstance(head := model.get_output_embeddings(), NativeLinear):
        model.set_input_embeddings(PackedEmbedding(head))
    release_unused(torch.device("cpu"))
    return packing


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether a plain embedding that nobody (an adapter) listens to has the LM head's very weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = type(embedding) is nn.Embedding and type(head) is nn.Linear and embedding.max_norm is None
    return is_plain and embedding.weight is head.weight and not embedding._forward_hooks
