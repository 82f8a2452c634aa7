"""The only door to KV memory: all that a scheduler may ask of it."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from segue.base.types import Scope
from segue.kv.events import KVEvent, Leased, Observer, Removed, Revoked, Stored
from segue.kv.hashing import ChainHash, chain_hash, extend_keys
from segue.kv.index import Match, Parent, PrefixIndex
from segue.kv.integrity import verify
from segue.kv.leases import Lease, LeaseLedger
from segue.kv.pool import BlockPool
from segue.kv.tables import BlockTable


class Copy(NamedTuple):
    """Copy block `src` to block `dst`, in every layer, before anything is written in the step."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a sequence got. A `copy` must be settled once its step has ended: until then its source is held."""

    num_reused: int = 0
    copy: Copy | None = None


_NOTHING_NEEDED = Reservation()
_NO_MATCH = Match((), None, 0, 0)


class KVManager:
    """Tables, index, pool and leases kept in step.

    The life of a table, with what each call sees of its tokens:

        open     hash the full blocks               |0 ---------------------------- len(tokens)|
        match    what is there already              |0 ---- hit ----|
        admit    take the hit, reserve the rest     |0 ---- hit ----|------ reserved ------|
        commit   after each step, share what is full|0 -------- indexed --------|- private -|
        extend   room for more tokens                                           ……………-------| stop
        finish   index the partly filled last block too, then let go

    Every method either does all it says or, where it returns None, nothing.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, hash_block: ChainHash = chain_hash
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hash_block = hash_block
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks, block_size)
        self._leases = LeaseLedger()
        self._tables: set[BlockTable] = set()
        self._copy_sources: Counter[int] = Counter()
        self._observers: list[Observer] = []

    # What there is

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        return self._pool.usage

    @property
    def num_leased(self) -> int:
        return self._leases.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    # A table's life

    def open(self, tokens: array[int], scope: Scope) -> BlockTable:
        """An empty table for these tokens, their full blocks hashed."""
        table = BlockTable(scope)
        if self.prefix_caching:
            extend_keys(table.keys, scope, tokens, self.block_size, self._hash_block)
        self._tables.add(table)
        return table

    def match(self, table: BlockTable, tokens: array[int]) -> Match:
        """The longest prefix of `tokens` whose KV is in memory. Mutates nothing; valid until the next change."""
        if not self.prefix_caching:
            return _NO_MATCH
        extend_keys(table.keys, table.scope, tokens, self.block_size, self._hash_block)
        return self._index.match(table.keys, tokens, table.scope)

    def admit(self, table: BlockTable, match: Match, num_tokens: int, headroom: int = 0) -> Reservation | None:
        """Take the match and room for `num_tokens` in all. None, and no change, when the pool cannot give it and
        keep `headroom` blocks free besides."""
        refs = self._pool.ref_count
        missing = self.blocks_for(num_tokens) - len(match.blocks)
        room = self._pool.num_free - headroom - missing - sum(not refs[block] for block in match.blocks)
        tail = match.tail_block
        if tail is not None and room < (not refs[tail]):
            tail = None  # holding the source of the copy would take the last block: do without
        if room < 0:
            return None
        self._pool.retain(match.blocks)
        if tail is not None:
            self._hold_source(tail)
        table.blocks.extend(match.blocks)
        table.blocks.extend(self._allocate(missing))
        table.num_committed = len(match.blocks)
        if tail is None:
            return Reservation(len(match.blocks) * self.block_size)
        return Reservation(match.num_tokens, Copy(tail, table.blocks[len(match.blocks)]))

    def extend(self, table: BlockTable, start: int, stop: int, headroom: int = 0) -> Reservation | None:
        """Make positions `start … stop-1` writable: new blocks at the end, and a private copy of the block that
        holds `start` if others can see it. None, and no change, when the pool cannot give it and keep `headroom`
        blocks free besides."""
        size = self.block_size
        blocks = table.blocks
        missing = -(-stop // size) - len(blocks)
        at = start // size
        shared = at < len(blocks) and self._visible_to_others(blocks[at])
        if missing <= 0 and not shared:
            return _NOTHING_NEEDED
        if max(missing, 0) + shared + headroom > self._pool.num_free:
            return None
        copy = None
        if shared:
            copy = Copy(blocks[at], self._allocate(1)[0])
            self._copy_sources[copy.src] += 1  # the table's own hold on the source becomes the copy's
            blocks[at] = copy.dst
        if missing > 0:
            blocks.extend(self._allocate(missing))
        return Reservation(0, copy) if copy else _NOTHING_NEEDED

    def settle(self, copy: Copy) -> None:
        """The step that was to make this copy has ended, well or not: its source may be reused."""
        self._copy_sources[copy.src] -= 1
        if not self._copy_sources[copy.src]:
            del self._copy_sources[copy.src]
        self._pool.release((copy.src,))

    def commit(self, table: BlockTable, tokens: array[int], num_computed: int) -> None:
        """Positions below `num_computed` now have KV: enter newly full blocks into the index. Where the index has
        the same content already, the table is repointed and the duplicate freed."""
        size = self.block_size
        full = num_computed // size
        first = table.num_committed
        if full <= first:
            return
        table.num_committed = full
        if first and self._index.key[table.blocks[first - 1]] is None:
            table.indexed = False  # the index was emptied: nothing can be found below this table's own blocks
        if not (self.prefix_caching and table.indexed):
            return
        if len(table.keys) < full:
            extend_keys(table.keys, table.scope, tokens, size, self._hash_block)
        blocks, keys, add = table.blocks, table.keys, self._index.add
        data = tokens[first * size : full * size].tobytes()
        step = len(data) // (full - first)
        parent: Parent = blocks[first - 1] if first else table.scope
        for at in range(first, full):
            offset = (at - first) * step
            block = blocks[at]
            there = add(block, keys[at], data[offset : offset + step], parent)
            if there is None:
                table.indexed = False
                return
            if there != block:
                self._pool.retain((there,))
                self._pool.release((block,))
                blocks[at] = there
            elif self._observers:
                self._emit(Stored(block, keys[at]))
            parent = there

    def commit_tail(self, table: BlockTable, tokens: array[int], num_computed: int) -> None:
        """Let others find the partly filled last block as well. The holder's next write takes it out again."""
        full = num_computed // self.block_size
        data = tokens[full * self.block_size : num_computed].tobytes()
        if not (data and self.prefix_caching and table.indexed):
            return
        block = table.blocks[full]
        parent: Parent = table.blocks[full - 1] if full else table.scope
        if self._index.parent[block] is None and (not full or self._index.key[table.blocks[full - 1]] is not None):
            self._index.add_tail(block, data, parent)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens` tokens, all of which have KV."""
        child = BlockTable(table.scope)
        full = num_tokens // self.block_size
        child.blocks = table.blocks[: self.blocks_for(num_tokens)]
        child.keys = table.keys[:full]
        child.num_committed = min(table.num_committed, full)
        child.indexed = table.indexed
        self._pool.retain(child.blocks)
        self._tables.add(child)
        return child

    def clear(self, table: BlockTable) -> None:
        """Give the blocks back, keep the keys: what a preempted sequence does before it queues again."""
        self._pool.release(table.blocks)
        table.blocks = array("i")
        table.num_committed = 0
        table.indexed = True

    def close(self, table: BlockTable) -> None:
        """The end of a table. Its indexed blocks stay findable until they are reused."""
        self.clear(table)
        self._tables.discard(table)

    # Leases

    def hold(
        self,
        table: BlockTable,
        tokens: array[int],
        num_computed: int,
        *,
        job: str | None = None,
        expires_at: float | None = None,
        value: float = 0.0,
    ) -> Lease:
        """Keep the KV of the first `num_computed` tokens after the table is closed."""
        blocks = list(table.blocks[: self.blocks_for(num_computed)])
        self._pool.retain(blocks)
        lease = Lease(
            self._leases.new_id(), table.scope, job, blocks, tokens[:], num_computed, expires_at=expires_at, value=value
        )
        self._leases.add(lease)
        self._emit(Leased(lease.id, len(blocks)))
        return lease

    def drop(self, lease: Lease) -> None:
        """End a lease; a second time does nothing."""
        if self._leases.remove(lease.id) is not None:
            self._pool.release(lease.blocks)
            lease.blocks.clear()

    def reclaim(self, num_free: int, now: float) -> bool:
        """Shrink leases from their tails until `num_free` blocks are free, or nothing is leased. True if any gave way."""
        gave = False
        for lease in self._leases.by_worth(now):
            before = len(lease.blocks)
            while lease.blocks and self._pool.num_free < num_free:
                self._pool.release((lease.blocks.pop(),))
            lost = before - len(lease.blocks)
            if lost:
                gave = True
                lease.num_computed = min(lease.num_computed, len(lease.blocks) * self.block_size)
                self._emit(Revoked(lease.id, lost))
            if self._pool.num_free >= num_free:
                break
        return gave

    def forget(self) -> None:
        """Empty the index: nothing computed so far will be found again, except through tables and leases."""
        for block in self._index.indexed_blocks():
            if self._index.parent[block] is not None:
                self._evict(block)

    def check(self) -> None:
        """Raise `IntegrityError` if any promise about memory is broken. Mutates nothing."""
        verify(self._pool, self._index, self._tables, self._leases, self._copy_sources)

    # Inside

    def _visible_to_others(self, block: int) -> bool:
        if self._pool.ref_count[block] > 1:
            return True
        if self._index.is_tail(block):
            self._evict(block)  # ours alone: its longer successor will be indexed when it is full
            return False
        return self._index.parent[block] is not None

    def _hold_source(self, block: int) -> None:
        self._pool.retain((block,))
        self._copy_sources[block] += 1

    def _allocate(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        parent = self._index.parent
        for block in blocks:
            if parent[block] is not None:
                self._evict(block)
        return blocks

    def _evict(self, block: int) -> None:
        """Descendants go first: a child whose parent's block is rewritten must never be found below the new content."""
        while children := self._index.children_of(block):
            self._evict(children[-1][1])
        if self._observers:
            self._emit(Removed(block, self._index.key[block]))
        self._index.remove(block)

    def _emit(self, event: KVEvent) -> None:
        for observer in self._observers:
            observer(event)
