"""What a policy has learned, in a file: written whole or not at all, and read back only by the policy that wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest
from segue.policies.policy import Policy

VERSION = 1
_MOST_BYTES = 64 << 20


def save_learned(path: Path, policy: Policy) -> None:
    """Raises OSError if it cannot be written; what was there before stays."""
    write_json(path, {"version": VERSION, "policy": policy.name, "learned": policy.to_json()})


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    data = json.dumps(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_learned(path: Path, policy: Policy) -> bool:
    """False if there is nothing yet, or another policy's. What is damaged or from another version is refused by name."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("learned"), dict):
            raise ValueError(f"it is not of version {VERSION}")
        if data.get("policy") != policy.name:
            return False
        policy.restore(data["learned"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest("policy_state", f"{path} cannot be used: {error}") from error
    return True
