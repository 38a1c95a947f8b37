"""Decoder layers of the common kind, each swapped for one call of the compiled kernels.

Shape legend: T tokens of the step, H query heads, K kv heads, D head size.

The kind: RMSNorm, attention with rotary positions (with or without biases, query and key norms, a window, a soft cap, sinks), residual,
RMSNorm, gated MLP, residual: Llama, Mistral, Qwen 2 and 3, SmolLM and what is built like them. A layer is told by its parts, not by
its name; how it calls attention is recorded from a call; and a layer is swapped only if, on drawn inputs, its replacement gives what it
gives. Anything else stays as it is.
"""

from __future__ import annotations

import logging
from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch import nn

from contbatch_cli.core.gather import FlatBatch
from contbatch_cli.model import cpu_kernels
from contbatch_cli.model.attention import AttentionVariant, CachedStep, Step, attending, cpu_native, current_step
from contbatch_cli.model.attention.reference import attend_one
from contbatch_cli.model.kv_cache import KVCache, LayerShape
from contbatch_cli.model.packed_linear import concatenated

logger = logging.getLogger(__name__)

TOLERANCE = 2e-4
"""Of the layer's largest output: what a layer and its replacement may differ by."""


class NativeDecoderLayer(nn.Module):
    """hidden [1, T, hidden] to the same, for a step planned by `cpu_native`. Holds its weights packed."""

    def __init__(self, library: cpu_kernels.Library, parts: LayerParts, index: int, is_int8: bool = False) -> None:
        super().__init__()
        self._library = library
        self._index = index
        self._owned: list[torch.Tensor] = []
        products = [
            concatenated([parts.q, parts.k, parts.v]),
            concatenated([parts.o]),
            _gates(parts, library.panel // 2),
            concatenated([parts.down]),
        ]
        packed = library.pack(*(weight for weight, _ in products), is_int8=is_int8)
        epilogues = cpu_kernels.STORE, cpu_kernels.ADD, parts.epilogue, cpu_kernels.ADD
        columns = None, None, parts.gate.out_features, None
        linears = [
            weight.linear(epilogue, None if bias is None else self._own(library.whole_panels(bias)), num_columns)
            for weight, (_, bias), epilogue, num_columns in zip(packed, products, epilogues, columns, strict=True)
        ]
        self._layer = cpu_kernels.Layer(
            *linears,
            *(None if norm is None else self._own(norm).data_ptr() for norm in parts.norms),
            parts.eps,
            parts.q.in_features,
            parts.rotary_size,
            cpu_kernels.AttentionShape(*parts.shape_fields),
        )
        self.packed = packed
        if parts.variant.sinks is not None:
            self._owned.append(parts.variant.sinks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        step = current_step()
        assert position_embeddings is not None and isinstance(step, CachedStep)
        cosines, sines = (table.contiguous() for table in position_embeddings)
        hidden_states = hidden_states.contiguous()
        layer = step.cache.layers[self._index]
        out = torch.empty_like(hidden_states)
        done = self._library.layer(
            byref(self._layer),
            byref(step.plan_of(self._index).step),
            hidden_states.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"a layer of {hidden_states.shape[1]} tokens: no working memory")
        return out

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        self._owned.append(tensor.detach().float().contiguous())
        return self._owned[-1]


class LayerParts(NamedTuple):
    """What a decoder layer of the common kind consists of. `norms`: attention [hidden], MLP [hidden], query [D], key [D]."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    epilogue: int
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    eps: float
    rotary_size: int
    shape_fields: tuple[float | None, ...]
    variant: AttentionVariant


def _gates(parts: LayerParts, half: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate and up as one product: each panel holds `half` gate columns and then the same columns of up."""
    weight, bias = concatenated([parts.gate, parts.up])
    return _interleaved(weight, half), None if bias is None else _interleaved(bias, half)


def _interleaved(values: torch.Tensor, half: int) -> torch.Tensor:
    """Rows [2N, ...], the gates' and then the ups', to groups of `half` rows of either in turn, filled up with zeros."""
    count = values.shape[0] // 2
    padded = values.new_zeros(2, -(-count // half) * half, *values.shape[1:])
    padded[:, :count] = values.view(2, count, *values.shape[1:])
    return padded.view(2, -1, half, *values.shape[1:]).transpose(0, 1).reshape(-1, *values.shape[1:])


@torch.inference_mode()
def swap_layer(model: nn.Module, layers: nn.ModuleList, index: int, is_int8: bool = False) -> bool:
    """Swap a decoder layer of the model, float32 on a CPU, if that can be done; whether it was.

    With `is_int8` the replacement keeps its weights in 8 bits, once one with the weights as they are has shown that it agrees. The
    model then runs with the attention backend `cpu_native` only.
    """
    library = cpu_kernels.library()
    if library is None:
        return False
    layer = layers[index]
    if not _is_common_kind(layer):
        return False
    try:
        trial = _Trial(model, layer, index)
        parts = _parts(layer, trial)
        replacement = None if parts is None else NativeDecoderLayer(library, parts, index)
        agrees = replacement is not None and trial.agrees(replacement)
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:
        logger.info("layer %d keeps its own code: %s: %s", index, type(error).__name__, error)
        return False
    if parts is None or replacement is None or not agrees:
        logger.info("layer %d keeps its own code: it computes something else", index)
        return False
    if is_int8:
        replacement = NativeDecoderLayer(library, parts, index, is_int8)
    for name in ("attention_type", "layer_type"):
        if hasattr(layer, name):
            setattr(replacement, name, getattr(layer, name))
    layers[index] = replacement
    return True


class _Trial:
    """The layer's own output for drawn inputs, and how it called attention. A run of 11 tokens from position 0, blocks of 8."""

    num_tokens = 11

    def __init__(self, model: nn.Module, layer: nn.Module, index: int) -> None:
        attention: Any = layer.self_attn
        self.index = index
        self.hidden = torch.randn(
            1, self.num_tokens, attention.q_proj.in_features, generator=torch.Generator().manual_seed(index)
        )
        self.position_ids = torch.arange(self.num_tokens).unsqueeze(0)
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        self.position_embeddings = rotary(self.hidden, self.position_ids)
        self.variant: AttentionVariant | None = None
        self.shape: LayerShape | None = None
        self.expected = self._call(layer, self)

    def agrees(self, replacement: nn.Module) -> bool:
        assert self.shape is not None
        cache = KVCache([self.shape] * (self.index + 1), 2, 8, torch.float32, torch.device("cpu"))
        plan = cpu_native.prepare(self._flat(), torch.device("cpu"))
        output = self._call(replacement, CachedStep(cache, cpu_native, plan))
        difference = (output - self.expected).abs().max()
        return bool(difference <= TOLERANCE * self.expected.abs().max())

    def _flat(self) -> FlatBatch:
        count = self.num_tokens
        positions = list(range(count))
        slots = [position + 8 if position < 8 else position - 8 for position in positions]
        return FlatBatch([0] * count, positions, slots, [0, count], [count], [(1, 0)], [], [0, 0], [], [], 8)

    def _call(self, layer: nn.Module, step: Step) -> torch.Tensor:
        with attending(step):
            output = layer(
                self.hidden,
                attention_mask=None,
                position_ids=self.position_ids,
                position_embeddings=self.position_embeddings,
                use_cache=False,
            )
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """The step that the original layer meets: the oracle over the run alone; shape and variant are kept."""
        self.variant = variant
        self.shape = LayerShape(query.shape[1], key.shape[1], key.shape[2], value.shape[2])
        return attend_one(query, key, value, variant)


def _is_common_kind(layer: nn.Module) -> bool:
    """Whether the layer has the parts of the common kind and no others, and nobody (an adapter) listens to them."""
    if any(module._forward_hooks for module in layer.modules()):
        return False
    parts = dict(layer.named_children())
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    if not linears[0] <= set(attention) <= linears[0] | {"q_norm", "k_norm"} or set(mlp) != linears[1] | {"act_fn"}:
        return False
    found = [attention[name] for name in sorted(linears[0])] + [mlp[name] for name in sorted(linears[1])]
    return all(type(linear) is nn.Linear and linear.weight.dtype == torch.float32 for linear in found)


def _parts(layer: Any, trial: _Trial) -> LayerParts | None:
    """The layer's parts; None where a norm or the activation is of another kind."""
    attention, mlp, variant, shape = layer.self_attn, layer.mlp, trial.variant, trial.shape
    assert variant is not None and shape is not None
    if variant.sinks is not None:
        variant = variant._replace(sinks=variant.sinks.detach().float().contiguous())
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else _norm_weight(norm) for norm in norms]
    epsilons = {_epsilon(norm) for norm in norms if norm is not None}
    epilogue = _epilogue(mlp.act_fn)
    missing = any(norm is not None and weight is None for norm, weight in zip(norms, weights, strict=True))
    if missing or len(epsilons) != 1 or epilogue is None or weights[0] is None or weights[1] is None:
        return None
    if any(weight is not None and weight.shape[0] != shape.key_size for weight in weights[2:]):
        return None
    return LayerParts(
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        epilogue,
        (weights[0], weights[1], weights[2], weights[3]),
        epsilons.pop(),
        trial.position_embeddings[0].shape[-1],
        cpu_native.shape_fields(*shape, variant),
        variant,
    )


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _norm_weight(norm: Any) -> torch.Tensor | None:
    """The factors of an RMSNorm, told from its output: the weight itself or 1 + weight. None for another kind of norm."""
    weight = norm.weight.detach().float()
    x = torch.linspace(-2.0, 3.0, weight.shape[0])
    normed = x * torch.rsqrt(x.square().mean() + _epsilon(norm))
    output = norm(x.unsqueeze(0))[0]
    return next((w for w in (weight, 1.0 + weight) if torch.allclose(output, normed * w, rtol=1e-5, atol=1e-5)), None)


def _epilogue(activation: Any) -> int | None:
    """The kernels' gate for this activation, told from its values."""
    x = torch.linspace(-6.0, 6.0, 97)
    kinds = {
        cpu_kernels.SILU_GATE: nn.functional.silu(x),
        cpu_kernels.GELU_TANH_GATE: nn.functional.gelu(x, approximate="tanh"),
    }
    output = activation(x)
    return next((kind for kind, wanted in kinds.items() if torch.allclose(output, wanted, rtol=1e-5, atol=1e-6)), None)
