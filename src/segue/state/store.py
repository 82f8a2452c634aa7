"""Saved states: a snapshot and its KV in one file, written all or not at all, and believed only by its digests.

Two threads move the bytes. A file is written in order, so one fills while the other writes; where order does not
matter, each does everything for a chunk, which stays in its core's cache on the way:

    save   caller |fill 0, digest|fill 1, digest|fill 2, digest|
           thread                |write 0       |write 1       |write 2 |
    take   caller |read 0, check, use 0|read 2, check, use 2|
           thread |read 1, check, use 1|read 3, check, use 3|
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

from segue.base.errors import InvalidRequest, SnapshotError, StateError, UnknownState
from segue.base.worker import Worker, share
from segue.state.codec import DIGEST_BYTES, Preamble, chunk_digest, encode, read_preamble
from segue.state.snapshot import Snapshot

ChunkFunction = Callable[[int, memoryview], None]  # called with a chunk's index and its memory
SUFFIX = ".segue"
STALE_SECONDS = 3600.0  # a temporary not written to for so long is of a process that died
_TEMPORARY = ".saving"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NUM_BUFFERS = 3  # of a save: one at each end, and one between them
_CACHE_LINE = 64


def save(path: Path, snapshot: Snapshot, fill: ChunkFunction) -> int:
    """Write a state to `path`, in place of what was there; how many bytes it takes.

    `fill(index, out)` writes one chunk's bytes into `out`, which is not to be kept; it is called in order, in this
    thread. What it raises passes through. After an error or an interrupt, `path` is as it was.
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

    def take(self, use: ChunkFunction) -> None:
        """Calls `use(index, data)` for each chunk once its digest was found right: in no order, from this thread and
        from another at the same time.

        `data` is valid until `use` returns. What `use` raises passes through, and ends it.
        """
        with _explained(self.path, "read"):
            buffers = _Buffers(self._preamble, 2)
        share(
            self.snapshot.num_chunks,
            lambda index, hand: use(index, self._read_chunk(index, buffers.part(index, hand))),
            "segue-load",
        )

    def verify(self) -> None:
        """Reads all of it; `SnapshotError` if a chunk is damaged."""
        self.take(lambda index, data: None)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_chunk(self, index: int, part: memoryview) -> memoryview:
        with _explained(self.path, "read"):
            _read(self._file, part, _chunk_position(self._preamble, index))
            data, digest = part[:-DIGEST_BYTES], part[-DIGEST_BYTES:]
            if digest != chunk_digest(self._preamble.digest, index, data):
                raise SnapshotError(f"The snapshot is damaged: chunk {index} does not match its digest.")
        return data


@dataclass(frozen=True, slots=True)
class SavedInfo:
    """One file of a store: a snapshot, or the sentence that says why there is none."""

    name: str
    path: Path
    size_bytes: int
    snapshot: Snapshot | None
    error: str | None


class StateStore:
    """Saved states by name, in one folder, which is made, for its owner only, when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        if not _is_name(name):
            rule = f"up to 128 letters, digits, '-', '_' and '.', with no '.' in front and no {SUFFIX} behind"
            raise InvalidRequest("name", f"must be {rule}, got {name!r:.140}")
        return self.folder / (name + SUFFIX)

    def save(self, name: str, snapshot: Snapshot, fill: ChunkFunction) -> int:
        path = self.path(name)
        with _explained(path, "written"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return save(path, snapshot, fill)

    def open(self, name: str) -> SavedState:
        return SavedState.open(self.path(name))

    def list(self) -> Sequence[SavedInfo]:
        """By name. Chunks are not read, so that a file listed without an error may still be found damaged by `verify`."""
        if not self.folder.exists():
            return []
        with _explained(self.folder, "read"), os.scandir(self.folder) as entries:
            files = sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file())
        found = [self._info(name) for file in files if _is_name(name := file.removesuffix(SUFFIX))]
        return [info for info in found if info is not None]

    def remove(self, name: str) -> None:
        """`UnknownState` if there is none."""
        path = self.path(name)
        with _explained(path, "removed", missing=UnknownState):
            path.unlink()

    def _info(self, name: str) -> SavedInfo | None:
        path = self.path(name)
        try:
            size = path.stat().st_size
            with SavedState.open(path) as saved:
                return SavedInfo(name, path, size, saved.snapshot, None)
        except SnapshotError as error:
            return SavedInfo(name, path, size, None, str(error))
        except (OSError, UnknownState):
            return None  # removed since it was listed


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and not text.endswith(SUFFIX)


def _write_chunks(file: FileIO, path: Path, preamble: Preamble, fill: ChunkFunction) -> None:
    with _explained(path, "written"):
        buffers = _Buffers(preamble, _NUM_BUFFERS)
    num_chunks = preamble.snapshot.num_chunks
    with Worker(lambda part: _write(file, path, part), "segue-save") as writer:
        for index in range(num_chunks):
            if index >= _NUM_BUFFERS:
                writer.result()
            part = buffers.part(index, index % _NUM_BUFFERS)
            data = part[:-DIGEST_BYTES]
            fill(index, data)
            part[-DIGEST_BYTES:] = chunk_digest(preamble.digest, index, data)
            writer.submit(part)
        for _ in range(min(_NUM_BUFFERS, num_chunks)):
            writer.result()


class _Buffers:
    """Memory for `count` chunks, each with its digest, that later chunks take over."""

    def __init__(self, preamble: Preamble, count: int) -> None:
        self._preamble = preamble
        snapshot = preamble.snapshot
        largest = snapshot.chunk_bytes(0) + DIGEST_BYTES
        self._stride = (largest // mmap.PAGESIZE + 2) * mmap.PAGESIZE
        num_bytes = self._stride * max(1, min(count, snapshot.num_chunks))
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not every system has large pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def part(self, index: int, buffer: int) -> memoryview:
        """The memory for one chunk, on a cache line, 64 to 127 bytes less far into its page than the chunk in the file.

        Current AMD processors copy three to six times slower where the destination is 1 to 31 bytes further into its
        page than the source; wherever else it is, there is no difference.
        """
        start = (_chunk_position(self._preamble, index) // _CACHE_LINE - 1) * _CACHE_LINE % mmap.PAGESIZE
        start += buffer * self._stride
        return memoryview(self._memory)[start : start + self._preamble.snapshot.chunk_bytes(index) + DIGEST_BYTES]


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
    """The new name is on the disk only then."""
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
