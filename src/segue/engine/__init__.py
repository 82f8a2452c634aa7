"""Scheduling and the engine loop; runs without torch on anything that is an `Executor`."""

from segue.engine.admission import Prompt
from segue.engine.async_engine import AsyncEngine
from segue.engine.beam import Beam, Candidates, Constraint, SearchStep
from segue.engine.core import EngineCore
from segue.engine.executor import Executor, Row, StepPlan, StepResult, TokenLogprobs
from segue.engine.handoff import Export, Import, hand_over
from segue.engine.outputs import Completion, Delta, EngineStats, Result
from segue.engine.request import Request, Then
from segue.engine.scheduler import Produced, Scheduler
from segue.engine.sequence import Reuse, Sampling, Sequence, Status, Turn
from segue.engine.stream import Stream
from segue.engine.text import TextStream, Tokenizer

__all__ = [
    "AsyncEngine",
    "Beam",
    "Candidates",
    "Completion",
    "Constraint",
    "Delta",
    "EngineCore",
    "EngineStats",
    "Executor",
    "Export",
    "Import",
    "Produced",
    "Prompt",
    "Request",
    "Result",
    "Reuse",
    "Row",
    "Sampling",
    "Scheduler",
    "SearchStep",
    "Sequence",
    "Status",
    "StepPlan",
    "StepResult",
    "Stream",
    "TextStream",
    "Then",
    "TokenLogprobs",
    "Tokenizer",
    "Turn",
    "hand_over",
]
