"""KV blocks in a server that speaks Redis' protocol: several engines share what one of them computed.

    key    segue:1:{tenant, 16 hex digits}:{digest, 48 hex digits}
    value  the block | digest of its name and content (16)

How much is kept, and what goes when it is full, is the server's own affair (`maxmemory`, `maxmemory-policy`). Whoever can write
there is trusted: a digest tells damage, not malice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import xxhash

from segue.base.errors import InvalidRequest, TierError
from segue.kv.tiers.names import TENANT_BYTES

if TYPE_CHECKING:
    from redis import Redis

_PREFIX = "segue:1:"
_DIGEST_BYTES = 16
_CONNECT_SECONDS, _REPLY_SECONDS = 1.0, 2.0  # unless the URL says otherwise
_MOST_KNOWN = 1 << 17  # names of which it is remembered that they are there
_AT_ONCE = 512  # names in one question


class RemoteTier:
    """Threads may use it together. `find` knows what was stored or looked for; what has gone since is a miss."""

    kind = "remote"
    is_shared = True
    num_bytes: int | None = None

    def __init__(self, url: str) -> None:
        self._client = _connect(url)
        self._known: OrderedDict[bytes, int] = OrderedDict()  # name -> size
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Of those that this engine knows to be there."""
        return len(self._known)

    @property
    def size_bytes(self) -> int:
        return self._size

    def find(self, names: list[bytes]) -> list[bool]:
        return [name in self._known for name in names]

    def look(self, names: list[bytes]) -> None:
        """One question for many names. Which of them are there is for `find` to say."""
        for at in range(0, len(names), _AT_ONCE):
            part = names[at : at + _AT_ONCE]
            pipeline = self._client.pipeline(transaction=False)
            for name in part:
                pipeline.strlen(_key(name))
            sizes = _answered(pipeline.execute)
            for name, size in zip(part, sizes, strict=True):
                self._note(name, size)
            if not all(sizes):
                return  # a block is of no use without those before it

    def store(self, name: bytes, block: memoryview) -> None:
        value = b"".join((block, _digest(name, block)))
        _answered(self._client.set, _key(name), value)
        self._note(name, len(value))

    def load(self, name: bytes, out: memoryview) -> bool:
        """Fill `out`. False if it is not there; `TierError` if what is there is not what was stored, which is deleted."""
        value = _answered(self._client.get, _key(name))
        if value is None:
            self._note(name, 0)
            return False
        content = memoryview(value)[:-_DIGEST_BYTES]
        if len(content) != len(out) or value[len(content) :] != _digest(name, content):
            self._note(name, 0)
            _answered(self._client.unlink, _key(name))
            raise TierError(f"the block {_key(name)} is damaged; it was deleted")
        out[:] = content
        return True

    def drop(self, tenant: bytes | None = None) -> int:
        """Delete everything that engines have stored there, or all of one tenant; how many blocks. Others' keys stay."""
        with self._lock:
            gone = [name for name in self._known if tenant is None or name[:TENANT_BYTES] == tenant]
        for name in gone:
            self._note(name, 0)
        return sum(_answered(self._client.unlink, *keys) for keys in self._keys(tenant))

    def verify(self) -> tuple[int, int]:
        """Read every block; how many are whole, and how many were damaged and are deleted."""
        good = bad = 0
        for keys in self._keys(None):
            for key in keys:
                name = bytes.fromhex(key.decode().removeprefix(_PREFIX).replace(":", ""))
                size = _answered(self._client.strlen, key)
                try:
                    good += self.load(name, memoryview(bytearray(max(size - _DIGEST_BYTES, 0))))
                except TierError:
                    bad += 1
        return good, bad

    def _keys(self, tenant: bytes | None) -> Iterator[list[bytes]]:
        """Some at a time, all of them in the end."""
        pattern, cursor = f"{_PREFIX}{tenant.hex() if tenant is not None else '*'}:*", 0
        while True:
            cursor, keys = _answered(self._client.scan, cursor, pattern, 1000)
            if keys:
                yield keys
            if not cursor:
                return

    def _note(self, name: bytes, size: int) -> None:
        """It is there, with this size; or is not, with 0."""
        with self._lock:
            self._size -= self._known.pop(name, 0)
            if size:
                self._known[name] = size
                self._size += size
            if len(self._known) > _MOST_KNOWN:
                self._size -= self._known.popitem(last=False)[1]


def _connect(url: str) -> Redis:
    """Nothing is sent yet: the server may come later, and go, and come back."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise InvalidRequest("tier", "a remote tier needs the extra: pip install 'segue[remote]'") from error
    options: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_timeout": _REPLY_SECONDS,
        "retry": Retry(NoBackoff(), 0),  # the breaker sees to that
    }
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        scheme = url.partition(":")[0]
        raise InvalidRequest("tier", f"remote={scheme}:… is no address such as redis://host:6379/0") from error


def _answered(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Whatever goes wrong on the way is an OSError, as with a file."""
    from redis.exceptions import RedisError

    try:
        return ask(*arguments)
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _key(name: bytes) -> str:
    return f"{_PREFIX}{name[:TENANT_BYTES].hex()}:{name[TENANT_BYTES:].hex()}"


def _digest(name: bytes, content: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(content, seed=xxhash.xxh3_64_intdigest(name))
