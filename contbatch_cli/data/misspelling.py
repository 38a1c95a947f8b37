"""Whether one word is surely a misspelling of another: one edit or one transposition away."""

from __future__ import annotations

from collections.abc import Iterable

MIN_LETTERS = 6


def is_one_edit(word: str, name: str) -> bool:
    """One insertion, deletion, substitution or transposition of neighbours turns `word` into `name`."""
    if word == name or abs(len(word) - len(name)) > 1:
        return False
    start = 0
    while start < min(len(word), len(name)) and word[start] == name[start]:
        start += 1
    left, right = word[start:], name[start:]
    if len(left) != len(right):
        longer, shorter = (left, right) if len(left) > len(right) else (right, left)
        return longer[1:] == shorter
    return left[1:] == right[1:] or (left[1::-1] == right[:2] and left[2:] == right[2:])


def corrected(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` misspells, None when it is too short or too far from all of them."""
    if len(word) < MIN_LETTERS:
        return None
    return next((name for name in names if is_one_edit(word, name)), None)
