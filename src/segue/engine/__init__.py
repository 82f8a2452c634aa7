"""Scheduling and the engine loop; runs without torch on anything that is an `Executor`."""

from segue.engine.admission import Prompt
from segue.engine.async_engine import AsyncEngine
from segue.engine.core import EngineCore, Stream
from segue.engine.executor import Executor, Row, StepPlan, StepResult, TokenLogprobs
from segue.engine.outputs import Completion, Delta, EngineStats, Result
from segue.engine.scheduler import Produced, Scheduler
from segue.engine.sequence import Request, Sampling, Sequence, Status
from segue.engine.text import TextStream, Tokenizer

__all__ = [
    "AsyncEngine",
    "Completion",
    "Delta",
    "EngineCore",
    "EngineStats",
    "Executor",
    "Produced",
    "Prompt",
    "Request",
    "Result",
    "Row",
    "Sampling",
    "Scheduler",
    "Sequence",
    "Status",
    "StepPlan",
    "StepResult",
    "Stream",
    "TextStream",
    "TokenLogprobs",
    "Tokenizer",
]
