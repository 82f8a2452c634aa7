"""What the scheduler said of requests, on its way to the HTTP answers that tell it: streams too, and each choice its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

Report = dict[str, Any]


class Hearing:
    """Of one HTTP request: what was said so far, by the index of the choice."""

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.request_ids: list[str] = []  # the engine's
        self.found: dict[int, Report] = {}

    @property
    def refusal(self) -> Report | None:
        return next((report for report in self.found.values() if "error" in report), None)


hearing: ContextVar[Hearing | None] = ContextVar("hearing", default=None)


class Reports:
    """Which HTTP request, and which choice of it, waits for what an engine says of a request."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Hearing, int]] = {}

    def expect(self, request: Any, parent: Any, index: int) -> None:
        """A request is about to go to an engine, for the HTTP request that is being carried out. `parent`: of `n` answers to one
        prompt, of which it is number `index`."""
        here = hearing.get()
        if here is None:
            return
        number = str(request.external_req_id).removeprefix(f"{here.response_id}-")
        prompt = int(number) if number.isdecimal() else 0
        self._places[request.request_id] = here, prompt * (parent.n if parent is not None else 1) + index
        here.request_ids.append(request.request_id)

    def hear(self, outputs: Iterable[Any]) -> None:
        """What an engine says; of most requests nothing."""
        for output in outputs:
            params = output.kv_transfer_params
            if params is None or "segue" not in params:
                continue
            here, choice = self._places.get(output.request_id, (None, 0))
            if here is not None:
                here.found[choice] = params["segue"]

    def forget(self, here: Hearing) -> None:
        for request_id in here.request_ids:
            del self._places[request_id]
