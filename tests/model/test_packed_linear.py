"""Packed linears of every kind give what plain ones give, siblings share one product, and plain ones stay where nothing works."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from contbatch_cli.model import cpu_kernels, packed_linear
from contbatch_cli.model.packed_linear import NativeLinear, OneDnnLinear, PackedEmbedding, SiblingLinear, pack_linears
from contbatch_cli.model.packing import pack_model
from tests.model.tiny import VOCAB_SIZE, llama_config

KINDS = ["native", "onednn"]


@pytest.fixture
def kind(request, monkeypatch):
    """Packing of one kind alone; skips where it cannot be had."""
    if request.param == "native":
        if cpu_kernels.library() is None:
            pytest.skip("no kernels here")
    else:
        monkeypatch.setattr(cpu_kernels, "library", lambda: None)
        if not packed_linear._onednn_works(torch.float32):
            pytest.skip("no packed oneDNN weights here")
    return request.param


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(40, 48, bias), nn.Linear(40, 16, bias), nn.Linear(40, 16, False)
        self.o_proj = nn.Linear(80, 40, bias)

    def forward(self, x):
        return self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_blocks_agree(kind, bias):
    block = Block(bias)
    inputs = [torch.randn(1, rows, 40) for rows in (0, 1, 3, 64)]
    expected = [block(x) for x in inputs]
    assert pack_linears(block) == 2
    assert type(block.o_proj) is (NativeLinear if kind == "native" else OneDnnLinear)
    assert all(type(linear) is SiblingLinear for linear in (block.q_proj, block.k_proj, block.v_proj))
    for x, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(block(x), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(block(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@torch.inference_mode()
def test_siblings_notice_another_input(kind):
    """Called out of turn, or with another tensor in between, each gives its own slice of its own input."""
    block = Block(True)
    a, b = torch.randn(2, 40), torch.randn(2, 40)
    wanted = block.k_proj(b), block.q_proj(a), block.k_proj(a), block.q_proj(b)
    pack_linears(block)
    found = block.k_proj(b), block.q_proj(a), block.k_proj(a), block.q_proj(b)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_where_no_packing_works_the_linears_stay(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    monkeypatch.setattr(packed_linear, "_onednn_works", lambda dtype: False)
    block = Block(True)
    assert pack_linears(block) == 0
    assert all(type(linear) is nn.Linear for linear in block.children())


def test_changed_private_operators_are_noticed(monkeypatch):
    """The probe says no, and why, when the operator raises or gives something else."""
    packed_linear._onednn_works.cache_clear()

    def changed(self, x):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(OneDnnLinear, "forward", changed)
    assert not packed_linear._onednn_works(torch.float32)
    packed_linear._onednn_works.cache_clear()
    monkeypatch.setattr(OneDnnLinear, "forward", lambda self, x: x.new_zeros(5, 48))
    assert not packed_linear._onednn_works(torch.float32)
    packed_linear._onednn_works.cache_clear()


@pytest.mark.parametrize("is_tied", [True, False])
@torch.inference_mode()
def test_an_embedding_that_is_tied_to_the_lm_head_reads_its_packed_weight(is_tied):
    if cpu_kernels.library() is None:
        pytest.skip("no kernels here")
    config = llama_config()
    config.tie_word_embeddings = is_tied
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, VOCAB_SIZE, (2, 7))
    embedded, logits = model.get_input_embeddings()(ids), model(ids, use_cache=False).logits
    pack_model(model, "cpu")
    assert (type(model.get_input_embeddings()) is PackedEmbedding) is is_tied
    assert torch.equal(model.get_input_embeddings()(ids), embedded)
    torch.testing.assert_close(model(ids, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5)
    assert model.get_input_embeddings()(torch.tensor(3)).shape == (32,)


@torch.inference_mode()
def test_an_embedding_that_an_adapter_listens_to_stays():
    config = llama_config()
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_input_embeddings().register_forward_hook(lambda module, arguments, output: output)
    pack_model(model, "cpu")
    assert type(model.get_input_embeddings()) is nn.Embedding
