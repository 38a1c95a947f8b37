"""Weights of 8 bits: close to float32, a row independent of the rows beside it, less memory, and refused where they cannot be had."""

from __future__ import annotations

import json
import os
import random
from ctypes import byref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from contbatch_cli import build
from contbatch_cli.cli.app import main as contbatch
from contbatch_cli.config_files import load_config
from contbatch_cli.data.readers import InputOptions
from contbatch_cli.errors import UsageError
from contbatch_cli.model import cpu_kernels, native_layer
from contbatch_cli.model.cpu_kernels import compiler, quantised
from contbatch_cli.model.native_layer import NativeDecoderLayer
from contbatch_cli.model.packed_linear import NativeLinear
from contbatch_cli.model.packing import pack_model
from contbatch_cli.sizing import DeviceMemory
from tests.cli.scripted import read_records, write_model, write_rows
from tests.model.test_lora import load, write_adapter
from tests.model.tiny import Setting, draw_rows, llama_config, random_model, run_rows, shapes_of
from tests.oracle import greedy_alone

GROUP = 64
LIBRARY = cpu_kernels.library()
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="no C compiler, or no OpenMP runtime")
PROCESSORS = {
    "x86-64": "sse2",
    "haswell": "avx2",
    "skylake-avx512": "avx512bw",
    "icelake-server": "avx512_vnni",
    "alderlake": "avx_vnni",
}
"""Compiler targets, one for each way of the kernels, and the flag of a processor that can run it."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The oracle's view of inputs [M, K]: each group of them in 8 bits, by its largest."""
    groups = nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, : x.shape[1]]


def product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The slow obvious product of the same rounded numbers."""
    values, scales = quantised(weight)
    return (rounded(x).double() @ values.double().T * scales.double() + bias.double()).float()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def check_linear(library: cpu_kernels.Library, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    weight, bias, x = (torch.randn(*size, generator=generator) for size in ((n, k), (n,), (80, k)))
    x[:, k // 2] *= 30  # one large input, as models have them
    linear = NativeLinear(library, weight, bias, is_int8=True)
    found, exact = linear(x), nn.functional.linear(x, weight, bias)
    # An input half way between two numbers may be rounded to either: one unit of its group, for few of them.
    assert relative_error(found, product(weight, x, bias)) < 1e-3
    assert relative_error(found, exact) < 0.02
    for count in (1, 2, 6, 7, 14, 15, 31, 64):
        assert torch.equal(linear(x[:count].contiguous()), found[:count])


@needs_kernels
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 17), (96, 200), (960, 576), (64, 3000)])
def test_int8_linears_are_close_and_rows_do_not_depend_on_each_other(n, k):
    check_linear(LIBRARY, n, k)


@needs_kernels
@pytest.mark.parametrize(
    "processor", ["haswell", *(pytest.param(one, marks=pytest.mark.slow) for one in PROCESSORS if one != "haswell")]
)
def test_every_way_of_the_kernels_agrees(processor, tmp_path, monkeypatch):
    """Compiled for processors without this one's instructions, as far as this one can run that."""
    flags = Path("/proc/cpuinfo").read_text().split() if os.path.exists("/proc/cpuinfo") else []
    if PROCESSORS[processor] not in flags:
        pytest.skip(f"this processor has no {PROCESSORS[processor]}")
    monkeypatch.setattr(compiler, "TUNING", ((f"-march={processor}",),))
    library = cpu_kernels.Library(compiler.library_path(tmp_path), cpu_kernels._openmp())
    for n, k in ((5, 3), (33, 17), (96, 200)):
        check_linear(library, n, k)
        for dtype in (torch.float32, torch.bfloat16):
            weight, x = torch.randn(n, k).to(dtype).float(), torch.randn(20, k)
            linear = NativeLinear(library, weight, None)
            assert linear.packed.panels.dtype == dtype
            torch.testing.assert_close(linear(x), nn.functional.linear(x, weight), atol=1e-4, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_int8_gates_and_residuals(kind):
    gate, up, x = torch.randn(40, 72), torch.randn(40, 72), torch.randn(19, 72)
    weight = native_layer._interleaved(torch.cat([gate, up]), LIBRARY.panel // 2)
    (packed,) = LIBRARY.pack(weight, is_int8=True)
    epilogue = cpu_kernels.SILU_GATE if kind == "silu" else cpu_kernels.GELU_TANH_GATE
    described = packed.linear(epilogue, num_columns=40)
    out = torch.full((19, 40), float("nan"))
    assert LIBRARY.linear(byref(described), x.data_ptr(), 19, out.data_ptr(), None, 2)
    gated, upper = product(gate, x, torch.zeros(40)), product(up, x, torch.zeros(40))
    active = nn.functional.silu(gated) if kind == "silu" else nn.functional.gelu(gated, approximate="tanh")
    assert relative_error(out, active * upper) < 1e-3


@needs_kernels
def test_what_is_not_finite_stays_so_and_in_its_row():
    linear, x = NativeLinear(LIBRARY, torch.randn(40, 100), None, is_int8=True), torch.randn(6, 100)
    clean = linear(x)
    x[1, 70], x[4, 3] = float("nan"), float("-inf")
    found = linear(x)
    assert found[[1, 4]].isfinite().sum() == 0
    assert torch.equal(found[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert torch.equal(linear(torch.zeros(2, 100)), torch.zeros(2, 40))


@needs_kernels
def test_weights_take_a_quarter_of_the_memory():
    weight = torch.randn(960, 576)
    (whole,), (eighth,) = LIBRARY.pack(weight), LIBRARY.pack(weight, is_int8=True)
    assert whole.panels.nbytes == 4 * eighth.panels.nbytes
    assert eighth.scales.nbytes < eighth.panels.nbytes / 50
    values, scales = quantised(weight)
    assert values.abs().amax(dim=1).eq(127).all()
    assert ((values * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()


@needs_kernels
def test_a_zero_row_of_weights_stays_zero():
    weight = torch.randn(4, 8)
    weight[2] = 0
    assert NativeLinear(LIBRARY, weight, None, is_int8=True)(torch.randn(3, 8))[:, 2].eq(0).all()


@needs_kernels
@pytest.mark.parametrize("backend", ["cpu_native", "cpu"])
@torch.inference_mode()
def test_a_packed_model_is_close_to_its_float_self(backend):
    """Layers in one call, and layers of transformers over packed linears: the first token of each row."""
    rows = [(prompt, replace(params, logprobs=0)) for prompt, params in draw_rows(random.Random(2), 12, 30, 8)]
    setting = Setting(40, 9, 4, 200, backend=backend)
    outputs = []
    for is_int8 in (False, True):
        model = random_model(llama_config())
        shapes = shapes_of(model)
        packing = pack_model(model, backend, is_int8)
        assert packing.num_layers == (2 if backend == "cpu_native" else 0)
        assert ("int8" in str(packing)) is is_int8
        ran = run_rows(model, shapes, rows, setting)
        outputs.append({i: request.logprobs[0] for i, request in ran.requests.items()})
    same = [i for i in outputs[0] if outputs[0][i].token_id == outputs[1][i].token_id]
    assert len(same) >= 8
    differences = [abs(outputs[0][i].logprob - outputs[1][i].logprob) for i in same]
    assert 0 < max(differences) < 0.5


@needs_kernels
def test_adapters_go_on_top_of_int8_weights(tmp_path):
    """The prompts' log-probabilities move with int8 by little, with the adapter by much."""
    rows = [(prompt, replace(params, logprobs=0, max_tokens=1)) for prompt, params in draw_rows(random.Random(3), 8, 20, 2)]

    def logprobs(is_int8: bool, owner: str | None) -> torch.Tensor:
        model = random_model(llama_config())
        where = tmp_path / f"{is_int8}-{owner}"
        paths = {"a": write_adapter(where, model, 4, 16, "q_proj down_proj lm_head")}
        shapes, adapters = shapes_of(model), load(model, paths)
        assert pack_model(model, "cpu_native", is_int8).num_linears > 4
        setting = Setting(40, 9, 4, 200, backend="cpu_native")
        scored = [(prompt, replace(params, prompt_logprobs=0)) for prompt, params in rows]
        ran = run_rows(model, shapes, scored, setting, [owner] * len(rows), adapters)
        return torch.tensor([one.logprob for request in ran.requests.values() for one in request.prompt_logprobs])

    exact, close, plain = logprobs(False, "a"), logprobs(True, "a"), logprobs(True, None)
    assert 0 < (close - exact).abs().mean() < 0.1 < (close - plain).abs().mean()


@needs_kernels
def test_rows_of_int8_weights_do_not_depend_on_the_batch():
    """Bit for bit the same tokens and log-probabilities in every setting, also with preemptions."""
    model = random_model(llama_config())
    shapes = shapes_of(model)
    pack_model(model, "cpu_native", is_int8=True)
    rows = [(prompt, replace(params, logprobs=0)) for prompt, params in draw_rows(random.Random(4), 10, 40, 12)]
    settings = Setting(1, 1, 4, 30, False), Setting(64, 10, 4, 300), Setting(7, 5, 16, 5, False, is_rash=True)
    ran = [run_rows(model, shapes, rows, replace(setting, backend="cpu_native")) for setting in settings]
    found = [[[(one.token_id, one.logprob) for one in r.logprobs] for r in one.requests.values()] for one in ran]
    assert found[0] == found[1] == found[2]
    assert ran[2].num_preemptions > 0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A tiny Llama with weights and a tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("int8") / "model")
    config = llama_config()
    config.vocab_size = 259
    random_model(config).save_pretrained(directory)
    write_rows(
        directory.parent / "rows.jsonl", [{"prompt": f"hello {k}", "max_tokens": 6, "ignore_eos": True} for k in range(5)]
    )
    return directory


def prepared(model_dir: Path, *settings: str, kind: str = "cpu") -> build.Job:
    effective = load_config(None, [f"model.name={model_dir}", "model.weights=int8", *settings])
    inputs = build.Inputs((str(model_dir.parent / "rows.jsonl"),), InputOptions())
    memory = DeviceMemory(kind, 1 << 30)
    return build.prepare_job(
        effective, inputs, build.open_model(effective.config.model), memory, lambda fault: pytest.fail(fault.message)
    )


@needs_kernels
def test_a_job_from_the_command_line(model_dir, tmp_path, capfd):
    """Records, the header's word, the verification with the same weights, and no resuming of what float32 began."""

    def generate(*more: str) -> tuple[int, str]:
        arguments = ["generate", str(model_dir.parent / "rows.jsonl"), "-m", str(model_dir), "-o", str(tmp_path / "out.jsonl")]
        with pytest.raises(SystemExit) as end:
            contbatch([*arguments, "--set", "model.device=cpu", *more])
        return end.value.code, capfd.readouterr().err

    assert generate()[0] == 0
    exact = [record["text"] for record in read_records(tmp_path / "out.jsonl")]
    status, said = generate("--set", "model.weights=int8", "--resume")
    assert status == 2 and "model.weights" in said and "int8" in said
    status, said = generate("--set", "model.weights=int8", "--overwrite", "--verify", "5")
    assert status == 0 and "int8" in said and "verified  5 rows run again alone: 5 equal" in said
    records = read_records(tmp_path / "out.jsonl")
    assert len(records) == 5 and all(record["usage"]["completion_tokens"] == 6 for record in records)
    assert len(exact) == 5
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["settings"]["model.weights"] == "int8"


@needs_kernels
def test_the_planned_memory_is_less(model_dir):
    job = prepared(model_dir)
    assert build.weights_bytes(job.config, "cpu", job.model) < 4 * job.model.info.num_parameters
    assert all(type(layer) is NativeDecoderLayer for layer in build.build_executor(job).runner.runner.model.model.layers)


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        (("model.dtype=bfloat16",), "cpu", "compute in float32, and model.dtype is bfloat16"),
        (("engine.deterministic=true",), "cpu", "cannot be had with engine.deterministic"),
        (("model.tensor_parallel=2",), "cpu", "cannot be had with model.tensor_parallel"),
        (("model.device=cuda", "model.dtype=float32"), "cuda", "run on a CPU only, and model.device is cuda"),
    ],
)
def test_refused(model_dir, settings, kind, reason):
    with pytest.raises(UsageError, match=f"model.weights: int8 weights {reason}.*; set model.weights=auto$"):
        build.build_executor(prepared(model_dir, *settings, kind=kind))


def test_refused_without_kernels(model_dir, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    with pytest.raises(UsageError, match="need the compiled kernels"):
        build.build_executor(prepared(model_dir))


def test_a_misspelt_precision_is_refused():
    with pytest.raises(UsageError, match="model.weights"):
        load_config(None, ["model.weights=int4"])


@needs_kernels
def test_greedy_tokens_are_mostly_those_of_float32():
    """No equality is promised; nonsense would agree with one token in 96."""
    model = random_model(llama_config())
    rows = draw_rows(random.Random(7), 12, 30, 1)
    alone = random_model(llama_config())
    alone.set_attn_implementation("eager")
    wanted = [greedy_alone(alone, prompt, 1).token_ids for prompt, _ in rows]
    shapes = shapes_of(model)
    pack_model(model, "cpu_native", is_int8=True)
    found = run_rows(model, shapes, rows, Setting(40, 9, 4, 200, backend="cpu_native")).outputs
    assert sum(found[i] == tokens for i, tokens in enumerate(wanted)) >= 9
