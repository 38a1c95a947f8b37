"""The table of ids: exact against a dictionary, and small."""

import random

from contbatch_cli.data.duplicate_ids import DuplicateIds, Place


def test_agrees_with_a_dictionary():
    rng = random.Random(1)
    ids = [rng.choice([str, int])(rng.randrange(4000)) for _ in range(10_000)]
    table, oracle = DuplicateIds(), {}
    for line, id in enumerate(ids, 1):
        place = Place(line % 3, line)
        key = (type(id), id)
        assert table.first_use(id, *place) == oracle.get(key)
        oracle.setdefault(key, place)


def test_integers_and_their_digits_differ_and_so_do_integers_with_equal_hashes():
    table = DuplicateIds()
    ids = [1, "1", -1, -2, 0, 2**61 - 1, 2**61, 10**100]
    assert [table.first_use(id, 0, 1) for id in ids] == [None] * len(ids)


def test_memory_is_below_a_hundred_bytes_a_row():
    table = DuplicateIds()
    for line in range(100_000):
        table.first_use(f"row-{line}", 0, line)
    held = table._hashes.buffer_info()[1] * 16
    while_growing = held * 1.5
    assert while_growing / 100_000 < 100
