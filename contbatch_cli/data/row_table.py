"""One 64-bit number a row, by index, in flat pages: 8 bytes a row where rows are dense, never much for a stray index."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_PAGE_BITS = 12
_PAGE_ROWS = 1 << _PAGE_BITS
_EMPTY_PAGE = bytes(8 * _PAGE_ROWS)


class RowTable:
    """Numbers from 1 to 2**64 - 1 by row index; 0 is "nothing there"."""

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}

    def __getitem__(self, index: int) -> int:
        page = self._pages.get(index >> _PAGE_BITS)
        return page[index & (_PAGE_ROWS - 1)] if page is not None else 0

    def __setitem__(self, index: int, number: int) -> None:
        page = self._pages.get(index >> _PAGE_BITS)
        if page is None:
            page = self._pages[index >> _PAGE_BITS] = array("Q", _EMPTY_PAGE)
        page[index & (_PAGE_ROWS - 1)] = number

    def drop_before(self, index: int) -> None:
        """Forgets whole pages below `index`."""
        for number in [number for number in self._pages if (number + 1) << _PAGE_BITS <= index]:
            del self._pages[number]

    def indices(self) -> Iterator[int]:
        """The indices that have a number, ascending."""
        for number in sorted(self._pages):
            base = number << _PAGE_BITS
            yield from (base + offset for offset, value in enumerate(self._pages[number]) if value)
