"""All randomness of the program: a counter-based hash keyed by (seed, sample, position, token).

No generator has a state, so the noise of a row cannot depend on its neighbours, on the order of the work or on preemption.
This is the slow reference, on Python integers; `model/sampler.py` computes the same integers on tensors.

    key   = 64 bits mixed from (seed, sample, position) by SplitMix64's finaliser
    words = two 32-bit words mixed from (key, token) by rounds in the manner of MurmurHash3's finaliser
    u     = the top 52 of those 64 bits, plus a half, over 2**52: strictly between 0 and 1
    g     = -log(-log(u)), standard Gumbel

Why 52 bits: k + 1/2 with k < 2**52 still fits a double's 53 bits exactly, so neither 0 nor 1 can come out of rounding, and g
reaches 36.7: a token is cut off only where its chance is below 2**-53. With the 24 bits of a float32, g ends at 17.3, and over
a vocabulary of 150,000 tokens the tail of the distribution would visibly be missing.

For one key the first word is a bijection of the token's word, so two tokens never share it.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
ROUND_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
ROUND_SHIFTS = (15, 16)
MAX_GUMBEL = 53 * math.log(2.0)
"""No noise value is larger: the largest u is 1 - 2**-53."""


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which each input bit moves about half of the output bits (SplitMix64's finaliser)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, sample: int, position: int) -> int:
    """The 64-bit key of one token. `position` is the absolute one of the token being sampled; `seed` counts mod 2**64."""
    key = mix64((seed + GOLDEN) & MASK64)
    key = mix64((key + GOLDEN * (sample + 1)) & MASK64)
    return mix64((key + GOLDEN * (position + 1)) & MASK64)


def token_word(token: int) -> int:
    """The token id spread over 32 bits (MurmurHash3's finaliser, a bijection)."""
    word = ((token ^ (token >> 16)) * 0x85EBCA6B) & MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & MASK32
    return word ^ (word >> 16)


def keyed_word(word: int, first: int, second: int) -> int:
    """One 32-bit output word: two rounds of multiply and shift over a token's word, each under one half of the key."""
    word = ((word ^ first) * ROUND_MULTIPLIERS[0]) & MASK32
    word = word ^ (word >> ROUND_SHIFTS[0])
    word = ((word ^ second) * ROUND_MULTIPLIERS[1]) & MASK32
    return word ^ (word >> ROUND_SHIFTS[1])


def noise_bits(key: int, token: int) -> int:
    """64 hash bits of one token under one key: the high word first."""
    high, low, word = key >> 32, key & MASK32, token_word(token)
    return keyed_word(word, high, low) << 32 | keyed_word(word, low, high)


def uniform(bits: int) -> float:
    """A number strictly between 0 and 1 from 64 bits; exact, so the same everywhere."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def gumbel(seed: int, sample: int, position: int, token: int) -> float:
    """Standard Gumbel noise of one token: argmax over tokens of logit / T + this is a draw from softmax(logit / T)."""
    return -math.log(-math.log(uniform(noise_bits(stream_key(seed, sample, position), token))))


def row_seed(run_seed: int, key: str | int, kind: Literal["id", "index"] = "id") -> int:
    """The 64-bit seed of a row without one of its own, from the run's seed and the row's id, or its index when it has no id.

    The ids 1 and "1", and the index 1, are three different keys.
    """
    text = f"{run_seed & MASK64}:{kind}:{type(key).__name__}:{key}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
