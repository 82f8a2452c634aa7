"""KV blocks in host memory: a cheaper tier of its own, and what every block passes through on its way to and from the others."""

from __future__ import annotations

from collections import Counter

from segue.kv.tiers.ahead import Ahead
from segue.kv.tiers.names import TENANT_BYTES
from segue.kv.tiers.replacement import Replacement


class HostTier:
    """Slots of one block each. A slot that is being filled, or read by another tier, is pinned: it is neither found nor reused
    before it is filled, nor reused while it is read. For one thread at a time."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self.memory = memory
        self.block_bytes = block_bytes
        self.num_slots = len(memory) // block_bytes
        if self.num_slots < 1:
            raise ValueError(f"{len(memory)} bytes hold no block of {block_bytes}")
        self._ahead = Ahead(memory)
        self._order = Replacement(self.num_slots)
        self._slot_of: dict[bytes, int] = {}
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._filling: set[bytes] = set()
        self._pins: Counter[bytes] = Counter()
        self._dropped: set[bytes] = set()  # pinned when it was to go: it goes with its last pin

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: bytes) -> bool:
        """Whether its content can be read."""
        return name in self._slot_of and name not in self._filling and name not in self._dropped

    def is_known(self, name: bytes) -> bool:
        """Here, or on its way."""
        return name in self._slot_of and name not in self._dropped

    def use(self, name: bytes) -> int:
        """The slot to read it from."""
        self._order.use(name)
        return self._slot_of[name]

    def begin(self, name: bytes) -> int | None:
        """A slot to fill for a name that is not known; None if there is none to be had. `filled` or `failed` ends it."""
        if name in self._slot_of:
            return None  # dropped, and still read by somebody
        if not self._free:
            gone = self._order.evict(lambda other: not self._pins[other])
            if gone is None:
                return None
            self._free.append(self._slot_of.pop(gone))
        slot = self._slot_of[name] = self._free.pop()
        self._ahead.reach((slot + 1) * self.block_bytes)
        self._order.add(name, 1)
        self._filling.add(name)
        self._pins[name] += 1
        return slot

    def filled(self, name: bytes) -> None:
        self._filling.discard(name)
        self.unpin(name)

    def failed(self, name: bytes) -> None:
        """Nothing came of it."""
        self._filling.discard(name)
        self._dropped.add(name)
        self.unpin(name)

    def view(self, slot: int) -> memoryview:
        at = slot * self.block_bytes
        return self.memory[at : at + self.block_bytes]

    def pin(self, name: bytes) -> memoryview:
        self._pins[name] += 1
        return self.view(self._slot_of[name])

    def unpin(self, name: bytes) -> None:
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            if name in self._dropped:
                self._remove(name)

    def drop(self, tenant: bytes | None = None) -> int:
        """Forget everything, or all of one tenant; how many blocks."""
        names = [name for name in self._slot_of if tenant is None or name[:TENANT_BYTES] == tenant]
        for name in names:
            if self._pins[name]:
                self._dropped.add(name)
            else:
                self._remove(name)
        return len(names)

    def _remove(self, name: bytes) -> None:
        self._dropped.discard(name)
        self._order.remove(name)
        self._free.append(self._slot_of.pop(name))
