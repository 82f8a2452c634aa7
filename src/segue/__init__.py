"""Segue: LLM serving in which a request's state is a thing you can hold.

from segue import Engine, SamplingParams

engine = Engine("smollm2")
print(engine.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.base.config import EngineConfig
from segue.base.errors import (
    EngineClosed,
    InvalidRequest,
    ModelError,
    SegueError,
    SnapshotError,
    StateError,
    StepFailed,
)
from segue.base.types import FinishReason, SamplingParams
from segue.engine import AsyncEngine, Completion, Delta, EngineCore, Request, Result, Stream
from segue.state import State

if TYPE_CHECKING:
    from segue.model.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Completion",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineCore",
    "FinishReason",
    "InvalidRequest",
    "ModelError",
    "Request",
    "Result",
    "SamplingParams",
    "SegueError",
    "SnapshotError",
    "State",
    "StateError",
    "StepFailed",
    "Stream",
]


def __getattr__(name: str) -> Any:
    """`Engine` brings torch; it is imported when it is first named, so that the rest stays light."""
    if name == "Engine":
        from segue.model.engine import Engine

        return Engine
    raise AttributeError(f"module 'segue' has no attribute {name!r}")
