"""Kernels in C for float32 models on a CPU: packed matrix products, attention over the paged cache, a decoder layer in one call.
Weights lie in float32, in bfloat16 where that holds them exactly, or in 8 bits; products of the first two run on the processor's matrix
unit (AMX) where it has one.

`library()` gives them, or None where they cannot be had (no compiler, no OpenMP runtime in the process); whoever uses them has
another way. `CONTBATCH_KERNELS=off` in the environment turns them off, `CONTBATCH_KERNELS=no-amx` the matrix unit alone.

They run on the threads of the OpenMP runtime that torch has loaded, `torch.get_num_threads()` of them: a second pool would spin
against it. All results are independent of how many rows or threads take part, bit for bit.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from contbatch_cli import machine
from contbatch_cli.model.cpu_kernels.compiler import CompileError, library_path

logger = logging.getLogger(__name__)

STORE, ADD, SILU_GATE, GELU_TANH_GATE = range(4)
FLOAT32, BFLOAT16, INT8 = range(3)


class Linear(Structure):
    """Mirrors `Linear` of gemm.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
        *((name, c_int32) for name in ("k", "n", "epilogue", "format")),
    ]


class AttentionShape(Structure):
    """Mirrors `AttentionShape` of attention.h."""

    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "key_size", "value_size", "window")),
        *((name, c_float) for name in ("scaling", "softcap")),
        ("sinks", c_void_p),
    ]


class Step(Structure):
    """Mirrors `Step` of attention.h."""

    _fields_ = [
        *((name, c_int32) for name in ("num_tokens", "num_sequences", "block_size", "padding")),
        *((name, c_void_p) for name in ("slots", "query_starts", "context_lens", "table_starts", "tables", "order", "common")),
    ]


class Layer(Structure):
    """Mirrors `Layer` of layer.h."""

    _fields_ = [
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("eps", c_float),
        ("hidden", c_int32),
        ("rotary_size", c_int32),
        ("shape", AttentionShape),
    ]


class PackedWeight(NamedTuple):
    """A weight [N, K] as the kernels read it: panels of `panel` columns, the last filled up with zeros.

    float32: [ceil(N / panel), K, panel]. bfloat16, for weights that it holds exactly: [ceil(N / panel), K', panel, 2], K' pairs of
    inputs filled up with zeros. 8 bits: uint8 [ceil(N / panel), ceil(K / 4), panel, 4], and `scales`, one for each packed column.
    """

    panels: torch.Tensor
    shape: tuple[int, int]
    scales: torch.Tensor | None = None

    def linear(self, epilogue: int, bias: torch.Tensor | None = None, num_columns: int | None = None) -> Linear:
        """What the kernels take; `num_columns` of output where that is not N. The tensors must outlive it."""
        formats = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.uint8: INT8}
        addresses = (None if part is None else part.data_ptr() for part in (self.panels, bias, self.scales))
        return Linear(*addresses, self.shape[1], num_columns or self.shape[0], epilogue, formats[self.panels.dtype])

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight before it was packed, float32 [..., K] for indices [...]. Not for 8 bits."""
        assert self.scales is None
        panel, num_inputs = self.panels.shape[2], self.shape[1]
        rows = self.panels[indices // panel, :, indices % panel]
        return rows.flatten(indices.dim())[..., :num_inputs].float()


class _Form(NamedTuple):
    """What a weight is packed to: `values` as `pack` takes them, shape and type of the panels."""

    values: torch.Tensor
    pack: Callable[..., None]
    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: torch.Tensor | None = None


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as whole numbers of -127 to 127, int8, and the scale [N] of each row: symmetric, the largest at 127."""
    scales = weight.abs().amax(dim=1) / 127
    values = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return values.contiguous(), scales


def _checked(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().contiguous()
    assert weight.dtype == torch.float32 and weight.device.type == "cpu"
    return weight


class Library:
    """The compiled functions. `panel` is the width in columns of a packed weight's panels.

    `uses_amx` tells whether products in float32 run on the processor's matrix unit; packed weights are the same either way.
    """

    def __init__(self, path: Path, openmp: tuple[c_void_p, c_void_p, c_void_p] | None) -> None:
        self._handle = ctypes.CDLL(str(path))
        self.panel = int(self._handle.contbatch_panel())
        self._block = int(self._handle.contbatch_block())
        self._handle.contbatch_init(*(openmp or (None, None, None)))
        self.uses_amx = self.use_amx(machine.wanted_kernels() != "no-amx")
        for pack in (self._handle.contbatch_pack, self._handle.contbatch_pack16, self._handle.contbatch_pack_int8):
            pack.argtypes = [c_void_p, c_int, c_int, c_void_p]
            pack.restype = None
        self._handle.contbatch_fits_bfloat16.argtypes = [c_void_p, c_size_t]
        self._handle.contbatch_prefer_huge_pages.argtypes = [c_void_p, c_size_t]
        self._handle.contbatch_prefer_huge_pages.restype = None
        self.linear = self._handle.contbatch_linear
        self.linear.argtypes = [POINTER(Linear), c_void_p, c_int, c_void_p, c_void_p, c_int]
        self.attend = self._handle.contbatch_attend
        self.attend.argtypes = [POINTER(AttentionShape), POINTER(Step), *[c_void_p] * 7, c_int]
        self.order = self._handle.contbatch_order
        self.order.argtypes = [POINTER(Step), c_void_p, c_void_p]
        self.order.restype = None
        self.layer = self._handle.contbatch_layer
        self.layer.argtypes = [POINTER(Layer), POINTER(Step), *[c_void_p] * 6, c_int]

    def use_amx(self, wanted: bool) -> bool:
        """Turn the processor's matrix unit on or off; whether it is on then."""
        self.uses_amx = bool(self._handle.contbatch_use_amx(wanted))
        return self.uses_amx

    def pack(self, *weights: torch.Tensor, is_int8: bool = False) -> list[PackedWeight]:
        """Each weight [N, K], float32, as panels side by side in memory: in half the bytes where bfloat16 holds it exactly, or
        rounded to 8 bits with a scale for each output column."""
        forms = [self._form(_checked(weight), is_int8) for weight in weights]
        allocated = self._allocate([(form.shape, form.dtype) for form in forms])
        for form, panels in zip(forms, allocated, strict=True):
            form.pack(form.values.data_ptr(), *form.values.shape, panels.data_ptr())
        return [
            PackedWeight(panels, (weight.shape[0], weight.shape[1]), form.scales)
            for weight, form, panels in zip(weights, forms, allocated, strict=True)
        ]

    def _form(self, weight: torch.Tensor, is_int8: bool) -> _Form:
        num_panels, num_inputs = -(-weight.shape[0] // self.panel), weight.shape[1]
        if is_int8:
            values, scales = quantised(weight)
            shape: tuple[int, ...] = (num_panels, -(-num_inputs // 4), self.panel, 4)
            return _Form(values, self._handle.contbatch_pack_int8, shape, torch.uint8, self.whole_panels(scales))
        if self._handle.contbatch_fits_bfloat16(weight.data_ptr(), weight.numel()):
            shape = (num_panels, -(-num_inputs // self._block) * self._block // 2, self.panel, 2)
            return _Form(weight, self._handle.contbatch_pack16, shape, torch.bfloat16)
        return _Form(weight, self._handle.contbatch_pack, (num_panels, num_inputs, self.panel), torch.float32)

    def _allocate(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        """Uninitialised tensors side by side in one allocation, on huge pages where the system gives them."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self.prefer_huge_pages(memory)
        return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(memory.split(sizes), wanted, strict=True)]

    def whole_panels(self, values: torch.Tensor) -> torch.Tensor:
        """One value for each output column [N], filled up with zeros to whole panels."""
        return torch.nn.functional.pad(values.detach().float(), (0, -values.shape[0] % self.panel)).contiguous()

    def prefer_huge_pages(self, tensor: torch.Tensor) -> None:
        """Ask the system for huge pages under a tensor that nothing was written to yet: its reads then miss the TLB less."""
        self._handle.contbatch_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The kernels, compiled now if need be; None, with a line in the log, where they cannot be had."""
    if machine.wanted_kernels() == "off":
        logger.info("CPU kernels: turned off by CONTBATCH_KERNELS")
        return None
    openmp = _openmp()
    if openmp is None and torch.get_num_threads() > 1:
        logger.warning("CPU kernels: torch's OpenMP runtime was not found; going on without them")
        return None
    try:
        return Library(library_path(), openmp)
    except (CompileError, OSError) as error:
        logger.warning("CPU kernels: %s; going on without them", error)
        return None


def _openmp() -> tuple[c_void_p, c_void_p, c_void_p] | None:
    """The entry points of the OpenMP runtime that torch runs on: GNU's own, or Intel's and LLVM's under the same names."""
    for path in _openmp_paths():
        try:
            runtime = ctypes.CDLL(path)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            first, second, third = (ctypes.cast(getattr(runtime, name), c_void_p) for name in names)
        except (OSError, AttributeError):
            continue
        return first, second, third
    return None


def _openmp_paths() -> list[str]:
    """OpenMP runtimes loaded in this process, torch's own first."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    found = [path for path in paths if os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp"))]
    root = os.path.dirname(torch.__file__)
    return sorted(found, key=lambda path: (not path.startswith(root), path))
