"""KV memory as bookkeeping: which block holds which tokens, who holds which block.

`KVManager` is the only door; nothing here knows torch, jobs or policies.
"""

from segue.kv.events import Ended, KVEvent, Leased, Removed, Renewed, Revoked, Stored
from segue.kv.index import Match
from segue.kv.layout import KVLayout
from segue.kv.leases import Lease, Leases
from segue.kv.manager import Copy, KVManager, Reservation
from segue.kv.tables import BlockTable

__all__ = [
    "BlockTable",
    "Copy",
    "Ended",
    "KVEvent",
    "KVLayout",
    "KVManager",
    "Lease",
    "Leased",
    "Leases",
    "Match",
    "Removed",
    "Renewed",
    "Reservation",
    "Revoked",
    "Stored",
]
