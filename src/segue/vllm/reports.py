"""What the scheduler said of requests, on its way to the HTTP answers that tell it: streams too, and each choice its own."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]

_MOST = 4096  # requests; clients that left never ask for theirs
_COMPLETION = re.compile(
    r"(?:(\d+)_)?(cmpl-.+)-(\d+)-[0-9a-f]{8}"
)  # choice of a prompt, id, prompt, vLLM's random part
_CHAT = re.compile(r"(?:(\d+)_)?(chatcmpl-.+)-[0-9a-f]{8}")


class Reports:
    """By a response's id: what was said of each (prompt, choice)."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, dict[tuple[int, int], Report]] = OrderedDict()

    def note(self, response_id: str, prompt: int, choice: int, report: Report) -> None:
        self._noted.setdefault(response_id, {})[prompt, choice] = report
        while len(self._noted) > _MOST:
            self._noted.popitem(last=False)

    def hear(self, outputs: Iterable[Any]) -> None:
        """What an engine says; of most requests nothing."""
        for output in outputs:
            params = output.kv_transfer_params
            report = params.get("segue") if params is not None else None
            if report is None:
                continue
            if (found := _COMPLETION.fullmatch(output.request_id)) is not None:
                self.note(found[2], int(found[3]), int(found[1] or 0), report)
            elif (found := _CHAT.fullmatch(output.request_id)) is not None:
                self.note(found[2], 0, int(found[1] or 0), report)

    def of(self, response_id: str, n: int) -> dict[int, Report]:
        """By the index of the choice, of `n` for each prompt; so far."""
        noted = self._noted.get(response_id, {})
        return {prompt * n + choice: report for (prompt, choice), report in noted.items()}

    def forget(self, response_id: str) -> None:
        self._noted.pop(response_id, None)


def refusal(found: dict[int, Report]) -> Report | None:
    return next((report for report in found.values() if "error" in report), None)
