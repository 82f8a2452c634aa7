"""What vLLM loads in each of its processes (the entry point `vllm.general_plugins`): a way to ask the scheduler, and to hear why
it refused a request. Without our scheduler it changes nothing."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from segue.vllm.versions import UnsupportedVLLM, check_version

_MOST_REFUSALS = 1024
refusals: OrderedDict[str, dict[str, Any]] = (
    OrderedDict()
)  # by request id, as vLLM has it, until the answer is on its way


def install() -> None:
    """A second time does nothing. A vLLM that is not ours to touch is left alone: the scheduler says so when it is asked for."""
    try:
        check_version()
    except UnsupportedVLLM as error:
        logging.getLogger(__name__).info("%s", error)
        return
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.output_processor import OutputProcessor

    if hasattr(EngineCore, "segue_status"):
        return
    EngineCore.segue_status = _status
    EngineCore.segue_release = _release
    process = OutputProcessor.process_outputs

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _note_refusals(outputs)
        return process(self, outputs, *args, **kwargs)

    OutputProcessor.process_outputs = process_outputs


def _status(core: Any) -> dict[str, Any] | None:
    """None without our scheduler."""
    status = getattr(core.scheduler, "segue_status", None)
    return status() if status is not None else None


def _release(core: Any, name: str, salt: str) -> bool | None:
    release = getattr(core.scheduler, "segue_release", None)
    return release(name, salt) if release is not None else None


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
