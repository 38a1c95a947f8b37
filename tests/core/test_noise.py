import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch_cli.core.noise import (
    MAX_GUMBEL,
    gumbel,
    keyed_word,
    mix64,
    noise_bits,
    row_seed,
    stream_key,
    token_word,
    uniform,
)


def test_fixed_values_never_change():
    """A seed has to give the same text in every later version: these integers are part of the contract."""
    assert mix64(1) == 0x5692161D100B05E5
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "SplitMix64's first output for seed 0"
    assert token_word(1) == 0x514E28B7, "MurmurHash3's finaliser"
    assert stream_key(0, 0, 0) == 0x238275BC38FCBE91
    assert noise_bits(stream_key(42, 1, 100), 17) == 0xA601324897638980
    assert row_seed(0, "a") == 0x9799E27BFEE200D2


def test_uniform_is_strictly_inside_and_gumbel_finite():
    assert uniform(0) == 2.0**-53
    assert uniform(2**64 - 1) == 1 - 2.0**-53 < 1.0
    assert -math.log(-math.log(uniform(2**64 - 1))) <= MAX_GUMBEL
    assert math.isfinite(-math.log(-math.log(uniform(0))))


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_keys_are_64_bit_and_differ_by_each_argument(seed, sample, position):
    key = stream_key(seed, sample, position)
    assert 0 <= key < 2**64
    assert key == stream_key(seed + 2**64, sample, position)
    others = [(seed + 1, sample, position), (seed, sample + 1, position), (seed, sample, position + 1)]
    assert key not in [stream_key(*other) for other in others]


def test_keyed_word_is_a_bijection_of_the_token():
    words = {keyed_word(token_word(token), 0x12345678, 0x9ABCDEF0) for token in range(20000)}
    assert len(words) == 20000


def _chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def test_bits_are_uniform_along_every_counter():
    """Chi-square over 256 cells (255 degrees of freedom, deviation 22.6), for the top and the low byte of both words."""
    axes = {
        "token": [noise_bits(stream_key(7, 0, 3), i) for i in range(20000)],
        "position": [noise_bits(stream_key(7, 0, i), 5) for i in range(20000)],
        "seed": [noise_bits(stream_key(i, 0, 3), 5) for i in range(20000)],
        "sample": [noise_bits(stream_key(7, i, 3), 5) for i in range(20000)],
    }
    for axis, values in axes.items():
        for shift in (56, 32, 24, 12):
            counts = [0] * 256
            for value in values:
                counts[value >> shift & 255] += 1
            assert abs(_chi_square(counts) - 255) < 5 * 22.6, (axis, shift)


def test_each_key_bit_moves_half_of_the_bits():
    rng = random.Random(1)
    flips = [[0] * 64 for _ in range(64)]
    trials = 400
    for _ in range(trials):
        key, token = rng.getrandbits(64), rng.randrange(50000)
        for bit in range(64):
            moved = noise_bits(key, token) ^ noise_bits(key ^ 1 << bit, token)
            for out in range(64):
                flips[bit][out] += moved >> out & 1
    high_half = [count / trials for row in flips for count in row[44:]]
    assert 0.4 < sum(high_half) / len(high_half) < 0.6


def test_gumbel_has_the_right_mean_and_variance():
    values = [gumbel(3, 0, i // 100, i % 100) for i in range(40000)]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    assert abs(mean - 0.5772) < 5 * math.sqrt(1.645 / len(values))
    assert abs(variance - 1.6449) < 0.08


def test_row_seeds_tell_kinds_of_keys_apart():
    seeds = [row_seed(0, 1), row_seed(0, "1"), row_seed(0, 1, "index"), row_seed(1, 1), row_seed(0, 2)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert row_seed(0, "\ud800") != row_seed(0, "\ud801")
