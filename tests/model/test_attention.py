"""Every backend agrees with the oracle, and the oracle with attention written out densely, on drawn batches and a NaN-filled
pool."""

from __future__ import annotations

import random

import pytest
import torch

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.request import GREEDY, RequestId
from contbatch_cli.errors import UsageError
from contbatch_cli.model.attention import AttentionVariant, backend_named, cpu, cpu_native, reference, resolve_backend
from contbatch_cli.model.kv_cache import KVCache, LayerShape, bytes_per_block

CPU = torch.device("cpu")


def drawn_case(seed):
    """A drawn shape, variant and batch of sequences (start, length), some with consecutive blocks."""
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    shape = LayerShape(kv_heads * group, kv_heads, rng.choice([4, 8]), rng.choice([4, 8, 6]))
    torch.manual_seed(seed)
    variant = AttentionVariant(
        scaling=rng.choice([shape.key_size**-0.5, 0.3]),
        sliding_window=rng.choice([None, None, 1, 3, 7]),
        softcap=rng.choice([None, None, 1.5]),
        sinks=rng.choice([None, None, torch.randn(shape.num_heads)]),
    )
    runs = [
        (rng.choice([0, 0, rng.randint(0, 30)]), rng.choice([1, 1, 2, rng.randint(1, 20)])) for _ in range(rng.randint(1, 7))
    ]
    return rng, shape, variant, runs


def tables_for(rng, runs, block_size, num_blocks):
    free = list(range(num_blocks))
    if rng.random() < 0.5:
        rng.shuffle(free)
    return [tuple(free.pop(0) for _ in range(-(-(start + length) // block_size))) for start, length in runs]


def plan_of(runs, tables):
    sequences = tuple(
        ScheduledSequence(RequestId(i), tuple(range(length)), start, table, 1000, GREEDY, True, Logits.LAST)
        for i, ((start, length), table) in enumerate(zip(runs, tables, strict=True))
    )
    return ScheduledBatch(sequences, sum(length for _, length in runs))


def dense(query, keys, values, variant):
    """One sequence, written out in loops over heads and positions, float64."""
    length, start = keys.shape[0], keys.shape[0] - query.shape[0]
    group = query.shape[1] // keys.shape[1]
    output = torch.zeros(query.shape[0], query.shape[1], values.shape[2], dtype=torch.float64)
    for t in range(query.shape[0]):
        first = 0 if variant.sliding_window is None else max(0, start + t + 1 - variant.sliding_window)
        seen = slice(first, min(length, start + t + 1))
        for head in range(query.shape[1]):
            scores = keys[seen, head // group].double() @ query[t, head].double() * variant.scaling
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if variant.sinks is None else variant.sinks[head].double().exp())
            output[t, head] = weights @ values[seen, head // group].double() / total
    return output


def run_backend(backend, cache, runs, tables, tensors, variant):
    """The backend's output for the runs, after their earlier positions were put into the cache."""
    cache.fill(float("nan"))
    block_size = cache.block_size
    for (start, _), table, (_, keys, values) in zip(runs, tables, tensors, strict=True):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start)], dtype=torch.int64)
        cache.layers[0].write(slots, keys[:start], values[:start])
    plan = backend.prepare(flatten(plan_of(runs, tables), block_size), CPU)
    query = torch.cat([query for query, _, _ in tensors])
    key = torch.cat([keys[start:] for (start, _), (_, keys, _) in zip(runs, tensors, strict=True)])
    value = torch.cat([values[start:] for (start, _), (_, _, values) in zip(runs, tensors, strict=True)])
    return backend.attend(query, key, value, cache.layers[0], plan, variant)


@pytest.mark.parametrize("seed", range(60))
def test_backends_agree(seed):
    rng, shape, variant, runs = drawn_case(seed)
    block_size = rng.choice([1, 3, 4, 16])
    tables = tables_for(rng, runs, block_size, 400)
    cache = KVCache([shape], 400, block_size, torch.float32, CPU)
    tensors = [
        (
            torch.randn(length, shape.num_heads, shape.key_size),
            torch.randn(start + length, shape.num_kv_heads, shape.key_size),
            torch.randn(start + length, shape.num_kv_heads, shape.value_size),
        )
        for start, length in runs
    ]
    wanted = torch.cat([dense(query, keys, values, variant) for query, keys, values in tensors]).float()
    for backend in (reference, cpu, cpu_native):
        output = run_backend(backend, cache, runs, tables, tensors, variant)
        torch.testing.assert_close(output, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 5, 300])
def test_a_long_run_is_tiled(window):
    """More query positions than one tile, after earlier ones, with and without a window."""
    torch.manual_seed(1)
    shape, variant = LayerShape(4, 2, 8, 8), AttentionVariant(0.35, window)
    runs = [(37, 2 * cpu.QUERY_TILE + 11), (700, 1)]
    tables = tables_for(random.Random(3), runs, 16, 200)
    cache = KVCache([shape], 200, 16, torch.float32, CPU)
    tensors = [(torch.randn(n, 4, 8), torch.randn(s + n, 2, 8), torch.randn(s + n, 2, 8)) for s, n in runs]
    expected, output = (run_backend(b, cache, runs, tables, tensors, variant) for b in (reference, cpu))
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit: the same row alone and among others, its blocks elsewhere."""
    torch.manual_seed(2)
    shape, variant = LayerShape(6, 2, 8, 8), AttentionVariant(0.35)
    runs = [(20, 1), (9, 5), (0, 7)]
    tensors = [(torch.randn(n, 6, 8), torch.randn(s + n, 2, 8), torch.randn(s + n, 2, 8)) for s, n in runs]
    cache = KVCache([shape], 50, 4, torch.float32, CPU)
    together = run_backend(cpu, cache, runs, tables_for(random.Random(0), runs, 4, 50), tensors, variant)
    for i, part in enumerate(together.split([n for _, n in runs])):
        alone = run_backend(
            cpu, cache, runs[i : i + 1], tables_for(random.Random(9), runs[i : i + 1], 4, 50), tensors[i : i + 1], variant
        )
        assert torch.equal(part, alone)


def test_a_block_is_read_in_the_step_that_fills_it():
    """Row 1 shares the block that row 0 computes in the same step."""
    torch.manual_seed(3)
    shape, variant = LayerShape(2, 1, 4, 4), AttentionVariant(0.5)
    cache = KVCache([shape], 4, 4, torch.float32, CPU)
    key, value, query = torch.randn(6, 1, 4), torch.randn(6, 1, 4), torch.randn(6, 2, 4)
    batch = plan_of([(0, 4), (4, 2)], [(2,), (2, 0)])
    for backend in (reference, cpu, cpu_native):
        cache.fill(float("nan"))
        output = backend.attend(query, key, value, cache.layers[0], backend.prepare(flatten(batch, 4), CPU), variant)
        torch.testing.assert_close(
            output[4:].double(), dense(query[4:], key, value, variant), atol=2e-5, rtol=2e-5, check_dtype=False
        )


def test_bytes_per_block_counts_each_layer():
    layers = [LayerShape(4, 2, 8, 6), LayerShape(4, 1, 16, 16)]
    assert bytes_per_block(layers, 16, torch.float32) == 16 * 4 * (2 * 14 + 32)
    cache = KVCache(layers, 3, 16, torch.bfloat16, CPU)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in layer)
    assert held == 3 * bytes_per_block(layers, 16, torch.bfloat16)


def test_backend_names():
    assert backend_named("cpu") is cpu
    assert resolve_backend("reference", CPU) == ("reference", "as configured")
    with pytest.raises(
        UsageError, match="model.attention: 'fast' is not one of auto, cpu, cpu_native, cuda, deterministic, reference"
    ):
        resolve_backend("fast", CPU)
