"""The only door to KV memory: all that a scheduler may ask of it."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from segue.base.types import Scope
from segue.kv.events import KVEvent, Leased, Observer, Removed, Revoked, Stored
from segue.kv.hashing import ChainHash, chain_hash, extend_keys, token_chunks
from segue.kv.index import Match, PrefixIndex
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
        self._refs, self._parents = self._pool.ref_count, self._index.parent
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
        table = BlockTable(scope, self.prefix_caching)
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

    def admit(
        self, table: BlockTable, match: Match, num_tokens: int, *, headroom: int = 0, now: float = 0.0
    ) -> Reservation | None:
        """Take the match and room for `num_tokens` in all. None, and no change, when the pool and the leases cannot
        give it and keep `headroom` blocks free besides."""
        pool, hit, tail = self._pool, match.blocks, match.tail_block
        missing = self.blocks_for(num_tokens) - len(hit)
        room = pool.num_free - missing - headroom
        if room < len(hit) and not self._leases and room < sum(not pool.ref_count[block] for block in hit):
            return None
        pool.retain(hit)  # before anything gives way: what is about to be used is not to be reclaimed
        if not self.reclaim(missing + headroom, now):
            pool.release(hit)
            return None
        if tail is not None and not pool.ref_count[tail] and pool.num_free <= missing + headroom:
            tail = None  # holding the source of the copy would take the last block: do without
        if tail is not None:
            pool.retain((tail,))
            self._copy_sources[tail] += 1
        table.blocks.extend(hit)
        table.blocks.extend(self._allocate(missing))
        table.num_committed = len(hit)
        if tail is None:
            return Reservation(len(hit) * self.block_size)
        return Reservation(match.num_tokens, Copy(tail, table.blocks[len(hit)]))

    def extend(self, table: BlockTable, start: int, stop: int, now: float = 0.0) -> Reservation | None:
        """Make positions `start … stop-1` writable: new blocks at the end, and a private copy of the block that
        holds `start` if others can see it. None, and no change, when the pool and the leases cannot give it."""
        size = self.block_size
        blocks = table.blocks
        held = len(blocks)
        at = start // size
        first = blocks[at] if at < held else None
        missing = -(-stop // size) - held if stop > held * size else 0
        if not missing and first is not None and self._refs[first] == 1 and self._parents[first] is None:
            return _NOTHING_NEEDED  # fifteen of sixteen decode steps
        shared = first is not None and self._visible_to_others(first)
        if (missing or shared) and not self.reclaim(missing + shared, now):
            return None
        if first is not None and not shared and self._index.parent[first] is not None:
            self._evict(first)  # a tail of ours alone: its longer successor will be indexed when it is full
        if not (missing or shared):
            return _NOTHING_NEEDED
        copy = None
        if shared:
            copy = Copy(blocks[at], self._allocate(1)[0])
            self._copy_sources[copy.src] += 1  # the table's own hold on the source becomes the copy's
            blocks[at] = copy.dst
        blocks.extend(self._allocate(missing))
        return Reservation(0, copy)

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
        if not table.indexed:
            return
        if len(table.keys) < full:
            extend_keys(table.keys, table.scope, tokens, size, self._hash_block)
        mine = table.blocks[first:full].tolist()
        keys = table.keys[first:full]
        contents = token_chunks(tokens[first * size : full * size], size)
        serving = self._index.add(mine, keys, contents, table.blocks[first - 1] if first else table.scope)
        table.indexed = len(serving) == len(mine)
        if serving != mine:
            self._repoint(table, first, mine, serving)
        for block, there, key in zip(mine, serving, keys, strict=False) if self._observers else ():
            if block == there:
                self._emit(Stored(block, key))

    def _repoint(self, table: BlockTable, first: int, mine: list[int], serving: list[int]) -> None:
        """Use what was there before us; safe, because tables are read anew for each plan."""
        for at, (block, there) in enumerate(zip(mine, serving, strict=False), first):
            if block != there:
                self._pool.retain((there,))
                self._pool.release((block,))
                table.blocks[at] = there

    def commit_tail(self, table: BlockTable, tokens: array[int], num_computed: int) -> None:
        """Let others find the partly filled last block as well. The holder's next write takes it out again."""
        full = num_computed // self.block_size
        data = tokens[full * self.block_size : num_computed].tobytes()
        if not (data and table.indexed):
            return
        block = table.blocks[full]
        if self._index.parent[block] is None:
            self._index.add_tail(block, data, table.blocks[full - 1] if full else table.scope)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens` tokens, all of which have KV."""
        child = BlockTable(table.scope, table.indexed)
        full = num_tokens // self.block_size
        child.blocks = table.blocks[: self.blocks_for(num_tokens)]
        child.keys = table.keys[:full]
        child.num_committed = min(table.num_committed, full)
        self._pool.retain(child.blocks)
        self._tables.add(child)
        return child

    def clear(self, table: BlockTable) -> None:
        """Give the blocks back, keep the keys: what a preempted sequence does before it queues again."""
        self._pool.release(table.blocks)
        table.blocks = array("i")
        table.num_committed = 0
        table.indexed = self.prefix_caching

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
        """Shrink leases, each from its tail, until `num_free` blocks are free. False, and no change, when all the
        leases together could not give that much."""
        if self._pool.num_free >= num_free:
            return True
        if not self._leases or self._pool.num_free + self._num_reclaimable() < num_free:
            return False
        leases = self._leases.by_worth(now)
        before = [len(lease.blocks) for lease in leases]
        for spare_shared in (True, False):  # first what frees memory at once, then what others still hold
            for lease in leases:
                self._shrink(lease, num_free, spare_shared)
        for lease, had in zip(leases, before, strict=True):
            if lost := had - len(lease.blocks):
                lease.num_computed = min(lease.num_computed, len(lease.blocks) * self.block_size)
                self._emit(Revoked(lease.id, lost))
                if not lease.blocks:
                    self._leases.remove(lease.id)
        return True

    def _num_reclaimable(self) -> int:
        """Blocks that nobody but leases holds."""
        held = Counter(block for lease in self._leases for block in lease.blocks)
        return sum(self._pool.ref_count[block] == count for block, count in held.items())

    def _shrink(self, lease: Lease, num_free: int, spare_shared: bool) -> None:
        refs = self._pool.ref_count
        while lease.blocks and self._pool.num_free < num_free:
            if spare_shared and refs[lease.blocks[-1]] > 1:
                return
            self._pool.release((lease.blocks.pop(),))

    def forget(self) -> None:
        """Empty the index: nothing computed so far will be found again, except through tables and leases."""
        for block in self._index.indexed_blocks():
            if self._index.parent[block] is not None:
                self._evict(block)
        for table in self._tables:
            table.indexed = table.indexed and not table.num_committed

    def check(self) -> None:
        """Raise `IntegrityError` if any promise about memory is broken. Mutates nothing."""
        verify(self._pool, self._index, self._tables, self._leases, self._copy_sources)

    # Inside

    def _visible_to_others(self, block: int) -> bool:
        return self._pool.ref_count[block] > 1 or self._index.key[block] is not None

    def _allocate(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        parent = self._index.parent
        for block in blocks:
            if parent[block] is not None:
                self._evict(block)
        return blocks

    def _evict(self, block: int) -> None:
        """Descendants go first: a child whose parent's block is rewritten must never be found below the new content."""
        pending = [block]
        while pending:
            if children := self._index.children_of(pending[-1]):
                pending.append(children[-1])
                continue
            gone = pending.pop()
            if self._observers:
                self._emit(Removed(gone, self._index.key[gone]))
            self._index.remove(gone)

    def _emit(self, event: KVEvent) -> None:
        for observer in self._observers:
            observer(event)
