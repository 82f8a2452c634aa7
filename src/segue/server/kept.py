"""What the server remembers for its clients between requests, within bounds that no tenant can use up alone."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from segue.base.types import Scope

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    salt: str
    value: T
    size_bytes: int


class Kept(Generic[T]):
    """By id, each seen only with the salt it came with. When there is too much, the tenant that has most gives up what it
    used longest ago, be it what was just added."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._tenants: dict[str, str] = {}  # id -> whose it is
        self._entries: dict[str, OrderedDict[str, _Entry[T]]] = {}  # by tenant, least recently used first
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def size_bytes(self) -> int:
        return self._bytes.total()

    def add(self, key: str, salt: str, value: T, size_bytes: int) -> None:
        self.remove(key)
        tenant = self._tenants[key] = Scope(salt).tenant
        self._entries.setdefault(tenant, OrderedDict())[key] = _Entry(salt, value, size_bytes)
        self._bytes[tenant] += size_bytes
        while len(self) > self._most:
            self._give_up_one(max(self._entries, key=lambda tenant: len(self._entries[tenant])))
        while self.size_bytes > self._most_bytes:
            self._give_up_one(max(self._entries, key=self._bytes.__getitem__))

    def get(self, key: str, salt: str) -> T | None:
        tenant = self._tenants.get(key)
        found = self._entries[tenant][key] if tenant is not None else None
        if tenant is None or found is None or found.salt != salt:
            return None
        self._entries[tenant].move_to_end(key)
        return found.value

    def remove(self, key: str) -> None:
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return
        self._bytes[tenant] -= self._entries[tenant].pop(key).size_bytes
        if not self._entries[tenant]:
            del self._entries[tenant], self._bytes[tenant]

    def _give_up_one(self, tenant: str) -> None:
        self.remove(next(iter(self._entries[tenant])))
