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
from segue.base.types import BeamParams, FinishReason, SamplingParams
from segue.engine import AsyncEngine, Beam, Completion, Delta, EngineCore, Request, Result, Stream, Then
from segue.state import State

if TYPE_CHECKING:
    from segue.model.engine import Engine
    from segue.model.items import Catalogue

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Beam",
    "BeamParams",
    "Catalogue",
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
    "Then",
]


def __getattr__(name: str) -> Any:
    """`Engine` brings torch, `Catalogue` numpy; they are imported when they are first named, so that the rest stays light."""
    if name == "Engine":
        from segue.model.engine import Engine

        return Engine
    if name == "Catalogue":
        from segue.model.items import Catalogue

        return Catalogue
    raise AttributeError(f"module 'segue' has no attribute {name!r}")
