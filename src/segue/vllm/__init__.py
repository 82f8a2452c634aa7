"""Segue's state and policies on vLLM: `vllm serve MODEL --scheduler-cls segue.vllm.Scheduler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segue.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    """vLLM is imported when its scheduler is asked for, and not before its version is known to be one of ours."""
    if name == "Scheduler":
        from segue.vllm.versions import check_version

        check_version()
        from segue.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module 'segue.vllm' has no attribute {name!r}")
