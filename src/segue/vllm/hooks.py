"""The places where vLLM itself is added to: a way to ask its engine's scheduler, to hear what that says of requests, and to make
its beam search a continuation."""

from __future__ import annotations

from typing import Any

from segue.vllm.reports import Reports
from segue.vllm.searches import continuing

reports = Reports()


def in_engine() -> None:
    """Called by our scheduler, in the process that it is in. A second time does nothing."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.segue_status = _status
    EngineCore.segue_release = _release
    EngineCore.segue_decisions = _decisions


def in_server() -> None:
    """Called by our middleware, in the process that answers. A second time does nothing."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.output_processor import OutputProcessor

    add, process = OutputProcessor.add_request, OutputProcessor.process_outputs
    if getattr(process, "is_heard", False):
        return

    def add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        reports.expect(request, parent_req, request_index)
        return add(self, request, prompt, parent_req, request_index, *args, **kwargs)

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        reports.hear(outputs)
        return process(self, outputs, *args, **kwargs)

    process_outputs.is_heard = True  # type: ignore[attr-defined]
    OutputProcessor.add_request = add_request
    OutputProcessor.process_outputs = process_outputs
    BeamSearchOnlineMixin.beam_search = continuing(BeamSearchOnlineMixin.beam_search)


def _status(core: Any) -> Any:
    return core.scheduler.segue_status()


def _release(core: Any, name: str, salt: str) -> Any:
    return core.scheduler.segue_release(name, salt)


def _decisions(core: Any, salt: str, job_id: str | None, limit: int) -> Any:
    return core.scheduler.segue_decisions(salt, job_id, limit)
