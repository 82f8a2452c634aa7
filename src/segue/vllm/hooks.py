"""The two places where vLLM itself is added to: a way to ask its engine's scheduler, and to hear why that refused a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

_MOST_REFUSALS = 1024
refusals: OrderedDict[str, dict[str, Any]] = (
    OrderedDict()
)  # by request id, as vLLM has it, until the answer is on its way


def in_engine() -> None:
    """Called by our scheduler, in the process that it is in. A second time does nothing."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.segue_status = _status
    EngineCore.segue_release = _release


def in_server() -> None:
    """Called by our middleware, in the process that answers. A second time does nothing."""
    from vllm.v1.engine.output_processor import OutputProcessor

    process = OutputProcessor.process_outputs
    if getattr(process, "notes_refusals", False):
        return

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _note_refusals(outputs)
        return process(self, outputs, *args, **kwargs)

    process_outputs.notes_refusals = True  # type: ignore[attr-defined]
    OutputProcessor.process_outputs = process_outputs


def _status(core: Any) -> Any:
    return core.scheduler.segue_status()


def _release(core: Any, name: str, salt: str) -> Any:
    return core.scheduler.segue_release(name, salt)


def _note_refusals(outputs: Iterable[Any]) -> None:
    for output in outputs:
        params = output.kv_transfer_params
        if params is not None and "error" in (report := params.get("segue") or {}):
            refusals[output.request_id] = report
            while len(refusals) > _MOST_REFUSALS:
                refusals.popitem(last=False)


def take_refusal(prefix: str) -> dict[str, Any] | None:
    """Of the request whose id begins like this: vLLM adds to the ids it is given."""
    for request_id in reversed(refusals):
        if request_id.startswith(prefix):
            return refusals.pop(request_id)
    return None
