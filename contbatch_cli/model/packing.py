"""Makes a loaded model fast on a CPU: decoder layers swapped for kernels, all other linears packed. In place."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.native_layer import swap_layers
from contbatch_cli.model.packed_linear import pack_linears


class Packing(NamedTuple):
    """What was done to a model. `num_layers` decoder layers run in one call each; `num_linears` other weights are packed."""

    num_layers: int
    num_linears: int
    is_int8: bool = False

    def __str__(self) -> str:
        kind = "compiled kernels" if cpu_kernels.library() is not None else "oneDNN"
        if self.is_int8:
            kind += ", int8"
        return f"{self.num_layers} layers native, {self.num_linears} weights packed ({kind})"


def pack_model(model: nn.Module, backend: str, is_int8: bool = False) -> Packing:
    """Pack a model that lies on a CPU and runs with that attention backend. The original weights are given up.

    With `is_int8`, which needs the compiled kernels and a float32 model, the weights of all linear layers are rounded to 8 bits.
    """
    assert not is_int8 or cpu_kernels.library() is not None
    num_layers = swap_layers(model, is_int8) if backend == "cpu_native" else 0
    return Packing(num_layers, pack_linears(model, is_int8), is_int8)
