"""The promises of KV memory, checked one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from segue.base.errors import IntegrityError
from segue.base.types import Scope
from segue.kv.hashing import TOKEN_BYTES
from segue.kv.index import PrefixIndex
from segue.kv.leases import Leases
from segue.kv.pool import NULL_BLOCK, BlockPool
from segue.kv.tables import BlockTable


def verify(
    pool: BlockPool,
    index: PrefixIndex,
    tables: Iterable[BlockTable],
    leases: Leases,
    copy_sources: Counter[int],
) -> None:
    tables = list(tables)
    held: Counter[int] = Counter(copy_sources)
    for table in tables:
        held.update(table.blocks[table.num_borrowed :])
        _check_table(table, index)
    for lease in (*leases, *leases.outstanding()):
        held.update(lease.blocks)
    _check_leases(leases, index)
    _check_loans(tables, leases)
    _check_pool(pool, held)
    _check_index(pool, index)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)


def _check_table(table: BlockTable, index: PrefixIndex) -> None:
    _require(len(set(table.blocks)) == len(table.blocks), f"a table names a block twice: {list(table.blocks)}")
    _require(NULL_BLOCK not in table.blocks, "a table names the null block")
    _require(table.num_committed <= len(table.blocks), "a table committed more blocks than it has")
    if not table.indexed:
        return
    for at in range(table.num_committed):
        block = table.blocks[at]
        _require(index.key[block] == table.keys[at], f"block {block} is not indexed under its table's key")
        before = table.blocks[at - 1] if at else table.scope
        _require(index.parent[block] == before, f"block {block} has another parent in the index than in its table")


def _check_leases(leases: Leases, index: PrefixIndex) -> None:
    totals: Counter[str] = Counter()
    for lease in leases:
        totals[lease.scope.tenant] += 0 if lease.transient else len(lease.blocks)
        _require(len(lease.blocks) > 0, f"lease {lease.id} is in the ledger and holds nothing")
        _require(lease.num_computed > (len(lease.blocks) - 1) * index.block_size, f"lease {lease.id} holds idle blocks")
        _require(lease.num_computed <= len(lease.blocks) * index.block_size, f"lease {lease.id} claims KV it lost")
        before: int | Scope = lease.scope
        for block in lease.blocks[: lease.num_computed // index.block_size] if lease.indexed else ():
            _require(index.parent[block] == before, f"block {block} of lease {lease.id} is not indexed below {before}")
            before = block
    _require(+totals == leases.totals, f"leases hold {dict(totals)} blocks, {dict(leases.totals)} counted")
    _require(leases.order_agrees(), "the order of leases names others than there are")


def _check_loans(tables: Iterable[BlockTable], leases: Leases) -> None:
    loans: dict[int, list[int]] = {}
    for table in tables:
        if table.lender is not None:
            loans.setdefault(table.lender.id, []).append(table.num_borrowed)
            borrowed = table.blocks[: table.num_borrowed]
            _require(borrowed == table.lender.blocks[: len(borrowed)], f"lease {table.lender.id} lost what it has lent")
    for lease in (*leases, *leases.outstanding()):
        found = sorted(loans.pop(lease.id, []))
        _require(lease.loans == found, f"lease {lease.id} counts loans of {lease.loans} blocks, {found} found")
    _require(all(lease.loans for lease in leases.outstanding()), "an ended lease is kept for nobody")
    _require(not loans, f"tables borrow from leases that are not there: {loans}")


def _check_pool(pool: BlockPool, held: Counter[int]) -> None:
    try:
        free = pool.free_blocks()
    except ValueError as error:
        raise IntegrityError(str(error)) from error
    _require(len(free) == pool.num_free, f"{len(free)} blocks in the free list, {pool.num_free} counted")
    _require(len(set(free)) == len(free), "a block is in the free list twice")
    _require(NULL_BLOCK not in free and not pool.ref_count[NULL_BLOCK], "the null block is in use")
    free_set = set(free)
    for block in range(1, pool.num_blocks):
        refs = pool.ref_count[block]
        _require(refs == held[block], f"block {block} counts {refs} holders, {held[block]} found")
        _require((refs == 0) == (block in free_set), f"block {block} has {refs} holders, free: {block in free_set}")


def _check_index(pool: BlockPool, index: PrefixIndex) -> None:
    for block in index.indexed_blocks():
        parent, key, tokens = index.parent[block], index.key[block], index.tokens[block]
        assert parent is not None
        _require(block in index.children_of(parent), f"block {block} is not among its parent's children")
        _require(len(tokens) % TOKEN_BYTES == 0 and len(tokens) > 0, f"block {block} is indexed with no tokens")
        if key is not None:
            _require(index.block_of(key) == block, f"block {block} is not found by its key")
        else:
            _require(not index.children_of(block), f"partial block {block} has children")
        if isinstance(parent, int):
            _require(index.key[parent] is not None, f"block {block} is indexed below block {parent}, which is not")
            _require(
                bool(pool.ref_count[parent]) or not pool.ref_count[block],
                f"block {block} is held, its parent {parent} is free",
            )
