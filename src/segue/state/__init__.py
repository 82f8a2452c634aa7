"""A request's state as data: what it is, how it is written down, and which states an engine knows."""

from segue.state.ledger import State, StateLedger
from segue.state.snapshot import Progress, Snapshot

__all__ = ["Progress", "Snapshot", "State", "StateLedger"]
