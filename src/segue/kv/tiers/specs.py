"""Tiers as people ask for them: host=4GiB, disk=/path,20GiB, remote=redis://host:6379/0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from segue.base.errors import InvalidRequest
from segue.base.sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """One of each kind at most; None for those that are not wanted."""

    host_bytes: int | None = None
    disk: tuple[Path, int] | None = None
    remote: str | None = None

    def __bool__(self) -> bool:
        return any(spec is not None for spec in (self.host_bytes, self.disk, self.remote))


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
    disk = None
    if "disk" in found:
        folder, comma, size = found["disk"].rpartition(",")
        if not comma or not folder:
            raise InvalidRequest("tier", f"disk={found['disk']!r} needs a folder and a size, such as disk=/path,20GiB")
        disk = Path(folder), parse_bytes(size, "tier")
    return TierSpecs(parse_bytes(found["host"], "tier") if "host" in found else None, disk, found.get("remote"))
