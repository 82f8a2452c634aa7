"""The only door to KV memory: all that a scheduler may ask of it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from segue.base.types import Scope
from segue.kv.events import KVEvent, Observer, Removed, Stored
from segue.kv.hashing import ChainHash, chain_hash, extend_keys, token_chunks
from segue.kv.index import Match, PrefixIndex
from segue.kv.integrity import verify
from segue.kv.leases import Lease, Leases
from segue.kv.pool import BlockPool
from segue.kv.tables import BlockTable
from segue.kv.tiers.names import BlockNames


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
_NOBODY = object()  # owns what nobody will ask for


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
        self._tables: set[BlockTable] = set()
        self._copy_sources: Counter[int] = Counter()
        self._copy_targets: set[int] = (
            set()
        )  # of copies that a step under way is to make: nobody knows yet whether it does
        self._observers: list[Observer] = []
        self.leases = Leases(self._pool, block_size, self._emit)
        self._names: BlockNames | None = None
        self._name_of: list[bytes | None] = []  # by block, if there are tiers: what its content is called outside
        self._owner_of: list[object] = []  # by block, the same: who alone has used it; None: several, or nobody knows
        self._save: Callable[[list[tuple[int, bytes]]], None] | None = None

    # What there is

    @property
    def num_blocks(self) -> int:
        """That can be used: the null block is not one of them."""
        return self._pool.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        return self._pool.usage

    def count_cached(self) -> int:
        """Free blocks whose content could still be found. It looks at every block: for people, not for steps."""
        return sum(parent is not None and not refs for parent, refs in zip(self._parents, self._refs, strict=True))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    # Other tiers

    def name_blocks(self, names: BlockNames, save: Callable[[list[tuple[int, bytes]]], None]) -> None:
        """Give full blocks names that hold outside. `save` is called with blocks that are about to be reused, and their names."""
        self._names, self._save = names, save
        self._name_of = [None] * self._pool.num_blocks
        self._owner_of = [None] * self._pool.num_blocks

    def names(self, table: BlockTable, tokens: array[int], num_blocks: int) -> list[bytes]:
        """Of the first `num_blocks` blocks of a table, all of them full or to be."""
        if self._names is not None:
            self._names.extend(table.names, table.scope, tokens, num_blocks)
        return table.names[:num_blocks]

    def holds(self, block: int, name: bytes) -> bool:
        """Whether the block still has the content of this name, and somebody may want it."""
        return self._name_of[block] == name and self._owner_of[block] is not _NOBODY

    def retire(self, table: BlockTable) -> None:
        """The table's owner will not come back: what nobody else has used is not worth a copy when it leaves memory."""
        if self._names is None or table.owner is None:
            return
        owners = self._owner_of
        for block in table.blocks:
            if owners[block] is table.owner:
                owners[block] = _NOBODY

    def _note_use(self, blocks: Sequence[int], owner: object) -> None:
        owners = self._owner_of
        for block in blocks:
            if owners[block] is not owner:
                owners[block] = None

    # A table's life

    def open(self, tokens: array[int], scope: Scope, keys: Sequence[int] = (), owner: object = None) -> BlockTable:
        """An empty table for these tokens, their full blocks hashed: those that `keys`, a parent's, do not cover."""
        table = BlockTable(scope, self.prefix_caching, owner)
        table.keys.extend(keys)
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
        self,
        table: BlockTable,
        match: Match,
        num_tokens: int,
        *,
        headroom: int = 0,
        now: float = 0.0,
        below: float = inf,
        lender: Lease | None = None,
        consumed: Lease | None = None,
    ) -> Reservation | None:
        """Take the match and room for `num_tokens` in all. None, and no change, when the pool and the leases of a value
        `below` this cannot give it and keep `headroom` blocks free besides.

        A match that is a lease's own (`held`) is borrowed from it, the `lender`. A `consumed` lease ends here; if it alone
        holds the match's tail, that block is written in place instead of copied.
        """
        hit, tail = match.blocks, match.tail_block
        own_tail = None
        if tail is not None and consumed is not None and self._holds_alone(consumed, len(hit), tail):
            own_tail = tail
        missing = self.blocks_for(num_tokens) - len(hit) - (own_tail is not None)
        if not self._take(table, match, own_tail, lender, missing + headroom, now, below):
            return None
        if consumed is not None:
            self.leases.end(consumed, "continued")
        if own_tail is not None and self._parents[own_tail] is not None:
            self._evict([own_tail])
        if tail is not None and own_tail is None:
            return self._copy_tail(table, match, tail, missing, headroom)
        table.blocks.extend(self._allocate(missing))
        return Reservation(match.num_tokens)

    def _take(
        self,
        table: BlockTable,
        match: Match,
        own_tail: int | None,
        lender: Lease | None,
        needed: int,
        now: float,
        below: float,
    ) -> bool:
        """Hold what is about to be used before anything gives way for the `needed` free blocks."""
        pool, hit = self._pool, match.blocks
        tail = () if own_tail is None else (own_tail,)
        borrowed = match.num_borrowed
        found = hit[borrowed:]
        room = pool.num_free - needed
        if room < len(found) and not self.leases and room < sum(not self._refs[block] for block in found):
            return False
        if lender is not None and borrowed:
            self.leases.lend(lender, borrowed)
        pool.retain(found)
        pool.retain(tail)
        if not self.leases.reclaim(needed, now, table.scope.tenant, below):
            pool.release(tail)
            pool.release(found)
            if lender is not None and borrowed:
                self.leases.give_back(lender, borrowed)
            return False
        table.blocks.extend(hit)
        table.blocks.extend(tail)
        table.num_committed = len(hit)
        if self._names is not None:
            self._note_use(hit, table.owner)
        table.indexed = table.indexed and (match.indexed or not hit)
        table.lender, table.num_borrowed = lender if borrowed else None, borrowed
        return True

    def _holds_alone(self, lease: Lease, at: int, block: int) -> bool:
        """The block is the lease's at this place and nobody else's, and no table runs on it."""
        if not lease.num_lent <= at < len(lease.blocks) or lease.blocks[at] != block:
            return False
        return self._refs[block] - self._copy_sources[block] == 1

    def _copy_tail(self, table: BlockTable, match: Match, tail: int, missing: int, headroom: int) -> Reservation:
        """Holding the source of the copy must not take the last block: rather do without."""
        if not self._refs[tail] and self._pool.num_free <= missing + headroom:
            table.blocks.extend(self._allocate(missing))
            return Reservation(match.num_tokens - match.tail_tokens)
        self._pool.retain((tail,))
        self._copy_sources[tail] += 1
        at = len(table.blocks)
        table.blocks.extend(self._allocate(missing))
        self._copy_targets.add(table.blocks[at])
        return Reservation(match.num_tokens, Copy(tail, table.blocks[at]))

    def extend(
        self,
        table: BlockTable,
        start: int,
        stop: int,
        now: float = 0.0,
        below: float = inf,
        *,
        takes_shares: bool = False,
    ) -> Reservation | None:
        """Make positions `start … stop-1` writable: new blocks at the end, and a private copy of the block that
        holds `start` if others can see it. None, and no change, when the pool and the leases cannot give it. For `takes_shares`
        see `Leases.reclaim`."""
        size = self.block_size
        blocks = table.blocks
        held = len(blocks)
        at = start // size
        first = blocks[at] if at < held else None
        missing = -(-stop // size) - held if stop > held * size else 0
        if not missing and first is not None and self._refs[first] == 1 and self._parents[first] is None:
            return _NOTHING_NEEDED  # fifteen of sixteen decode steps
        shared = first is not None and self._visible_to_others(first)
        if (missing or shared) and not self.leases.reclaim(
            missing + shared, now, table.scope.tenant, below, takes_shares=takes_shares
        ):
            return None
        if first is not None and not shared and self._index.parent[first] is not None:
            self._evict([first])  # a tail of ours alone: its longer successor will be indexed when it is full
        if not (missing or shared):
            return _NOTHING_NEEDED
        copy = None
        if shared:
            copy = Copy(blocks[at], self._allocate(1)[0])
            self._copy_sources[copy.src] += 1  # the table's own hold on the source becomes the copy's
            blocks[at] = copy.dst
            self._copy_targets.add(copy.dst)
        blocks.extend(self._allocate(missing))
        return Reservation(0, copy)

    def settle(self, copy: Copy) -> None:
        """The step that was to make this copy has ended, well or not: its source may be reused."""
        self._copy_targets.discard(copy.dst)
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
        if self._names is not None:
            for block, there, name in zip(mine, serving, self.names(table, tokens, full)[first:], strict=False):
                self._name_of[there] = name
                if block == there:
                    self._owner_of[there] = table.owner
            self._note_use(serving, table.owner)
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
        if self._index.parent[block] is None and block not in self._copy_targets:
            self._index.add_tail(block, data, table.blocks[full - 1] if full else table.scope)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens` tokens, all of which have KV."""
        child = BlockTable(table.scope, table.indexed)
        full = num_tokens // self.block_size
        child.blocks = table.blocks[: self.blocks_for(num_tokens)]
        child.keys, child.names = table.keys[:full], table.names[:full]
        child.num_committed = min(table.num_committed, full)
        if table.lender is not None and full:
            child.lender, child.num_borrowed = table.lender, min(table.num_borrowed, full)
            self.leases.lend(table.lender, child.num_borrowed)
        self._pool.retain(child.blocks[child.num_borrowed :])
        self._tables.add(child)
        return child

    def clear(self, table: BlockTable) -> None:
        """Give the blocks back, keep the keys: what a preempted sequence does before it queues again."""
        self._pool.release(table.blocks[table.num_borrowed :])
        if table.lender is not None:
            self.leases.give_back(table.lender, table.num_borrowed)
            table.lender, table.num_borrowed = None, 0
        table.blocks = array("i")
        table.num_committed = 0
        table.indexed = self.prefix_caching

    def close(self, table: BlockTable) -> None:
        """The end of a table. Its indexed blocks stay findable until they are reused."""
        self.clear(table)
        self._tables.discard(table)

    # States: what outlives a table

    def hold(
        self,
        table: BlockTable,
        num_computed: int,
        *,
        job: str | None = None,
        expires_at: float | None = None,
        value: float = 0.0,
        transient: bool = False,
    ) -> Lease:
        """Keep the KV of the first `num_computed` tokens, whatever becomes of the table; but not a block that is still to be
        copied."""
        blocks = table.blocks[: self.blocks_for(num_computed)]
        if blocks and blocks[-1] in self._copy_targets:
            blocks.pop()
            num_computed = len(blocks) * self.block_size
        return self.leases.grant(
            table.scope,
            blocks,
            num_computed,
            indexed=table.indexed,
            job=job,
            expires_at=expires_at,
            value=value,
            transient=transient,
        )

    def share(self, lease: Lease, num_tokens: int, **terms: Any) -> Lease:
        """A second lease on the first `num_tokens` tokens of one that has at least those; `terms` as for `hold`."""
        blocks = lease.blocks[: self.blocks_for(num_tokens)]
        return self.leases.grant(lease.scope, blocks, num_tokens, indexed=lease.indexed, **terms)

    def held(self, lease: Lease, num_shared: int, table: BlockTable, tokens: array[int]) -> Match:
        """What a child that shares the first `num_shared` tokens with a lease can take: what the lease has of them without a
        look at the index, and from there on what the index has.

        tokens   |------ lent by the lease ------|---- found in the index ----|-- to compute --|
                 0                      num_borrowed*block_size          num_tokens        len(tokens)
        """
        count = min(lease.num_computed, num_shared, len(tokens) - 1)
        full, rest = divmod(count, self.block_size)
        lent = lease.blocks[:full]
        if lease.indexed:
            extend_keys(table.keys, table.scope, tokens, self.block_size, self._hash_block)
            more = self._index.match(table.keys, tokens, lent[-1] if full else lease.scope, skip=full)
            if more.num_tokens > count:
                return Match(
                    lent + array("i", more.blocks),
                    more.tail_block,
                    more.tail_tokens,
                    more.num_tokens,
                    num_borrowed=full,
                )
        return Match(lent, lease.blocks[full] if rest else None, rest, count, lease.indexed, num_borrowed=full)

    def publish(self, lease: Lease, tokens: array[int], keys: list[int]) -> None:
        """Let others find what a lease holds: its KV came from outside and is complete."""
        table = BlockTable(lease.scope, self.prefix_caching)
        table.blocks, table.keys = lease.blocks, keys
        self.commit(table, tokens, lease.num_computed)
        self.commit_tail(table, tokens, lease.num_computed)
        lease.blocks, lease.indexed = table.blocks, table.indexed

    def forget(self, tenant: str | None = None) -> None:
        """Empty the index, or one tenant's part of it: nothing computed so far will be found again, except through tables and
        leases."""
        for scope in self._index.scopes():
            for block in list(self._index.children_of(scope)) if tenant in (None, scope.tenant) else ():
                self._evict([block], keep=False)
        for table in self._tables:
            table.indexed = table.indexed and (not table.num_committed or tenant not in (None, table.scope.tenant))
        for lease in self.leases:
            lease.indexed = lease.indexed and tenant not in (None, lease.scope.tenant)

    def check(self) -> None:
        """Raise `IntegrityError` if any promise about memory is broken. Mutates nothing."""
        verify(self._pool, self._index, self._tables, self.leases, self._copy_sources)

    # Inside

    def _visible_to_others(self, block: int) -> bool:
        """Copies that read it in the coming step do not count: they are made before anything is written."""
        return self._refs[block] - self._copy_sources[block] > 1 or self._index.key[block] is not None

    def _allocate(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        parent = self._index.parent
        if indexed := [block for block in blocks if parent[block] is not None]:
            self._evict(indexed)
        return blocks

    def _evict(self, blocks: list[int], keep: bool = True) -> None:
        """Descendants go first: a child whose parent's block is rewritten must never be found below the new content. Unless told
        otherwise, other tiers may `keep` what they want of it."""
        parent, pending = self._index.parent, blocks[::-1]
        leaving: list[tuple[int, bytes]] = []
        while pending:
            if children := self._index.children_of(pending[-1]):
                pending.append(children[-1])
                continue
            gone = pending.pop()
            if parent[gone] is None:
                continue  # it went as another's descendant
            if self._observers:
                self._emit(Removed(gone, self._index.key[gone]))
            if self._names is not None and (name := self._name_of[gone]) is not None:
                self._name_of[gone] = None
                if self._owner_of[gone] is not _NOBODY:
                    leaving.append((gone, name))
            self._index.remove(gone)
        if leaving and keep and self._save is not None:
            self._save(leaving)

    def _emit(self, event: KVEvent) -> None:
        for observer in self._observers:
            observer(event)
