"""Blocks, block tables, reference counts, prefix cache, LRU: who holds which part of the KV cache.

    blocks:   0 .. num_blocks - 1, each of block_size token slots, in one of three states

    held      in at least one request's table; its reference count says in how many
    cached    in no table, but its content is known by hash and may be taken again; evicted oldest first
    blank     in no table, content of no use

Free = cached + blank. Only full blocks are registered by hash, and a full block is never written again, so sharing needs no
copy. The method is vLLM's (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023), with registrations that stay provisional until the step that computes them has succeeded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from contbatch_cli.core.forecast import Demand, peak_tokens
from contbatch_cli.core.request import RequestId

ChainHash = Callable[[int, Hashable], int]


def chain_hash(parent: int, content: Hashable) -> int:
    """The hash of a block's content after its parent's hash."""
    return hash((parent, content))


class PrefixNode:
    """The content of a full block and of all blocks before it. Equal by tokens, all the way up; the hash is only a shortcut."""

    __slots__ = ("_hash", "content", "parent")

    def __init__(self, parent: PrefixNode | None, content: Hashable, hasher: ChainHash = chain_hash) -> None:
        self.parent = parent
        self.content = content
        self._hash: int = hasher(0 if parent is None else parent._hash, content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        one: PrefixNode | None = self
        two = other if isinstance(other, PrefixNode) else None
        while one is not two:
            if one is None or two is None or one.content != two.content:
                return False
            one, two = one.parent, two.parent
        return True


class BlockTable:
    """One request's blocks in order of position; the first `num_sealed` are full, and `node` is their content.

    `num_promised` blocks are the most that it will hold. `first_block` blocks before the table's first were given back because no
    token reads them any more; `window` is the request's table for layers with a window, where these have one of their own.
    """

    __slots__ = ("block_ids", "first_block", "node", "num_promised", "num_sealed", "num_shared", "window")

    def __init__(self, block_ids: tuple[int, ...], node: PrefixNode, num_promised: int) -> None:
        self.block_ids = block_ids
        self.first_block = 0
        self.num_promised = num_promised
        self.window: BlockTable | None = None
        self.node = node
        self.num_sealed = len(block_ids)
        self.num_shared = len(block_ids)


class PrefixHit(NamedTuple):
    """The blocks that already hold the start of a prompt, how many of them are free now, and the node they end at."""

    block_ids: tuple[int, ...]
    num_free: int
    node: PrefixNode


class Newcomer(NamedTuple):
    """A request that might start: its known tokens, the prefix that is there already, and the tokens expected to come."""

    num_tokens: int
    hit: PrefixHit
    remaining: int


class KVCacheManager:
    """Hands out the blocks of a cache of `num_blocks` blocks of `block_size` tokens.

    One step is: any of `open`, `grow`, `seal`, `release`, then `commit` when the step was executed or `rollback` when not.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, hasher: ChainHash = chain_hash) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks: num_blocks {num_blocks}, block_size {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.tables: dict[RequestId, BlockTable] = {}
        self._hasher = hasher
        self._num_tables = [0] * num_blocks
        self._node_of: list[PrefixNode | None] = [None] * num_blocks
        self._block_of: dict[PrefixNode, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._provisional: list[int] = []
        self._num_promised = 0

    # What can be asked

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def blocks_used(self) -> int:
        return self.num_blocks - len(self._blank) - len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request holds at any one time until it has `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether an empty cache holds a request to its end."""
        return self.most_blocks_for(num_tokens) <= self.num_blocks

    def has_room(self, num_tokens: int, hit: PrefixHit) -> bool:
        """Whether a request of `num_tokens` known tokens can be opened with `hit` and grown now."""
        return self._needed(num_tokens, hit) <= self.num_free

    def can_promise(self, num_tokens: int) -> bool:
        """Whether all tables at their most, and one more of `num_tokens` tokens, fit the cache."""
        return self._num_promised + self.most_blocks_for(num_tokens) <= self.num_blocks

    def expected_peak(self, newcomer: Newcomer, remaining: Iterable[tuple[RequestId, int]]) -> float:
        """Expected peak of use, as a share of the cache, if `newcomer` joined the tables, of which `remaining` tokens are to come."""
        size = self.block_size
        needed = self._needed(newcomer.num_tokens, newcomer.hit)
        demands = [Demand(newcomer.remaining, needed * size)]
        for request_id, num_more in remaining:
            table = self.tables[request_id]
            demands.append(Demand(num_more, (len(table.block_ids) - table.num_shared) * size))
        shared = max(self.blocks_used + needed - sum(demand.own for demand in demands) // size, 0)
        return (shared + self.blocks_for(peak_tokens(demands, size // 2))) / self.num_blocks

    def _needed(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that opening with `hit` and growing to `num_tokens` tokens takes."""
        return self.most_blocks_for(num_tokens) - len(hit.block_ids) + hit.num_free

    def lookup(self, token_ids: Sequence[int], salt: Hashable = None) -> PrefixHit:
        """The longest registered prefix of `token_ids` in full blocks that leaves at least the last token to be computed."""
        node = PrefixNode(None, salt, self._hasher)
        block_ids: list[int] = []
        num_free = 0
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size if self.prefix_caching else 0, size):
            child = PrefixNode(node, tuple(token_ids[start : start + size]), self._hasher)
            block = self._block_of.get(child)
            if block is None:
                break
            node = child
            block_ids.append(block)
            num_free += not self._num_tables[block]
        return PrefixHit(tuple(block_ids), num_free, node)

    # What changes it

    def open(self, request_id: RequestId, hit: PrefixHit, max_num_tokens: int) -> int:
        """Start a request's table with the blocks of `hit`, a lookup of this very moment; returns the tokens they hold.

        The request will have `max_num_tokens` tokens at most.
        """
        assert request_id not in self.tables, f"{request_id} has a table already"
        for block in hit.block_ids:
            if not self._num_tables[block]:
                del self._cached[block]
            self._num_tables[block] += 1
        table = self.tables[request_id] = BlockTable(hit.block_ids, hit.node, self.most_blocks_for(max_num_tokens))
        self._num_promised += table.num_promised
        return len(hit.block_ids) * self.block_size

    def grow(self, request_id: RequestId, num_computed: int, num_tokens: int) -> bool:
        """Make the request's table cover its `num_tokens` known tokens, `num_computed` of them computed: or nothing and False."""
        missing = -(-num_tokens // self.block_size) - len(self.tables[request_id].block_ids)
        return missing <= 0 or self._extend(request_id, missing)

    def _extend(self, request_id: RequestId, missing: int) -> bool:
        """`missing` more blocks at the end of the table: all of them, or nothing and False."""
        if missing > self.num_free:
            return False
        self.tables[request_id].block_ids += tuple(self._take_blank() for _ in range(missing))
        return True

    def seal(self, request_id: RequestId, token_ids: Sequence[int], end: int) -> None:
        """Register, provisionally, the request's blocks that tokens up to `end` fill; `token_ids` are all its known tokens."""
        table = self.tables[request_id]
        size = self.block_size
        while self.prefix_caching and (table.num_sealed + 1) * size <= end:
            start = table.num_sealed * size
            node = PrefixNode(table.node, tuple(token_ids[start : start + size]), self._hasher)
            block = table.block_ids[table.num_sealed]
            if node not in self._block_of:
                self._block_of[node] = block
                self._node_of[block] = node
                self._provisional.append(block)
            table.node = node
            table.num_sealed += 1

    def commit(self) -> None:
        """The step was executed: what it registered is written."""
        self._provisional.clear()

    def rollback(self) -> None:
        """The step was not executed: forget what it registered. Tables stay; those that were opened on such blocks must go."""
        for block in self._provisional:
            self._unregister(block)
        self._provisional.clear()

    def unseal(self, request_id: RequestId, num_tokens: int) -> None:
        """Step a table's registered content back to the full blocks within `num_tokens` tokens, after a `rollback`."""
        table = self.tables[request_id]
        while table.num_sealed > num_tokens // self.block_size:
            assert table.node.parent is not None
            table.node = table.node.parent
            table.num_sealed -= 1

    def release(self, request_id: RequestId) -> None:
        """Give a request's blocks back, if it has any. Registered ones stay findable, the end of the prompt evicted first."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self._num_promised -= table.num_promised
            for block in reversed(table.block_ids):
                self._drop(block)

    def _drop(self, block: int) -> None:
        """One table less holds the block."""
        self._num_tables[block] -= 1
        if not self._num_tables[block]:
            if self._node_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def forget(self, request_id: RequestId) -> None:
        """Unregister all blocks of a request whose values cannot be trusted; they stay in its table."""
        for block in self.tables[request_id].block_ids:
            self._unregister(block)

    def _take_blank(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unregister(block)
        self._num_tables[block] = 1
        return block

    def _unregister(self, block: int) -> None:
        node = self._node_of[block]
        if node is not None:
            del self._block_of[node]
            self._node_of[block] = None
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def check(self) -> None:
        """Assert every invariant of the class. Cost grows with the cache: for tests."""
        holders = [0] * self.num_blocks
        for request_id, table in self.tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), f"{request_id} holds a block twice"
            assert table.num_sealed <= len(table.block_ids)
            for block in table.block_ids:
                holders[block] += 1
        assert holders == self._num_tables, "reference counts differ from the tables"
        assert self._num_promised == sum(table.num_promised for table in self.tables.values()), (
            "promises differ from the tables"
        )
        free = self._blank + list(self._cached)
        assert len(free) == len(set(free)), "a block is free twice"
        assert sorted(free) == [block for block, count in enumerate(holders) if not count], "free differs from unreferenced"
        assert all(self._node_of[block] is None for block in self._blank), "a blank block is registered"
        assert all(self._node_of[block] is not None for block in self._cached), "a cached block is not registered"
        registered = {block: node for block, node in enumerate(self._node_of) if node is not None}
        assert {block: node for node, block in self._block_of.items()} == registered, "the two directions disagree"
        for block, count in enumerate(holders):
            assert count <= 1 or block in registered or not self._is_writable(block), f"shared block {block} may be written"

    def _is_writable(self, block: int) -> bool:
        """Whether some table still has slots of this block to fill."""
        return any(block in table.block_ids[table.num_sealed :] for table in self.tables.values())
