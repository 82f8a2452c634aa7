"""The small JSON files that lie around a model, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segue.base.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; anything else is a ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object, not {type(value).__name__}.")
    return value
