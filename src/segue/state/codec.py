"""A snapshot as bytes: its preamble (everything but KV), written, read and checked, and the digest of a KV chunk.

    magic (8) | version u32 | header length u32 | header, JSON   | digest
    tokens, i32 each                                             | digest
    log-probabilities of the tokens so far, if there are any     | digest
    KV chunk 0 | digest | KV chunk 1 | digest | ...                and nothing after the last

All little endian. A digest depends on the one before it, and a chunk's on the preamble's last one and on the chunk's
index: a part that was changed, moved, or put in from another snapshot is found. Digests guard against damage, not
against a forger, so what the bytes say is checked as well: no announced size is believed before it is known to be
possible, and whatever is wrong is a SnapshotError. What `read_preamble` would refuse, `encode` refuses to write.
"""

from __future__ import annotations

import io
import struct
import sys
from array import array
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import isnan
from typing import Any, Protocol

import xxhash

from segue.base.errors import SnapshotError
from segue.base.types import MAX_LOGPROBS
from segue.state.header import (
    MAX_HEADER_BYTES,
    MAX_TOKENS,
    decode_header,
    encode_header,
    from_header,
    invalid,
    num_tokens_of,
    whole,
)
from segue.state.snapshot import Logprobs, Snapshot

MAGIC = b"\x89SGU\r\n\x1a\n"  # as PNG's: a transfer that takes the file for text breaks it right here
VERSION = 1
DIGEST_BYTES = 16
MAX_LOGPROBS_BYTES = 256 << 20
MAX_PREAMBLE_BYTES = MAX_HEADER_BYTES + 4 * MAX_TOKENS + MAX_LOGPROBS_BYTES + 1024
_ONE_READ = 1 << 20
_VERSION_AND_LENGTH = struct.Struct("<II")
_LOGPROB_BYTES = 8 + 4 + 2  # its value, its rank, how many tops
_TOP_BYTES = 4 + 8  # token, value


class Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Preamble:
    """What comes before the chunks. Their digests are bound to `digest`; they begin at byte `size_bytes`."""

    snapshot: Snapshot
    digest: bytes
    size_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of the whole saved state, chunks and their digests included."""
        return self.size_bytes + self.snapshot.kv_bytes + self.snapshot.num_chunks * DIGEST_BYTES


def chunk_digest(bound_to: bytes, index: int, data: bytes | bytearray | memoryview) -> bytes:
    """The DIGEST_BYTES that follow a chunk, in a file and on the wire; `bound_to` is the preamble's digest."""
    seed = xxhash.xxh3_64_intdigest(bound_to + index.to_bytes(8, "little"))
    return xxhash.xxh3_128_digest(data, seed=seed)


def encode(snapshot: Snapshot) -> bytes:
    """The preamble, whose last DIGEST_BYTES are its digest. It is read back before it is returned, and must be equal."""
    try:
        data = _preamble_bytes(snapshot)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"The snapshot cannot be written: {error}.") from error
    if read_preamble(io.BytesIO(data), available=len(data)).snapshot != snapshot:
        raise SnapshotError("The snapshot cannot be written: it would read back changed. Is its note plain JSON?")
    return data


def read_preamble(file: Readable, *, available: int | None, max_tokens: int | None = None) -> Preamble:
    """Reads up to the first chunk and no further. What `file` itself raises, such as OSError, passes through.

    `available` is how many bytes there are, None on a stream. Memory grows with the bytes that have come, never with
    those a header announces.
    """
    source = _Source(file, available)
    header = _read_header(source)
    num_tokens = num_tokens_of(header)
    if max_tokens is not None and num_tokens > max_tokens:
        raise SnapshotError(f"The snapshot has {num_tokens} tokens; up to {max_tokens} are taken here.")
    snapshot = from_header(header, num_tokens)
    [tokens] = source.columns("list of tokens", ("i", num_tokens))
    snapshot = replace(snapshot, tokens=_checked_ids("tokens", tokens))
    if snapshot.progress is not None:
        logprobs = _read_logprobs(source, header["progress"], num_tokens - snapshot.progress.num_prompt)
        snapshot = replace(snapshot, progress=replace(snapshot.progress, logprobs=logprobs))
    return Preamble(snapshot, source.digest, source.position)


# Writing.


def _preamble_bytes(snapshot: Snapshot) -> bytes:
    header = encode_header(snapshot)
    sections = [MAGIC + _VERSION_AND_LENGTH.pack(VERSION, len(header)) + header, _joined(array("i", snapshot.tokens))]
    if snapshot.progress is not None and snapshot.progress.logprobs:
        sections.append(_logprobs_bytes(snapshot.progress.logprobs))
    parts, digest = [], b""
    for section in sections:
        digest = chunk_digest(digest, 0, section)
        parts += [section, digest]
    return b"".join(parts)


def _logprobs_bytes(logprobs: tuple[Logprobs, ...]) -> bytes:
    tops = list(chain.from_iterable(tops for _, _, tops in logprobs))
    return _joined(
        array("d", [value for value, _, _ in logprobs]),
        array("i", [rank for _, rank, _ in logprobs]),
        array("H", [len(tops) for _, _, tops in logprobs]),
        array("i", [token for token, _ in tops]),
        array("d", [value for _, value in tops]),
    )


def _joined(*columns: array[Any]) -> bytes:
    return b"".join(_little_endian(column).tobytes() for column in columns)


def _little_endian(column: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        column.byteswap()
    return column


# Reading.


class _Source:
    """A cursor that refuses to begin on what cannot be there, allocates only as bytes come, and chains the digests."""

    def __init__(self, file: Readable, available: int | None) -> None:
        self._file = file
        self._available = available
        self.position = 0
        self.digest = b""

    def read(self, size: int, what: str) -> bytearray:
        end = self.position + size
        if self._available is not None and end > self._available:
            raise SnapshotError(f"The snapshot is cut short: its {what} would end at byte {end} of {self._available}.")
        data = bytearray()
        while len(data) < size:
            piece = self._file.read(min(size - len(data), _ONE_READ))
            if not piece:
                raise SnapshotError(f"The snapshot is cut short: its {what} ends {size - len(data)} bytes too soon.")
            data += piece
        self.position = end
        return data

    def section(self, size: int, what: str, start: bytes = b"") -> bytearray:
        """What comes next, checked against the digest after it; `start` has been read already."""
        data = self.read(size, what)
        digest = bytes(self.read(DIGEST_BYTES, f"digest of the {what}"))
        if digest != chunk_digest(self.digest, 0, start + data if start else data):
            raise SnapshotError(f"The snapshot is damaged: its {what} does not match the digest.")
        self.digest = digest
        return data

    def columns(self, what: str, *columns: tuple[str, int]) -> list[array[Any]]:
        """A section of arrays, each given as its item's code and how many."""
        sizes = [array(code).itemsize * count for code, count in columns]
        section = memoryview(self.section(sum(sizes), what))
        found = []
        for (code, _), (start, stop) in zip(columns, pairwise(accumulate(sizes, initial=0)), strict=True):
            column = array(code)
            column.frombytes(section[start:stop])
            found.append(_little_endian(column))
        return found


def _read_header(source: _Source) -> dict[str, Any]:
    magic = bytes(source.read(len(MAGIC), "magic number"))
    if magic != MAGIC:
        raise SnapshotError("This is not a saved state: it does not begin like one.")
    sizes = bytes(source.read(_VERSION_AND_LENGTH.size, "version"))
    version, length = _VERSION_AND_LENGTH.unpack(sizes)
    if version > VERSION:
        raise SnapshotError(f"The snapshot was written by a newer version: its format is {version}, ours is {VERSION}.")
    if version < VERSION or length > MAX_HEADER_BYTES:
        raise SnapshotError(f"The snapshot is damaged: format {version}, a header of {length} bytes.")
    return decode_header(source.section(length, "header", start=magic + sizes))


def _read_logprobs(source: _Source, header: dict[str, Any], num_produced: int) -> tuple[Logprobs, ...]:
    count = whole("num_logprobs", header["num_logprobs"], 0, num_produced)
    num_tops = whole("num_tops", header["num_tops"], 0, count * MAX_LOGPROBS)
    if count * _LOGPROB_BYTES + num_tops * _TOP_BYTES > MAX_LOGPROBS_BYTES:
        raise invalid(f"its log-probabilities take over {MAX_LOGPROBS_BYTES} bytes")
    if not count:
        return ()
    codes = ("d", count), ("i", count), ("H", count), ("i", num_tops), ("d", num_tops)
    values, ranks, counts, ids, top_values = source.columns("list of log-probabilities", *codes)
    if sum(counts) != num_tops or any(map(isnan, chain(values, top_values))):
        raise invalid("its log-probabilities are not numbers, or not as many as announced")
    tops = list(zip(_checked_ids("logprobs", ids), top_values, strict=True))
    spans = pairwise(accumulate(counts, initial=0))
    tokens = zip(values, _checked_ids("ranks", ranks), spans, strict=True)
    return tuple((value, rank, tuple(tops[start:stop])) for value, rank, (start, stop) in tokens)


def _checked_ids(name: str, ids: array[int]) -> array[int]:
    if min(ids, default=0) < 0:
        raise invalid(f"{name} has {min(ids)}, below 0")
    return ids
