from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.units import counted, memory_bytes, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 << 30),
        (" 1.5 GB ", 1_500_000_000),
        ("512mib", 512 << 20),
        ("7B", 7),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_counts() -> None:
    counts = [counted(0, "row"), counted(1, "row"), counted(2, "row"), counted(1234, "prompt token")]
    assert counts == ["0 rows", "1 row", "2 rows", "1,234 prompt tokens"]


@pytest.mark.parametrize("text", ["", "2", "2G", "GiB", "-1GiB", "1 GiB GiB", "0B", "1e3MB", "٣GiB"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^must be "):
        parse_size(text)


def test_memory_is_a_size_or_a_fraction_of_what_is_free() -> None:
    assert memory_bytes("1MiB", 10) == 1 << 20
    assert memory_bytes(0.5, 1000) == 500
    assert memory_bytes(1, 1000) == 1000
    for fraction in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(ValueError, match="fraction above 0"):
            memory_bytes(fraction, 1000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1d", 86400),
        ("500ms", 0.5),
        ("45", 45),
        ("1.5h", 5400),
        ("1h 5m", 3900),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "10 minutes", "-5s", "0s", "0", "1h30", "nan", "1h-5m"])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^must be "):
        parse_duration(text)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            assert parse(text) > 0
        except ValueError as error:
            assert str(error).startswith("must be ")
