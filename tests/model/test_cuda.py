"""The CUDA engine on whole models: on a GPU with `-m cuda`; what can be is run on a CPU too, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from contbatch_cli.model.attention import resolve_backend
from tests.cuda_checks import CHECKS, check_choice, check_golden_tokens, check_half_precision, check_kernels

CPU = torch.device("cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check):
    assert torch.cuda.is_available(), "-m cuda needs a GPU"
    torch.backends.cuda.matmul.allow_tf32 = False
    print(check(torch.device("cuda")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
class TestInterpreted:
    @pytest.mark.slow
    def test_kernels(self):
        assert "9 kernel cases agree" in check_kernels(CPU, sizes=(64,))

    @pytest.mark.slow
    def test_golden_tokens(self):
        """A whole model through the Triton kernels, in mixed batches, equal to its own eager attention by tokens."""
        assert "8 rows equal" in check_golden_tokens(CPU, count=4, longest=12)

    def test_half_precision(self):
        assert "of 8 first tokens" in check_half_precision(CPU, count=8)

    def test_varlen_attn_is_never_taken_on_a_cpu(self):
        assert check_choice(CPU) == "head size 64: triton, head size 128: triton"


def test_auto_is_triton_on_cuda_only():
    assert resolve_backend("auto", torch.device("cuda"))[0] == "cuda"
    assert resolve_backend("auto", CPU)[0] in ("cpu", "cpu_native")
