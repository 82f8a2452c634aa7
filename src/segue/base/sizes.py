"""Sizes as people write them."""

from __future__ import annotations

import re

from segue.base.errors import InvalidRequest

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str, field: str = "kv_memory") -> int:
    """'512MiB', '2GiB', '1.5G' or a plain number of bytes; what is none is refused in the name of `field`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not found:
        raise InvalidRequest(field, f"{text!r} is not a size: write 2GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])
