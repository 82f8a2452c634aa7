"""KV blocks in a server that speaks Redis' protocol: several engines share what one of them computed.

    segue:1:{tenant, 16 hex digits}:{digest, 48 hex digits}:kv    the block
    segue:1:{tenant, 16 hex digits}:{digest, 48 hex digits}:sum   a digest of its name and content

Both are set at once; they are two, so that a block is sent from where it lies, and the server keeps it where it was received.

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
_CONNECT_SECONDS, _REPLY_SECONDS = 1.0, 2.0  # unless the URL says otherwise
_MOST_KNOWN = 1 << 17  # names of which it is remembered that they are there
_AT_ONCE = 512  # names in one question
_REPLY_BYTES = 1 << 20
_PIECE_BYTES = 6000  # longer ones are sent on their own


class RemoteTier:
    """Threads may use it together. `find` knows what was stored or looked for; what has gone since is a miss."""

    kind = "remote"
    is_shared = True
    most_at_once = 8
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
                pipeline.strlen(_keys(name)[0])
            sizes = _answered(pipeline.execute)
            for name, size in zip(part, sizes, strict=True):
                self._note(name, size)
            if not all(sizes):
                return  # a block is of no use without those before it

    def store_all(self, blocks: list[tuple[bytes, memoryview]]) -> None:
        """Sent one after the other before the first reply is waited for. If it raises, some of them may be there all the same."""
        pipeline = self._client.pipeline(transaction=False)
        for name, block in blocks:
            pipeline.mset(dict(zip(_keys(name), (block, _digest(name, block)), strict=True)))
        _answered(pipeline.execute)
        for name, block in blocks:
            self._note(name, len(block))

    def load_all(self, blocks: list[tuple[bytes, memoryview]]) -> list[bool | TierError]:
        """Fill what is there. For each: False if it is not; an error if it is not what was stored, and is deleted. Small ones are
        asked for together, of large ones each by itself: a long reply is slow to take apart."""
        many = max(_REPLY_BYTES // len(blocks[0][1]), 1) if blocks else 1
        outcomes: list[bool | TierError] = []
        for at in range(0, len(blocks), many):
            part = blocks[at : at + many]
            pipeline = self._client.pipeline(transaction=False)
            for name, _ in part:
                pipeline.mget(*_keys(name))
            found = _answered(pipeline.execute)
            outcomes += [self._take(name, out, *parts) for (name, out), parts in zip(part, found, strict=True)]
        return outcomes

    def _take(self, name: bytes, out: memoryview, content: bytes | None, digest: bytes | None) -> bool | TierError:
        if content is None or digest is None:  # the server may have given up one of the two
            self._note(name, 0)
            return False
        if len(content) != len(out) or digest != _digest(name, content):
            self._note(name, 0)
            _answered(self._client.unlink, *_keys(name))
            return TierError(f"the block {_keys(name)[0]} is damaged; it was deleted")
        out[:] = content
        return True

    def drop(self, tenant: bytes | None = None) -> int:
        """Delete everything that engines have stored there, or all of one tenant; how many blocks. Others' keys stay."""
        with self._lock:
            gone = [name for name in self._known if tenant is None or name[:TENANT_BYTES] == tenant]
        for name in gone:
            self._note(name, 0)
        count = 0
        for keys in self._scan(tenant):
            _answered(self._client.unlink, *keys)
            count += sum(key.endswith(b":kv") for key in keys)
        return count

    def verify(self) -> tuple[int, int]:
        """Read every block; how many are whole, and how many were damaged and are deleted."""
        good = bad = 0
        for keys in self._scan(None):
            for key in (key for key in keys if key.endswith(b":kv")):
                name = bytes.fromhex(key.decode().removeprefix(_PREFIX).removesuffix(":kv").replace(":", ""))
                size = _answered(self._client.strlen, key)
                [outcome] = self.load_all([(name, memoryview(bytearray(size)))])
                good += outcome is True
                bad += isinstance(outcome, TierError)
        return good, bad

    def _scan(self, tenant: bytes | None) -> Iterator[list[bytes]]:
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
        from redis.connection import PythonRespSerializer
        from redis.retry import Retry
    except ImportError as error:
        raise InvalidRequest("tier", "a remote tier needs the extra: pip install 'segue[remote]'") from error
    options: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_timeout": _REPLY_SECONDS,
        "retry": Retry(NoBackoff(), 0),  # the breaker sees to that
        "command_packer": PythonRespSerializer(_PIECE_BYTES, _encoded),  # which does not copy what is long
    }
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        scheme = url.partition(":")[0]
        raise InvalidRequest("tier", f"remote={scheme}:… is no address such as redis://host:6379/0") from error


def _encoded(argument: Any) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


def _answered(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Whatever goes wrong on the way is an OSError, as with a file."""
    from redis.exceptions import RedisError

    try:
        return ask(*arguments)
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _keys(name: bytes) -> tuple[str, str]:
    """Of the block, and of its digest."""
    stem = f"{_PREFIX}{name[:TENANT_BYTES].hex()}:{name[TENANT_BYTES:].hex()}"
    return f"{stem}:kv", f"{stem}:sum"


def _digest(name: bytes, content: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(content, seed=xxhash.xxh3_64_intdigest(name))
