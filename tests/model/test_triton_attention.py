"""The Triton kernels against the oracle on drawn batches: on a GPU where there is one, else in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from contbatch_cli.core.batch import Logits, ScheduledBatch, ScheduledSequence
from contbatch_cli.core.gather import flatten
from contbatch_cli.core.request import GREEDY, RequestId
from contbatch_cli.model.attention import AttentionVariant, reference
from contbatch_cli.model.attention.tiles import Tile, num_kv_splits, plan_tiles, tile_rows
from contbatch_cli.model.kv_cache import KVCache, LayerShape

pytest.importorskip("triton", reason="Triton is not installed")

from contbatch_cli.model.attention import cuda
from contbatch_cli.model.attention.triton_paged import is_interpreted, paged_attention, write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def test_the_kernels_run_somewhere():
    """Without a GPU the interpreter must be on, or nothing here would test anything."""
    assert DEVICE.type == "cuda" or is_interpreted()


def plan_of(runs, tables):
    sequences = tuple(
        ScheduledSequence(RequestId(i), (0,) * length, start, table, 10_000, GREEDY, True, Logits.LAST)
        for i, ((start, length), table) in enumerate(zip(runs, tables, strict=True))
    )
    return ScheduledBatch(sequences, sum(length for _, length in runs))


def drawn_tables(rng, runs, block_size):
    free = list(range(sum(-(-(start + length) // block_size) for start, length in runs) + 3))
    rng.shuffle(free)
    return [tuple(free.pop() for _ in range(-(-(start + length) // block_size))) for start, length in runs]


def build(rng, shape, dtype, runs, block_size):
    """A cache full of NaN but for each run's earlier positions, the step's tensors and its flat batch."""
    tables = drawn_tables(rng, runs, block_size)
    flat = flatten(plan_of(runs, tables), block_size)
    cache = KVCache([shape], 3 + sum(map(len, tables)), block_size, dtype, DEVICE)
    cache.fill(float("nan"))
    for (start, _), table in zip(runs, tables, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(start)]
        keys = torch.randn(start, shape.num_kv_heads, shape.key_size, device=DEVICE).to(dtype)
        values = torch.randn(start, shape.num_kv_heads, shape.value_size, device=DEVICE).to(dtype)
        cache.layers[0].write(torch.tensor(slots, dtype=torch.int64, device=DEVICE), keys, values)
    tokens = flat.num_tokens
    query = torch.randn(shape.num_heads, tokens, shape.key_size, device=DEVICE).to(dtype).transpose(0, 1)
    key = torch.randn(shape.num_kv_heads, tokens, shape.key_size, device=DEVICE).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, shape.num_kv_heads, shape.value_size, device=DEVICE).to(dtype)
    return cache, flat, query, key, value


def compare(cache, flat, query, key, value, variant):
    expected = reference.attend(query, key, value, cache.layers[0], reference.prepare(flat, DEVICE), variant)
    for tensor in cache.layers[0]:
        tensor.flatten(0, 1)[torch.tensor(flat.slot_mapping, device=DEVICE)] = float("nan")
    output = cuda.attend(query, key, value, cache.layers[0], cuda.prepare(flat, DEVICE), variant)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_batches(seed):
    """Any run lengths, block size, group, variant and type; the cache is NaN wherever no row has written."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = rng.choice([(1, 1), (2, 1), (1, 3), (2, 2), (1, 8), (1, 5)])
    size = rng.choice([8, 24, 64, 80])
    shape = LayerShape(kv_heads * group, kv_heads, size, rng.choice([size, size, 40]))
    variant = AttentionVariant(
        scaling=rng.choice([size**-0.5, 0.2]),
        sliding_window=rng.choice([None, None, 1, 5, 40]),
        softcap=rng.choice([None, None, 2.0]),
        sinks=rng.choice([None, None, torch.randn(shape.num_heads, device=DEVICE)]),
    )
    runs = [(rng.choice([0, rng.randint(0, 150)]), rng.choice([1, 1, 2, rng.randint(1, 40)])) for _ in range(rng.randint(1, 5))]
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    compare(*build(rng, shape, dtype, runs, rng.choice([1, 3, 16, 32])), variant)


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes(size, dtype):
    """Sizes that are no power of two are padded inside the kernel only."""
    torch.manual_seed(size)
    runs = [(70, 1), (0, 9)]
    compare(*build(random.Random(size), LayerShape(4, 2, size, size), dtype, runs, 16), AttentionVariant(size**-0.5))


@pytest.mark.parametrize("num_splits", [2, 3, 7])
@pytest.mark.parametrize("window", [None, 100])
def test_split_keys(num_splits, window):
    """The keys of a decode over several programs, some of which may have none, with sinks counted once."""
    torch.manual_seed(num_splits)
    shape = LayerShape(6, 2, 16, 16)
    cache, flat, query, key, value = build(random.Random(1), shape, torch.float32, [(300, 1), (5, 2), (129, 1)], 16)
    sinks = torch.randn(6, device=DEVICE)
    variant = AttentionVariant(0.25, window, None, sinks)
    expected = reference.attend(query, key, value, cache.layers[0], reference.prepare(flat, DEVICE), variant)
    batch = cuda.prepare(flat, DEVICE).paged(3)
    output = paged_attention(query, *cache.layers[0], batch, scale=0.25, window=window, sinks=sinks, num_splits=num_splits)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_padding_touches_nothing():
    """Padded tokens have slot -1 and padded tiles have sequence -1: the cache and the other rows stay as they were."""
    torch.manual_seed(0)
    shape = LayerShape(2, 1, 16, 16)
    cache, flat, query, key, value = build(random.Random(2), shape, torch.float32, [(20, 1), (7, 1)], 4)
    layer, plan, variant = cache.layers[0], cuda.prepare(flat, DEVICE), AttentionVariant(0.25)
    expected = cuda.attend(query, key, value, layer, plan, variant)
    before = [tensor.clone() for tensor in layer]
    padding = torch.full((3, 1, 16), 9.0, device=DEVICE)
    slots = torch.cat([plan.slots, torch.full((3,), -1, dtype=torch.int32, device=DEVICE)])
    write_kv(torch.cat([key, padding]), torch.cat([value, padding]), *layer, slots)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, layer, strict=True))
    batch = plan.paged(2)
    tiles = torch.cat([batch.small_tiles, torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)])
    for num_splits in (1, 2):
        padded = replace(batch, small_tiles=tiles)
        output = paged_attention(query, *layer, padded, scale=0.25, num_splits=num_splits)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)


def test_a_block_is_read_in_the_step_that_fills_it():
    torch.manual_seed(3)
    cache = KVCache([LayerShape(2, 1, 16, 16)], 4, 4, torch.float32, DEVICE)
    cache.fill(float("nan"))
    key, value, query = (torch.randn(6, heads, 16, device=DEVICE) for heads in (1, 1, 2))
    flat = flatten(plan_of([(0, 4), (4, 2)], [(2,), (2, 0)]), 4)
    compare(cache, flat, query, key, value, AttentionVariant(0.25))


def test_the_rectangular_table_covers_each_context():
    flat = cuda.probe_batch(16)
    table = cuda.prepare(flat, DEVICE).table().tolist()
    for row, blocks in zip(table, flat.block_tables, strict=True):
        assert tuple(row[: len(blocks)]) == blocks
    assert len(set(flat.slot_mapping)) == flat.num_tokens
    assert len(set(chain.from_iterable(flat.block_tables))) == sum(map(len, flat.block_tables))


def test_tiles_cover_each_query_once():
    rng = random.Random(0)
    for _ in range(200):
        group = rng.randint(1, 80)
        lengths = [rng.choice([1, 1, rng.randint(1, 200)]) for _ in range(rng.randint(1, 8))]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        plan = plan_tiles(starts, [length + 5 for length in lengths], group)
        assert tile_rows(group) >= group and plan.large_rows >= group
        covered = [
            (tile.sequence, query)
            for tiles, rows in ((plan.small, tile_rows(group)), (plan.large, plan.large_rows))
            for tile in tiles
            for query in range(tile.first, min(tile.first + rows // group, lengths[tile.sequence]))
        ]
        assert sorted(covered) == [(i, query) for i, length in enumerate(lengths) for query in range(length)]


def test_short_runs_get_small_tiles():
    plan = plan_tiles([0, 1, 3, 103], [50, 9, 100], 8)
    assert plan.small == [Tile(0, 0), Tile(1, 0)] and plan.max_small_context == 50
    assert plan.large[:2] == [Tile(2, 0), Tile(2, 8)] and len(plan.large) == 13


def test_keys_are_split_only_where_programs_are_few():
    assert num_kv_splits(0, 8, 1000, 132) == 1
    assert num_kv_splits(256, 8, 1000, 132) == 1
    assert num_kv_splits(1, 8, 8192, 132) == 16
    assert num_kv_splits(1, 8, 600, 132) == 2
    assert num_kv_splits(1, 1, 10**6, 132) == 32


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability):
    """The interpreter accepts more than the compiler: all the way to machine code, products on the tensor cores, 48 KiB at most."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_compile.py")
    environment["PYTHONPATH"] = str(script.parents[2])
    command = [sys.executable, str(script), str(capability), "bf16"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[0] for line in lines] == ["_write_kernel", "_attention_kernel", "_attention_kernel", "_combine_kernel"]
    assert all(int(line[2]) <= 49152 for line in lines)
    assert lines[1][3] == lines[2][3] == "True"
