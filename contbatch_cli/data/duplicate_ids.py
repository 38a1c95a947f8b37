"""Which line first used an id, for any number of rows in about 32 bytes each."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_LINE_BITS = 40


class Place(NamedTuple):
    """A physical line (from 1) of the input with this number (from 0)."""

    source: int
    line: int


class DuplicateIds:
    """A hash table of 64-bit hashes of ids in two flat arrays, open addressing, at most half full.

    Strings and integers are apart: 1 and "1" differ. Two different ids are taken for one with a probability of 2**-64 a pair:
    for a million rows about one in 37 million runs.
    """

    def __init__(self) -> None:
        self._mask = 1023
        self._count = 0
        self._hashes = array("Q", bytes(8 * 1024))
        self._places = array("Q", bytes(8 * 1024))

    def first_use(self, id: str | int, source: int, line: int) -> Place | None:
        """Where the id was used before; None, and remembered for this `Place`, when this is the first time."""
        key = _hash(id)
        slot = self._slot(key)
        if self._hashes[slot]:
            packed = self._places[slot]
            return Place(packed >> _LINE_BITS, packed & ((1 << _LINE_BITS) - 1))
        self._hashes[slot] = key
        self._places[slot] = source << _LINE_BITS | line
        self._count += 1
        if self._count * 2 > self._mask:
            self._grow()
        return None

    def _slot(self, key: int) -> int:
        hashes, mask = self._hashes, self._mask
        slot = key & mask
        while hashes[slot] and hashes[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        hashes, places = self._hashes, self._places
        size = (self._mask + 1) * 2
        self._mask = size - 1
        self._hashes = array("Q", bytes(8 * size))
        self._places = array("Q", bytes(8 * size))
        for key, place in zip(hashes, places, strict=True):
            if key:
                slot = self._slot(key)
                self._hashes[slot], self._places[slot] = key, place


def _hash(id: str | int) -> int:
    """64 bits, never 0. An integer is hashed by its digits: Python's own hash of integers is not random."""
    number = hash(id) if isinstance(id, str) else hash(("integer", str(id)))
    return (number & 0xFFFFFFFFFFFFFFFF) or 1
