"""The compiled kernels: equal to torch and to the oracle, independent of batch, chunks and threads, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import byref

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.request import GREEDY, RequestId
from contbatch_cli.model import cpu_kernels, native_layer
from contbatch_cli.model.attention import AttentionVariant, CachedStep, attending, cpu_native, reference, resolve_backend
from contbatch_cli.model.cpu_kernels import compiler
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.native_layer import NativeDecoderLayer
from contbatch_cli.model.packing import pack_model
from contbatch_cli.model.probe import layers_of
from tests.model.tiny import random_model

CPU = torch.device("cpu")
LIBRARY = cpu_kernels.library()
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="no C compiler, or no OpenMP runtime")


@pytest.fixture(params=[False, True], ids=["vectors", "amx"])
def unit(request):
    """Products by vector instructions, or on the matrix unit where the processor has one."""
    before = LIBRARY.uses_amx
    if LIBRARY.use_amx(request.param) is not request.param:
        pytest.skip("no AMX here")
    yield
    LIBRARY.use_amx(before)


@pytest.fixture(params=["float32", "bfloat16"])
def drawn(request):
    """Draws weights: any, or those that bfloat16 holds exactly, which are packed in half the bytes."""
    dtype = getattr(torch, request.param)

    def draw(*shape):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype).float()
        assert {packed.panels.dtype for packed in LIBRARY.pack(weight, weight)} == {dtype}
        return weight

    return draw


def linear(weight, bias, x, epilogue=cpu_kernels.STORE, residual=None, columns=None, threads=2):
    (packed,) = LIBRARY.pack(weight)
    n = columns or weight.shape[0]
    padded = None if bias is None else torch.nn.functional.pad(bias, (0, -bias.shape[0] % LIBRARY.panel))
    described = packed.linear(epilogue, padded, n)
    out = torch.full((x.shape[0], n), float("nan"))
    added = None if residual is None else residual.data_ptr()
    LIBRARY.linear(byref(described), x.data_ptr(), x.shape[0], out.data_ptr(), added, threads)
    return out


@needs_kernels
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (31, 64), (33, 17), (96, 200), (960, 576), (64, 3000)])
def test_linear_agrees_and_rows_do_not_depend_on_each_other(n, k, unit, drawn):
    generator = torch.Generator().manual_seed(n)
    weight, bias, x = drawn(n, k), *(torch.randn(*size, generator=generator) for size in ((n,), (150, k)))
    residual = torch.randn(150, n, generator=generator)
    whole = linear(weight, bias, x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), atol=1e-5 * k**0.5 + 1e-5, rtol=1e-5)
    torch.testing.assert_close(linear(weight, bias, x, cpu_kernels.ADD, residual), whole + residual)
    for count in (1, 2, 6, 7, 13, 14, 15, 16, 17, 32, 33, 64):
        for threads in (1, 2):
            assert torch.equal(linear(weight, bias, x[:count].contiguous(), threads=threads), whole[:count])


@needs_kernels
@pytest.mark.parametrize("size", [1, 16, 40])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates_agree(size, kind, unit, drawn):
    gate, up, x = drawn(size, 24), drawn(size, 24).flip(0), 3 * torch.randn(19, 24)
    weight = native_layer._interleaved(torch.cat([gate, up]), LIBRARY.panel // 2)
    epilogue = cpu_kernels.SILU_GATE if kind == "silu" else cpu_kernels.GELU_TANH_GATE
    gated = x @ gate.T
    active = torch.nn.functional.silu(gated) if kind == "silu" else torch.nn.functional.gelu(gated, approximate="tanh")
    torch.testing.assert_close(linear(weight, None, x, epilogue, columns=size), active * (x @ up.T), atol=1e-4, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("k", [40, 576, 1536])
@pytest.mark.parametrize("has_signs", [True, False])
def test_the_matrix_unit_is_as_exact_as_float32(k, has_signs, drawn):
    """Against float64, relative to the sum of the terms' sizes: no further off than fused multiply-adds, and than torch."""
    if not LIBRARY.uses_amx:
        pytest.skip("no AMX here")
    generator = torch.Generator().manual_seed(k)
    weight, x = drawn(64, k), torch.randn(100, k, generator=generator)
    weight *= 2.0 ** torch.linspace(-20, 10, 64).round()[:, None]
    if not has_signs:
        weight, x = weight.abs(), x.abs()
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T

    def largest_error(product):
        return ((product.double() - exact).abs() / size).max()

    on_unit = largest_error(linear(weight, None, x))
    LIBRARY.use_amx(False)
    try:
        by_vectors = largest_error(linear(weight, None, x))
    finally:
        LIBRARY.use_amx(True)
    assert on_unit < 1e-7 * k**0.5
    assert on_unit <= 1.5 * max(by_vectors, largest_error(torch.nn.functional.linear(x, weight)))


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(value, unit, drawn):
    weight, x = drawn(40, 70), torch.randn(20, 70)
    x[3, 5] = value
    out = linear(weight, None, x)
    finite = torch.isfinite(out).all(dim=1)
    assert not finite[3] and finite.sum() == 19


@needs_kernels
@pytest.mark.parametrize("k", [1, 31, 33, 576])
def test_weights_in_half_the_bytes_are_the_same_numbers(k):
    """By vector instructions bit for bit: one weight that bfloat16 does not hold makes float32 of all."""
    short = torch.randn(40, k).bfloat16().float()
    long = torch.cat([short, torch.full((1, k), 1 / 3)])
    (packed,), (whole,) = LIBRARY.pack(short), LIBRARY.pack(long)
    assert (packed.panels.dtype, whole.panels.dtype) == (torch.bfloat16, torch.float32)
    indices = torch.tensor([[39, 0, 7], [31, 32, 33]])
    assert torch.equal(packed.rows(indices), short[indices]) and torch.equal(whole.rows(indices), short[indices])
    before, x = LIBRARY.uses_amx, torch.randn(50, k)
    LIBRARY.use_amx(False)
    try:
        assert torch.equal(linear(short, None, x), linear(long, None, x)[:, :40])
    finally:
        LIBRARY.use_amx(before)


def batch_of(runs, tables):
    sequences = tuple(
        ScheduledSequence(RequestId(i), (1,) * length, start, table, 1000, GREEDY, True, Logits.LAST)
        for i, ((start, length), table) in enumerate(zip(runs, tables, strict=True))
    )
    return ScheduledBatch(sequences, sum(length for _, length in runs))


@needs_kernels
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_does_not_depend_on_how_a_run_is_split(window, softcap):
    """Bit for bit: 300 tokens at once, in chunks, and one at a time, over scattered blocks of a NaN-filled pool."""
    shape, variant = LayerShape(6, 2, 24, 40), AttentionVariant(0.2, window, softcap, torch.randn(6))
    query, key, value = torch.randn(300, 6, 24), torch.randn(300, 2, 24), torch.randn(300, 2, 40)
    table = tuple(torch.randperm(60).tolist()[:43])

    def run(cuts):
        cache = KVCache([shape], 60, 7, torch.float32, CPU)
        cache.fill(float("nan"))
        parts = []
        for low, high in zip(cuts, cuts[1:], strict=False):
            plan = cpu_native.prepare(flatten(batch_of([(low, high - low)], [table]), 7), CPU)
            part = (tensor[low:high] for tensor in (query, key, value))
            parts.append(cpu_native.attend(*part, cache.layers[0], plan, variant))
        return torch.cat(parts)

    whole = run([0, 300])
    assert torch.equal(whole, run([0, 1, 63, 64, 100, 230, 300]))
    assert torch.equal(whole, run(list(range(301))))
    cache = KVCache([shape], 60, 7, torch.float32, CPU)
    plan = reference.prepare(flatten(batch_of([(0, 300)], [table]), 7), CPU)
    torch.testing.assert_close(whole, reference.attend(query, key, value, cache.layers[0], plan, variant), atol=2e-5, rtol=2e-5)


SHARING = {
    # Tables of blocks of 16, and where each run begins and how long it is. Some share 160 tokens, some of these 96 more, one nothing.
    "decodes": [
        ((*range(10), 20), 170, 1),
        ((*range(10), 21), 160, 1),
        ((*range(10), 11, 12, 13, 14, 15, 16, 22), 260, 1),
        ((*range(10), 11, 12, 13, 14, 15, 16, 23), 256, 1),
        (tuple(range(30, 42)), 185, 1),
        (tuple(range(10)), 159, 1),
    ],
    "decodes, short runs and a long one": [
        ((*range(10), 20), 160, 9),
        ((*range(10), 21, 22, 23, 24), 162, 50),
        ((*range(10), 25), 171, 1),
        ((*range(10), 26), 168, 4),
        ((0, 1, 2, 27), 48, 3),
    ],
    "many": [((*range(8), 50 + i), 128 + i % 16, 1) for i in range(45)],
}


@needs_kernels
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("runs", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("window", [None, 70])
def test_a_prefix_that_is_read_once_for_many_changes_no_bit(runs, window, heads):
    """Each run alone, all together, and in another order; the pool is NaN but for what the tables hold."""
    shape, variant = LayerShape(*heads, 24, 40), AttentionVariant(0.2, window, None, torch.randn(heads[0]))
    cache = KVCache([shape], 100, 16, torch.float32, CPU)
    cache.fill(float("nan"))
    keys, values = cache.layers[0].keys, cache.layers[0].values
    for table, start, _ in runs:  # what the cache holds of each before the step
        slots = torch.tensor([table[place // 16] * 16 + place % 16 for place in range(start)])
        for pool, size in ((keys, 24), (values, 40)):
            held = pool.view(-1, heads[1], size)
            unset = slots[held[slots].isnan().any(dim=(1, 2))]
            held[unset] = torch.randn(len(unset), heads[1], size)
    drawn = [[torch.randn(length, count, size) for count, size in ((heads[0], 24), (heads[1], 24), (heads[1], 40))]
             for _, _, length in runs]  # fmt: skip

    def attend(chosen, backend):
        flat = flatten(batch_of([runs[i][1:] for i in chosen], [runs[i][0] for i in chosen]), 16)
        tensors = (torch.cat(parts) for parts in zip(*(drawn[i] for i in chosen), strict=True))
        out = backend.attend(*tensors, cache.layers[0], backend.prepare(flat, CPU), variant)
        return dict(zip(chosen, out.split([runs[i][2] for i in chosen]), strict=True))

    together = attend(range(len(runs)), cpu_native)
    mixed = attend([i for i in reversed(range(len(runs))) if i % 3 != 1], cpu_native)
    expected = attend(range(len(runs)), reference)
    for i, out in together.items():
        torch.testing.assert_close(out, expected[i], atol=2e-5, rtol=2e-5)
        assert torch.equal(out, attend([i], cpu_native)[i])
        assert i not in mixed or torch.equal(out, mixed[i])


def config_of(kind, **changes):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 512,
    }
    return kind(**{**sizes, **changes})


SWAPPED = {
    "llama": config_of(LlamaConfig),
    "llama, biases": config_of(LlamaConfig, attention_bias=True, mlp_bias=True),
    "mistral, window": config_of(MistralConfig, sliding_window=5),
    "qwen2": config_of(Qwen2Config),
    "qwen3": config_of(Qwen3Config),
    "gemma": config_of(GemmaConfig),
}


@needs_kernels
@pytest.mark.parametrize("name", SWAPPED)
@torch.inference_mode()
def test_swapped_layers_agree(name):
    """Logits of a batch of prefills, then of a mix with decodes, before and after packing."""
    model = random_model(SWAPPED[name])
    for parameter in model.parameters():  # norms of 1 and biases of 0 would hide errors
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    shapes = [call.shape for call in layers_of(model, CPU)]
    tables = [(3, 1), (0,), (9, 8, 7, 6)]
    batches = batch_of([(0, 9), (0, 1), (0, 30)], tables), batch_of([(9, 1), (1, 6), (30, 1)], tables)

    def run(backend):
        cache = KVCache(shapes, 10, 8, torch.float32, CPU)
        cache.fill(float("nan"))
        logits = []
        for batch in batches:
            flat = flatten(batch, 8)
            ids, positions = (torch.tensor([values]) for values in (flat.input_ids, flat.position_ids))
            with attending(CachedStep(cache, backend, backend.prepare(flat, CPU))):
                logits.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0])
        return torch.cat(logits)

    expected = run(reference)
    assert pack_model(model, "cpu_native").num_layers == 2
    assert all(type(layer) is NativeDecoderLayer for layer in model.model.layers)
    torch.testing.assert_close(run(cpu_native), expected, atol=5e-5, rtol=1e-4)


@needs_kernels
def test_a_layer_that_computes_something_else_is_left_alone():
    model = random_model(config_of(LlamaConfig))

    class Scaled(torch.nn.Module):
        """A norm by its parts, but not by what it gives."""

        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x):
            return x * self.weight

    model.model.layers[1].input_layernorm = Scaled(model.model.layers[1].input_layernorm)
    assert pack_model(model, "cpu_native").num_layers == 1
    assert type(model.model.layers[0]) is NativeDecoderLayer
    assert type(model.model.layers[1]) is not NativeDecoderLayer


def test_without_a_compiler_there_are_no_kernels_and_a_line_in_the_log(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    cpu_kernels.library.cache_clear()
    try:
        assert cpu_kernels.library() is None
        assert resolve_backend("auto", CPU)[0] == "cpu"
        assert "no C compiler" in caplog.text
    finally:
        cpu_kernels.library.cache_clear()


@needs_kernels
def test_a_failing_compiler_is_reported_with_what_it_said(monkeypatch, tmp_path):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho broken sysroot >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(compiler.CompileError, match="broken sysroot"):
        compiler.library_path(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_kernels
@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path):
    code = "from contbatch_cli.model.cpu_kernels import compiler; print(compiler.library_path())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(paths) == 1 and all(process.returncode == 0 for process in processes)
    assert [str(path) for path in (tmp_path / "contbatch" / "kernels").glob("*.so")] == list(paths)
