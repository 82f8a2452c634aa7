"""KV memory as bookkeeping: which block holds which tokens, who holds which block.

`KVManager` is the only door; nothing here knows torch, jobs or policies.
"""

from segue.kv.events import KVEvent, Leased, Removed, Revoked, Stored
from segue.kv.index import Match
from segue.kv.leases import Lease
from segue.kv.manager import Copy, KVManager, Reservation
from segue.kv.tables import BlockTable

__all__ = [
    "BlockTable",
    "Copy",
    "KVEvent",
    "KVManager",
    "Lease",
    "Leased",
    "Match",
    "Removed",
    "Reservation",
    "Revoked",
    "Stored",
]
