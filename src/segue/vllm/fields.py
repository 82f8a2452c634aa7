"""What a request asks of the plugin: fields that an unmodified server passes on (`vllm_xargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.base.errors import InvalidRequest

NAMES = ("job_id", "is_last_step", "hold_seconds", "continuation_of", "state_id", "whole_prompt")
_MOST_CHARS = 256
_MOST_SECONDS = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Fields:
    """`hold_seconds` keeps the answer's KV for that long, whatever the policy thinks; `state_id` is the name to continue it by,
    beside the request's own. `whole_prompt`: a continuation's prompt has its parent's tokens in it, as a chat's has."""

    job_id: str | None = None
    is_last_step: bool = False
    hold_seconds: float | None = None
    continuation_of: str | None = None
    state_id: str | None = None
    whole_prompt: bool | None = None

    @property
    def is_plain(self) -> bool:
        return self == _PLAIN


_PLAIN = Fields()


def read_fields(extra: Mapping[str, Any] | None) -> Fields:
    """Raises InvalidRequest. Others' fields are left alone."""
    if not extra or not any(name in extra for name in NAMES):
        return _PLAIN
    fields = Fields(
        job_id=_name(extra, "job_id"),
        is_last_step=_flag(extra, "is_last_step"),
        hold_seconds=_seconds(extra, "hold_seconds"),
        continuation_of=_name(extra, "continuation_of"),
        state_id=_name(extra, "state_id"),
        whole_prompt=_flag(extra, "whole_prompt") if extra.get("whole_prompt") is not None else None,
    )
    if fields.whole_prompt is not None and fields.continuation_of is None:
        raise InvalidRequest("whole_prompt", "is about a continuation: give continuation_of")
    if fields.is_last_step and fields.job_id is None:
        raise InvalidRequest("is_last_step", "ends a job: give job_id")
    if fields.is_last_step and fields.hold_seconds:
        raise InvalidRequest("hold_seconds", "after a job's last step nothing of it is held")
    return fields


def _name(extra: Mapping[str, Any], field: str) -> str | None:
    value = extra.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARS:
        raise InvalidRequest(field, f"must be a text of 1 to {_MOST_CHARS} characters, not {value!r:.60}")
    return value


def _flag(extra: Mapping[str, Any], field: str) -> bool:
    """A server lets texts and numbers through, and no booleans."""
    value = extra.get(field, False)
    text = str(value).lower() if isinstance(value, (bool, int, float, str)) else None
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise InvalidRequest(field, f"must be true or false (1 or 0), not {value!r:.60}")


def _seconds(extra: Mapping[str, Any], field: str) -> float | None:
    value = extra.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(field, f"must be a number of seconds, not {value!r:.60}")
    if not 0 <= value <= _MOST_SECONDS:
        raise InvalidRequest(field, f"must be from 0 to {_MOST_SECONDS:.0f}, not {value!r:.60}")
    return float(value)
