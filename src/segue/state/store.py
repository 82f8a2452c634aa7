"""Saved states: a snapshot and its KV in one file, written all or not at all, and believed only by its digests.

Two threads move the bytes, so that filling or using one chunk overlaps with writing or reading the next:

    save   caller |fill 0, digest|fill 1, digest|fill 2, digest|
           thread                |write 0       |write 1       |write 2 |
    take   thread |read 0, check |read 1, check |read 2, check |
           caller                |use 0         |use 1         |use 2   |
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from segue.base.errors import InvalidRequest, SnapshotError, StateError, UnknownState
from segue.state.codec import DIGEST_BYTES, Preamble, chunk_digest, encode, read_preamble
from segue.state.snapshot import Snapshot

T = TypeVar("T")
SUFFIX = ".segue"
STALE_SECONDS = 3600.0  # a temporary not written to for so long is of a process that died
_TEMPORARY = ".saving"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NUM_BUFFERS = 3  # one at each end, and one between them
_CACHE_LINE = 64


def save(path: Path, snapshot: Snapshot, fill: Callable[[int, memoryview], None]) -> int:
    """Write a state to `path`, in place of what was there; how many bytes it takes.

    `fill(index, out)` writes one chunk's bytes into `out`, which is not to be kept; it is called in order, in this
    thread. What it raises passes through. After any error or interrupt, `path` is as it was.
    """
    data = encode(snapshot)
    preamble = Preamble(snapshot, data[-DIGEST_BYTES:], len(data))
    with _temporary(path) as file:
        _write(file, path, memoryview(data))
        _write_chunks(file, path, preamble, fill)
        with _explained(path, "written"):
            os.fsync(file.fileno())
            os.replace(file.name, path)
            _sync_folder(path.parent)
    return preamble.total_bytes


class SavedState:
    """A saved state, open for reading: what it is at once, its KV when asked."""

    def __init__(self, path: Path, file: FileIO, preamble: Preamble) -> None:
        self.path = path
        self.snapshot = preamble.snapshot
        self.size_bytes = preamble.total_bytes
        self._file = file
        self._preamble = preamble

    @classmethod
    def open(cls, path: Path) -> SavedState:
        """`UnknownState` if nothing is there; `SnapshotError` if it is no saved state, or one of the wrong size."""
        with _explained(path, "read", missing=UnknownState):
            # Without O_NONBLOCK, a pipe would be waited for.
            file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
            try:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SnapshotError("This is not a file.")
                preamble = read_preamble(file, available=found.st_size)
                if preamble.total_bytes != found.st_size:
                    raise SnapshotError(f"The file has {found.st_size} bytes and should have {preamble.total_bytes}.")
            except BaseException:
                file.close()
                raise
        return cls(path, file, preamble)

    def take(self, use: Callable[[int, memoryview], None]) -> None:
        """Calls `use(index, data)` for each chunk, in order, in this thread, once its digest was found right.

        `data` is valid until `use` returns. What `use` raises passes through, and ends it.
        """
        snapshot = self.snapshot
        buffers = _buffers(self._preamble)
        distance = _NUM_BUFFERS - 1
        with _Worker(self._read_chunk) as reader:
            for index in range(snapshot.num_chunks + distance):
                if index < snapshot.num_chunks:
                    reader.submit(index, buffers[index % _NUM_BUFFERS])
                if index >= distance:
                    use(index - distance, reader.result())

    def verify(self) -> None:
        """Reads all of it; `SnapshotError` if a chunk is damaged."""
        self.take(lambda index, data: None)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SavedState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_chunk(self, index: int, buffer: memoryview) -> memoryview:
        size = self.snapshot.chunk_bytes(index)
        position = _chunk_position(self._preamble, index)
        start = position % mmap.PAGESIZE // _CACHE_LINE * _CACHE_LINE
        part = buffer[start : start + size + DIGEST_BYTES]
        with _explained(self.path, "read"):
            _read(self._file, part, position)
            if chunk_digest(self._preamble.digest, index, part[:size]) != part[size:]:
                raise SnapshotError(f"The snapshot is damaged: chunk {index} does not match its digest.")
        return part[:size]


@dataclass(frozen=True, slots=True)
class SavedInfo:
    """One file of a store: a snapshot, or the sentence that says why there is none."""

    name: str
    path: Path
    size_bytes: int
    snapshot: Snapshot | None
    error: str | None


class StateStore:
    """Saved states by name, in one folder, which only its owner can read. Making one touches nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name.endswith(SUFFIX):
            rule = f"up to 128 letters, digits, '-', '_' and '.', with no '.' in front and no {SUFFIX} behind"
            raise InvalidRequest("name", f"must be {rule}, got {name!r:.140}")
        return self.folder / (name + SUFFIX)

    def save(self, name: str, snapshot: Snapshot, fill: Callable[[int, memoryview], None]) -> int:
        path = self.path(name)
        with _explained(path, "written"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return save(path, snapshot, fill)

    def open(self, name: str) -> SavedState:
        return SavedState.open(self.path(name))

    def list(self) -> Sequence[SavedInfo]:
        """By name. Chunks are not read, so that a file listed without an error may still be found damaged by `verify`."""
        with _explained(self.folder, "read"):
            try:
                with os.scandir(self.folder) as entries:
                    files = sorted(entry.name for entry in entries if entry.is_file())
            except FileNotFoundError:
                return []
        names = [file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX)]
        found = [self._info(name) for name in names if _NAME.fullmatch(name) and not name.endswith(SUFFIX)]
        return [info for info in found if info is not None]

    def remove(self, name: str) -> None:
        """`UnknownState` if there is none."""
        path = self.path(name)
        with _explained(path, "removed", missing=UnknownState):
            path.unlink()

    def _info(self, name: str) -> SavedInfo | None:
        path = self.path(name)
        try:
            with SavedState.open(path) as saved:
                return SavedInfo(name, path, saved.size_bytes, saved.snapshot, None)
        except UnknownState:
            return None  # removed since it was listed
        except SnapshotError as error:
            with suppress(OSError):
                return SavedInfo(name, path, path.stat().st_size, None, str(error))
            return None


def _write_chunks(file: FileIO, path: Path, preamble: Preamble, fill: Callable[[int, memoryview], None]) -> None:
    snapshot = preamble.snapshot
    buffers = _buffers(preamble)
    with _Worker(lambda part: _write(file, path, part)) as writer:
        for index in range(snapshot.num_chunks):
            if index >= _NUM_BUFFERS:
                writer.result()
            size = snapshot.chunk_bytes(index)
            start = -(-(_chunk_position(preamble, index) % mmap.PAGESIZE) // _CACHE_LINE) * _CACHE_LINE
            part = buffers[index % _NUM_BUFFERS][start : start + size + DIGEST_BYTES]
            fill(index, part[:size])
            part[size:] = chunk_digest(preamble.digest, index, part[:size])
            writer.submit(part)
        for _ in range(min(_NUM_BUFFERS, snapshot.num_chunks)):
            writer.result()


class _Worker(Generic[T]):
    """A thread that does one thing with one item after another, until the end of the `with` block.

    Each `submit` has one `result`, in the same order: what was returned, or what was raised. A future of the standard
    library does the same, and costs a fifth of the speed here.
    """

    def __init__(self, work: Callable[..., T]) -> None:
        self._work = work
        self._items: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="segue-chunks", daemon=True)

    def submit(self, *item: Any) -> None:
        self._items.put(item)

    def result(self) -> T:
        value, error = self._results.get()
        if error is not None:
            raise error
        return value

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._results.put((self._work(*item), None))
            except BaseException as error:  # the caller's to raise, whatever it is
                self._results.put((None, error))


def _buffers(preamble: Preamble) -> list[memoryview]:
    """Room for a chunk and its digest in each, beginning anywhere in the first page.

    Chunks are placed in them as they lie in the file, to a cache line: copies between the two run at a fifth of their
    speed, on current AMD processors, where the destination lies 1 to 31 bytes further into its page than the source.
    """
    snapshot = preamble.snapshot
    if not snapshot.num_chunks:
        return []
    size = snapshot.chunk_bytes(0) + DIGEST_BYTES + mmap.PAGESIZE
    size += -size % mmap.PAGESIZE
    count = min(_NUM_BUFFERS, snapshot.num_chunks)
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [memoryview(memory)[number * size : (number + 1) * size] for number in range(count)]


def _chunk_position(preamble: Preamble, index: int) -> int:
    """In the file. All chunks but the last are as long as the first."""
    return preamble.size_bytes + index * (preamble.snapshot.chunk_bytes(0) + DIGEST_BYTES)


def _write(file: FileIO, path: Path, data: memoryview) -> None:
    with _explained(path, "written"):
        while data:
            data = data[file.write(data) :]


def _read(file: FileIO, out: memoryview, position: int) -> None:
    while out:
        count = os.preadv(file.fileno(), [out], position)
        if not count:
            raise SnapshotError("The file was cut short while it was being read.")
        out, position = out[count:], position + count


@contextmanager
def _temporary(path: Path) -> Iterator[FileIO]:
    """A new file beside `path` that only its owner can read; unless it was renamed, it is gone at the end."""
    with _explained(path, "written"):
        _remove_stale(path)
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        file = FileIO(name, "x", opener=lambda name, flags: os.open(name, flags, 0o600))
    try:
        with file:
            yield file
    finally:
        with suppress(OSError):
            os.unlink(name)


def _remove_stale(path: Path) -> None:
    pattern = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}" + re.escape(_TEMPORARY))
    with os.scandir(path.parent) as entries:
        found = [entry for entry in entries if pattern.fullmatch(entry.name)]
    for entry in found:
        with suppress(OSError):  # another save may remove it, too
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                os.unlink(entry.path)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, done: str, missing: type[StateError] = SnapshotError) -> Iterator[None]:
    """What the system or the codec says, as an error that names the file; `missing` if it is not there."""
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte or without a name
        kind = missing if isinstance(error, FileNotFoundError) else SnapshotError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise kind(f"{path} cannot be {done}: {reason}.") from error
