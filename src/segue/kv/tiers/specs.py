"""Tiers as people ask for them: host=4GiB, disk=/path,20GiB, remote=redis://host:6379/0; the last two with ,int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from segue.base.errors import InvalidRequest
from segue.base.sizes import parse_bytes

_INT8 = ",int8"


@dataclass(frozen=True, slots=True)
class DiskSpec:
    folder: Path
    num_bytes: int
    compressed: bool


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    url: str
    compressed: bool


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """One of each kind at most; None for those that are not wanted."""

    host_bytes: int | None = None
    disk: DiskSpec | None = None
    remote: RemoteSpec | None = None

    def __bool__(self) -> bool:
        return any(spec is not None for spec in (self.host_bytes, self.disk, self.remote))

    @property
    def compressed(self) -> bool:
        return any(spec is not None and spec.compressed for spec in (self.disk, self.remote))


def parse_tiers(texts: Sequence[str]) -> TierSpecs:
    found: dict[str, str] = {}
    for text in texts:
        kind, _, value = text.partition("=")
        if kind not in ("host", "disk", "remote") or not value:
            named = text if kind != "remote" else "remote="  # an address may have a password
            raise InvalidRequest(
                "tier", f"{named!r} is none: write host=4GiB, disk=/path,20GiB or remote=redis://host:6379/0"
            )
        if kind in found:
            raise InvalidRequest("tier", f"{kind} is given twice")
        found[kind] = value
    return TierSpecs(
        _host(found["host"]) if "host" in found else None,
        _disk(found["disk"]) if "disk" in found else None,
        _remote(found["remote"]) if "remote" in found else None,
    )


def _host(text: str) -> int:
    if text.endswith(_INT8):
        raise InvalidRequest("tier", "host copies are exact: int8 would hold up the engine, which makes them")
    return parse_bytes(text, "tier")


def _disk(text: str) -> DiskSpec:
    plain = text.removesuffix(_INT8)
    folder, comma, size = plain.rpartition(",")
    if not comma or not folder:
        raise InvalidRequest("tier", f"disk={text!r} needs a folder and a size, such as disk=/path,20GiB")
    return DiskSpec(Path(folder), parse_bytes(size, "tier"), text != plain)


def _remote(text: str) -> RemoteSpec:
    plain = text.removesuffix(_INT8)
    return RemoteSpec(plain, text != plain)
