"""A sequence's view of KV memory."""

from __future__ import annotations

from array import array

from segue.base.types import Scope
from segue.kv.leases import Lease


class BlockTable:
    """The blocks of one sequence in logical order, and the chain keys of its full blocks.

    Only `KVManager` changes it. `blocks[i]` holds tokens `i*block_size …`; the table may be longer than what is computed
    (reserved), never shorter. `num_committed` counts the leading full blocks that were offered to the index; while
    `indexed`, all of those are in it, which is what lets the next one be found through them. The first `num_borrowed`
    blocks are full ones of the `lender`, a lease, which holds them for the table. Its `owner` is whoever's turns these are,
    if that is known.
    """

    __slots__ = ("blocks", "indexed", "keys", "lender", "names", "num_borrowed", "num_committed", "owner", "scope")

    def __init__(self, scope: Scope, indexed: bool, owner: object = None) -> None:
        self.scope = scope
        self.owner = owner
        self.blocks: array[int] = array("i")
        self.keys: list[int] = []
        self.names: list[bytes] = []  # the same for outside; empty until they are asked for
        self.num_committed = 0
        self.indexed = indexed
        self.lender: Lease | None = None
        self.num_borrowed = 0
