"""Who is asking, and how much they may ask for. A tenant is an API key: its own scope, quota and limits."""

from __future__ import annotations

import hashlib
import math
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest, SegueError

_FIELDS = ("name", "key", "requests_per_minute", "max_concurrent", "lease_quota")


class Unauthorized(SegueError):
    status = 401


class TooMany(SegueError):
    """Over a limit of the tenant (429) or of the server (503); worth another try in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(retry_after))
        self.status = status


@dataclass(frozen=True, slots=True)
class Tenant:
    """None: no limit. The key itself is not kept, only its digest is."""

    name: str = ""
    requests_per_minute: float | None = None
    max_concurrent: int | None = None
    lease_quota: int | None = None  # in blocks

    def salt(self, cache_salt: str) -> str:
        """The engine's scope: of this tenant alone, and of those of its requests that give the same `cache_salt`."""
        return f"{self.name}\0{cache_salt}" if cache_salt else self.name


class Gate:
    """Lets a tenant's requests in, up to its rate (a bucket that holds ten seconds' worth) and its concurrency."""

    def __init__(self, tenant: Tenant, now: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.num_running = 0
        self._now = now
        rate = tenant.requests_per_minute
        self._per_second = None if rate is None else rate / 60
        self._capacity = max(1.0, (self._per_second or 0) * 10) if rate != 0 else 0.0
        self._tokens = self._capacity
        self._filled_at = now()

    @contextmanager
    def entry(self, count: int = 1) -> Iterator[None]:
        """For as long as `count` requests take."""
        most = self.tenant.max_concurrent
        if most is not None and 0 < most < count:
            raise InvalidRequest("prompt", f"{count} at once: this key may have at most {most} requests at a time")
        if most is not None and self.num_running + count > most:
            raise TooMany(f"{self.num_running} of at most {most} requests at a time are running", 1)
        self._take(count)
        self.num_running += count
        try:
            yield
        finally:
            self.num_running -= count

    def _take(self, count: int) -> None:
        if self._per_second is None:
            return
        if 0 < self._capacity < count:
            raise InvalidRequest(
                "prompt",
                f"{count} at once: this key may have at most {int(self._capacity)} requests at once by its rate",
            )
        now = self._now()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens < count:
            wait = (count - self._tokens) / self._per_second if self._per_second else 60
            raise TooMany(f"over {self.tenant.requests_per_minute:g} requests a minute", min(wait, 3600))
        self._tokens -= count


class Tenants:
    """By API key. Without any key, everybody is the one tenant without a name."""

    def __init__(self, keys: Mapping[str, Tenant]) -> None:
        self._gates = {_digest(key): Gate(tenant) for key, tenant in keys.items()}
        self._everybody = Gate(Tenant()) if not keys else None

    @property
    def open_to_all(self) -> bool:
        return self._everybody is not None

    def __iter__(self) -> Iterator[Tenant]:
        gates = [self._everybody] if self._everybody is not None else self._gates.values()
        return iter([gate.tenant for gate in gates])

    def gate(self, authorization: str | None) -> Gate:
        """Found by the key's digest, so that the time it takes says nothing about keys."""
        if self._everybody is not None:
            return self._everybody
        scheme, _, key = (authorization or "").partition(" ")
        gate = self._gates.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if gate is None:
            raise Unauthorized("the API key is missing or not known: send 'Authorization: Bearer KEY'")
        return gate


def read_tenants(file: Path | None, keys: Sequence[str]) -> Tenants:
    """From a TOML file of [[tenant]] tables, and from bare keys, whose tenants are called key-1, key-2 and so on."""
    found: dict[str, Tenant] = {}
    for number, table in enumerate(_tables(file), 1):
        tenant = _tenant(table, f"tenant {number} in {file}")
        if table["key"] in found or tenant.name in {known.name for known in found.values()}:
            raise InvalidRequest("keys", f"{tenant.name!r}: its name or its key is there twice")
        found[table["key"]] = tenant
    for number, key in enumerate(keys, 1):
        if len(key) < 8:
            raise InvalidRequest("keys", "an API key has at least 8 characters")
        name = f"key-{number}"
        if key not in found and name in {known.name for known in found.values()}:
            raise InvalidRequest(
                "keys", f"{name!r} is the name of a tenant in the file, and of key {number}, which has none"
            )
        found.setdefault(key, Tenant(name))
    return Tenants(found)


def _tables(file: Path | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")).get("tenant", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest("keys", f"{file} cannot be read: {error}") from error
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise InvalidRequest("keys", f"{file} has no [[tenant]] tables")
    return tables


def _tenant(table: Mapping[str, Any], where: str) -> Tenant:
    for name in table:
        if name not in _FIELDS:
            raise InvalidRequest("keys", f"{where}: {name!r} is not one of {', '.join(_FIELDS)}")
    for name in ("name", "key"):
        if not isinstance(table.get(name), str) or not table[name]:
            raise InvalidRequest("keys", f"{where}: {name} is missing")
    if not table["name"].isprintable() or len(table["name"]) > 128:
        raise InvalidRequest("keys", f"{where}: a name has up to 128 printable characters")
    if len(table["key"]) < 8:
        raise InvalidRequest("keys", f"{where}: a key has at least 8 characters")
    limits = {name: table[name] for name in _FIELDS[2:] if name in table}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise InvalidRequest("keys", f"{where}: {name} must be a number, got {value!r}")
        if name != "requests_per_minute" and not isinstance(value, int):
            raise InvalidRequest("keys", f"{where}: {name} must be a whole number, got {value!r}")
    return Tenant(table["name"], **limits)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16, person=b"segue api key").digest()
