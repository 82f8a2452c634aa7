"""KV blocks in a folder: they survive the process, and a crash of it in the middle of a write.

    folder/ tenant, 16 hex digits / first byte of the digest / digest.kv

    the block | magic (8) | name (32) | length of the block u64 | digest of all this (16)

A file appears under its name by a rename, whole; if it is not whole after all, or a bit has changed, its digest says so and it is
deleted. Several engines may use one folder: each learns of the others' files when it looks for room or begins.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from segue.base.errors import TierError
from segue.kv.tiers.names import NAME_BYTES, TENANT_BYTES
from segue.kv.tiers.replacement import Replacement

_MAGIC = b"SEGUEKV1"
_TAIL = len(_MAGIC) + NAME_BYTES + 8 + 16
_SUFFIX, _UNFINISHED = ".kv", ".part"
_STALE_SECONDS = 3600.0  # an unfinished file so old has lost its writer
_RESCAN_SECONDS = 60.0


class DiskTier:
    """`store` and `load` may run in several threads at once, the rest alone; `find` and `__len__` only look."""

    kind = "disk"
    is_shared = False
    most_at_once = 1

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self.num_bytes: int | None = num_bytes
        self._capacity = num_bytes
        self._order = Replacement(num_bytes)
        self._numbers = itertools.count()
        self._own = secrets.token_hex(4)  # two containers may have the same process id
        self._lock = threading.Lock()  # for the order, not for files
        self._size_coming = 0  # of blocks that are being written
        self._scanned_at = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.scan()
        except OSError as error:
            raise TierError(f"{folder} cannot be used: {error}") from error

    def __len__(self) -> int:
        return len(self._order)

    @property
    def size_bytes(self) -> int:
        return self._order.size

    def find(self, names: list[bytes]) -> list[bool]:
        return [name in self._order for name in names]

    def look(self, names: list[bytes]) -> None:
        """What others write is found by `scan`."""

    def store_all(self, blocks: list[tuple[bytes, memoryview]]) -> None:
        for name, block in blocks:
            self.store(name, block)

    def load_all(self, blocks: list[tuple[bytes, memoryview]]) -> list[bool | TierError]:
        outcomes: list[bool | TierError] = []
        for name, out in blocks:
            try:
                outcomes.append(self.load(name, out))
            except TierError as error:
                outcomes.append(error)
        return outcomes

    def store(self, name: bytes, block: memoryview) -> None:
        """Raises OSError if it cannot be written; then nothing is left of it."""
        size = _TAIL + len(block)
        if name in self._order or size > self._capacity:
            return
        with self._lock:
            self._make_room(size + self._size_coming)
            self._size_coming += size
        try:
            self._write(name, block)
        finally:
            with self._lock:
                self._size_coming -= size
        with self._lock:
            if name not in self._order:
                self._order.add(name, size)

    def _write(self, name: bytes, block: memoryview) -> None:
        path = self._path(name)
        part = f"{os.path.dirname(path)}/{os.getpid()}-{self._own}-{next(self._numbers)}{_UNFINISHED}"
        try:
            descriptor = _create(part)
            try:
                _write(descriptor, block, _tail(name, block))
            finally:
                os.close(descriptor)
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def load(self, name: bytes, out: memoryview) -> bool:
        """Fill `out`. False if it is not there; `TierError` if what is there is not what was stored, which is deleted."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY)
        except FileNotFoundError:
            self._forget(name)
            return False
        try:
            tail = bytearray(_TAIL)
            whole = _read(descriptor, out, tail) and tail == _tail(name, out)
        finally:
            os.close(descriptor)
        if not whole:
            self.delete(name)
            raise TierError(f"{self._path(name)} is damaged; it was deleted")
        with self._lock:
            if name in self._order:
                self._order.use(name)
        return True

    def delete(self, name: bytes) -> None:
        self._forget(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def drop(self, tenant: bytes | None = None) -> int:
        """Delete everything, or all of one tenant; how many blocks."""
        self.scan()
        names = [name for name in self._order if tenant is None or name[:TENANT_BYTES] == tenant]
        for name in names:
            self.delete(name)
        return len(names)

    def verify(self) -> tuple[int, int]:
        """Read every file; how many are whole, and how many were damaged and are deleted."""
        self.scan()
        good = bad = 0
        for name, size in self._files():
            try:
                good += self.load(name, memoryview(bytearray(max(size - _TAIL, 0))))
            except TierError:
                bad += 1
        return good, bad

    def scan(self) -> None:
        """Learn what is in the folder: others may write there too."""
        found = dict(self._files())
        for name in self._order:
            if name not in found:
                self._order.remove(name)
        for name, size in found.items():
            if name not in self._order:
                self._order.add(name, size)
        self._scanned_at = time.monotonic()

    def _files(self) -> Iterator[tuple[bytes, int]]:
        """Names and sizes, oldest first. What has no business there is passed over; what was never finished is deleted."""
        entries = []
        for path in self.folder.glob("*/*/*"):
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                if path.suffix == _UNFINISHED and time.time() - status.st_mtime > _STALE_SECONDS:
                    path.unlink()
                name = bytes.fromhex(path.parent.parent.name + path.stem)
                if path.suffix == _SUFFIX and len(name) == NAME_BYTES and self._path(name) == str(path):
                    entries.append((status.st_mtime, name, status.st_size))
        for _, name, size in sorted(entries):
            yield name, size

    def _make_room(self, size: int) -> None:
        if self._order.size + size <= self._capacity:
            return
        if time.monotonic() > self._scanned_at + _RESCAN_SECONDS:
            self.scan()
        while self._order.size + size > self._capacity:
            gone = self._order.evict()
            if gone is None:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(gone))

    def _forget(self, name: bytes) -> None:
        with self._lock:
            if name in self._order:
                self._order.remove(name)

    def _path(self, name: bytes) -> str:
        digest = name[TENANT_BYTES:].hex()
        return f"{self.folder}/{name[:TENANT_BYTES].hex()}/{digest[:2]}/{digest}{_SUFFIX}"


def _tail(name: bytes, block: memoryview) -> bytes:
    """Behind the block: so the block itself is written and read page by page."""
    start = _MAGIC + name + len(block).to_bytes(8, "little")
    return start + xxhash.xxh3_128_digest(block, seed=xxhash.xxh3_64_intdigest(start))


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        for folder in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        return os.open(path, flags, 0o600)


def _write(descriptor: int, block: memoryview, tail: bytes) -> None:
    written = os.writev(descriptor, [block, tail])
    rest = (
        memoryview(bytes(block[written:]) + tail) if written < len(block) else memoryview(tail)[written - len(block) :]
    )
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, block: memoryview, tail: bytearray) -> bool:
    """Whether there is as much as is asked for, and no more."""
    if os.fstat(descriptor).st_size != len(block) + len(tail):
        return False
    count = 0
    while count < len(block):
        buffers: list[memoryview | bytearray] = [block[count:], tail]
        more = os.readv(descriptor, buffers)
        if not more:
            return False
        count += more
    missing = len(block) + len(tail) - count
    if missing:
        rest = os.read(descriptor, missing)
        tail[len(tail) - missing :] = rest
        return len(rest) == missing
    return True
