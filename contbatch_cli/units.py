"""Sizes, shares of memory, durations and counts as people write them. Parsing raises ValueError with an example."""

from __future__ import annotations

import re

_BYTES_PER_UNIT = {
    unit.lower(): base**power
    for power, units in enumerate([("B",), ("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")])
    for unit, base in zip(units, (1000, 1024), strict=False)
}
_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)", re.IGNORECASE | re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?) *(ms|[smhd]) *", re.IGNORECASE | re.ASCII)


def counted(count: int, noun: str) -> str:
    """`1 block`, `1,024 blocks`: the number and the noun, which makes its plural with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parse_size(text: str) -> int:
    """Bytes of a size with its unit: "2GiB" is 2 * 1024**3, "1.5 GB" is 1,500,000,000."""
    match = _SIZE.fullmatch(text.strip())
    factor = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError('must be a size with its unit, such as "512MiB" or "2GiB"')
    num_bytes = int(float(match[1]) * factor)
    if num_bytes < 1:
        raise ValueError("must be at least one byte")
    return num_bytes


def memory_bytes(memory: str | float, free_bytes: int) -> int:
    """Bytes that `memory` stands for: a size such as "2GiB" as it is, or a fraction above 0 and up to 1 of `free_bytes`."""
    if isinstance(memory, str):
        return parse_size(memory)
    if not 0.0 < memory <= 1.0:
        raise ValueError('must be a size such as "2GiB", or a fraction above 0 and up to 1 of the free memory')
    return int(memory * free_bytes)


def parse_duration(text: str) -> float:
    """Seconds of a duration: "90s", "10m", "1h30m", "500ms", "2d"; a bare number is in seconds. Always above zero."""
    stripped = text.strip()
    parts = list(_DURATION_PART.finditer(stripped))
    if parts and "".join(part[0] for part in parts) == stripped:
        seconds = sum(float(part[1]) * _SECONDS_PER_UNIT[part[2].lower()] for part in parts)
    elif re.fullmatch(r"\d+(\.\d+)?", stripped, re.ASCII):
        seconds = float(stripped)
    else:
        raise ValueError('must be a duration such as "90s", "10m" or "1h30m"')
    if seconds <= 0.0:
        raise ValueError("must be longer than zero seconds")
    return seconds
