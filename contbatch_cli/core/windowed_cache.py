"""Caches of models whose layers see a sliding window: blocks that no future token can read are given back.

A token at position p reads the positions p - window + 1 to p. So a request whose next token stands at p needs no block that ends at
or before p - window + 1, and its table holds few blocks however long it is:

    position     0 ....................... p - window + 1 ........ p ........... p + budget - 1
    blocks       |  given back  |  given back  |  held  |  held  |  held  |  held  |

A model may have both kinds of layers (Gemma, GPT-OSS). Then there are two pools and two tables a request, one for the layers that see
everything and one for those with a window; together they are one cache to the scheduler. Nothing is shared by hash: what a hit would
need may have been given back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from contbatch_cli.core.kv_cache_manager import KVCacheManager, Newcomer, PrefixHit
from contbatch_cli.core.request import RequestId


def blocks_touched(num_tokens: int, block_size: int) -> int:
    """The most blocks that `num_tokens` consecutive tokens lie in, wherever they begin."""
    return -(-(num_tokens - 1) // block_size) + 1


def window_span(window: int, token_budget: int, block_size: int) -> int:
    """The most blocks that one request holds: those of the tokens that a step's run may be, and of the window before them."""
    return blocks_touched(window - 1 + token_budget, block_size)


class WindowedKVCacheManager(KVCacheManager):
    """A cache for layers of which none sees further than `window` tokens; runs are at most `token_budget` long."""

    def __init__(self, num_blocks: int, block_size: int, window: int, token_budget: int) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self.window = window
        self.span = window_span(window, token_budget, block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        return min(self.blocks_for(num_tokens), self.span)

    def grow(self, request_id: RequestId, num_computed: int, num_tokens: int) -> bool:
        """Give back what is out of the window of position `num_computed`, then cover `num_tokens` tokens or `span` blocks."""
        self.trim(request_id, num_computed)
        return self._extend(request_id, self.missing(request_id, num_tokens))

    def trim(self, request_id: RequestId, num_computed: int) -> None:
        """Give back the blocks that no token from position `num_computed` on can read."""
        table = self.tables[request_id]
        count = max(num_computed - self.window + 1, 0) // self.block_size - table.first_block
        if count > 0:
            for block in table.block_ids[:count]:
                self._drop(block)
            table.block_ids = table.block_ids[count:]
            table.first_block += count

    def missing(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks that the table lacks to cover `num_tokens` tokens, or as many of them as one request may hold at once."""
        table = self.tables[request_id]
        return min(self.blocks_for(num_tokens) - table.first_block, self.span) - len(table.block_ids)

    def expected_peak(self, newcomer: Newcomer, remaining: Iterable[tuple[RequestId, int]]) -> float:
        """An upper bound: as if all reached their most at one moment."""
        decoding = blocks_touched(self.window, self.block_size)
        peak = self.most_blocks_for(newcomer.num_tokens + newcomer.remaining)
        for request_id, num_more in remaining:
            table = self.tables[request_id]
            held = len(table.block_ids)
            peak += max(held, min(decoding, table.first_block + held + self.blocks_for(num_more)))
        return peak / self.num_blocks

    def check(self) -> None:
        super().check()
        for request_id, table in self.tables.items():
            assert len(table.block_ids) <= self.span, f"{request_id} holds {len(table.block_ids)} of at most {self.span} blocks"


class GroupedKVCacheManager:
    """Two pools as one cache: `full` for the layers that see everything, `windowed` for the others. The interface of KVCacheManager.

    A table of `full` has that of `windowed` as its `window`. Counts of blocks are those of both pools together.
    """

    def __init__(self, full: KVCacheManager, windowed: WindowedKVCacheManager) -> None:
        assert full.block_size == windowed.block_size and not full.prefix_caching
        self.full = full
        self.windowed = windowed
        self.block_size = full.block_size
        self.num_blocks = full.num_blocks + windowed.num_blocks
        self.tables = full.tables

    @property
    def num_free(self) -> int:
        return self.full.num_free + self.windowed.num_free

    @property
    def blocks_used(self) -> int:
        return self.full.blocks_used + self.windowed.blocks_used

    def fits(self, num_tokens: int) -> bool:
        return self.full.fits(num_tokens) and self.windowed.fits(num_tokens)

    def lookup(self, token_ids: Sequence[int], salt: Hashable = None) -> PrefixHit:
        return self.full.lookup(token_ids, salt)

    def has_room(self, num_tokens: int, hit: PrefixHit) -> bool:
        return self.full.has_room(num_tokens, hit) and self.windowed.has_room(num_tokens, hit)

    def can_promise(self, num_tokens: int) -> bool:
        return self.full.can_promise(num_tokens) and self.windowed.can_promise(num_tokens)

    def expected_peak(self, newcomer: Newcomer, remaining: Iterable[tuple[RequestId, int]]) -> float:
        """That of the pool which is nearer to its end."""
        remaining = list(remaining)
        return max(self.full.expected_peak(newcomer, remaining), self.windowed.expected_peak(newcomer, remaining))

    def open(self, request_id: RequestId, hit: PrefixHit, max_num_tokens: int) -> int:
        num_cached = self.full.open(request_id, hit, max_num_tokens)
        self.windowed.open(request_id, hit, max_num_tokens)
        self.full.tables[request_id].window = self.windowed.tables[request_id]
        return num_cached

    def grow(self, request_id: RequestId, num_computed: int, num_tokens: int) -> bool:
        """Both tables, or nothing and False; what is out of the window is given back in either case."""
        self.windowed.trim(request_id, num_computed)
        if self.windowed.missing(request_id, num_tokens) > self.windowed.num_free:
            return False
        if not self.full.grow(request_id, num_computed, num_tokens):
            return False
        return self.windowed.grow(request_id, num_computed, num_tokens)

    def release(self, request_id: RequestId) -> None:
        self.full.release(request_id)
        self.windowed.release(request_id)

    def seal(self, request_id: RequestId, token_ids: Sequence[int], end: int) -> None:
        """Nothing is shared."""

    def unseal(self, request_id: RequestId, num_tokens: int) -> None:
        """Nothing is shared."""

    def forget(self, request_id: RequestId) -> None:
        """Nothing is shared."""

    def commit(self) -> None:
        """Nothing is provisional."""

    def rollback(self) -> None:
        """Nothing is provisional."""

    def check(self) -> None:
        self.full.check()
        self.windowed.check()
        windows = {request_id: table.window for request_id, table in self.full.tables.items()}
        assert windows == self.windowed.tables, "a request without its two tables"
