"""Makes a loaded model fast on a CPU: decoder layers swapped for kernels, all other linears packed. In place."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.native_layer import swap_layers
from contbatch_cli.model.packed_linear import pack_linears
from contbatch_cli.units import counted


class Packing(NamedTuple):
    """What was done to a model. `num_layers` decoder layers run in one call each; `num_linears` other weights are packed."""

    num_layers: int
    num_linears: int

    def __str__(self) -> str:
        kind = "compiled kernels" if cpu_kernels.library() is not None else "oneDNN"
        return f"{counted(self.num_layers, 'layer')} native, {counted(self.num_linears, 'weight')} packed ({kind})"


def pack_model(model: nn.Module, backend: str) -> Packing:
    """Pack a model that lies on a CPU and runs with that attention backend. The original weights are given up."""
    num_layers = swap_layers(model) if backend == "cpu_native" else 0
    return Packing(num_layers, pack_linears(model))
