"""Parts that are sent together: an answer's tokens need not travel one by one when they come by the hundred a second."""

from __future__ import annotations

from collections.abc import Callable

from segue.server.messages import Part


class Bundle:
    """What waits to be sent. An answer's first part goes at once, and so does its last, with all that waits of it; the rest
    goes when `seconds` have passed since the last time, as one part an answer."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self._answers: dict[str, dict[int, Part | None]] = {}  # begun and not ended, with what waits of each
        self._due: list[Part] = []
        self._num_waiting = 0
        self._last_sent = now()

    def add(self, part: Part) -> None:
        answers = self._answers.setdefault(part.request_id, {})
        waiting = answers.get(part.index)
        if waiting is not None:
            self._num_waiting -= 1
            part = _joined(waiting, part)
        if part.finish is not None:
            answers.pop(part.index, None)
            if not answers:
                del self._answers[part.request_id]
            self._due.append(part)
        elif part.index not in answers:
            answers[part.index] = None
            self._due.append(part)
        else:
            answers[part.index] = part
            self._num_waiting += 1

    def drop(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        answers = self._answers.pop(request_id, {})
        self._num_waiting -= sum(part is not None for part in answers.values())
        self._due = [part for part in self._due if part.request_id != request_id]

    def take(self, *, everything: bool = False) -> list[Part]:
        """What is to be sent now."""
        if self._num_waiting and (everything or self._now() - self._last_sent >= self._seconds):
            self._last_sent = self._now()
            for answers in self._answers.values():
                for index, part in answers.items():
                    if part is not None:
                        self._due.append(part)
                        answers[index] = None
            self._num_waiting = 0
        due, self._due = self._due, []
        return due


def _joined(first: Part, then: Part) -> Part:
    return Part(
        then.request_id,
        then.index,
        first.tokens + then.tokens,
        first.text + then.text,
        first.logprobs + then.logprobs,
        then.finish,
        then.reuse,
        then.state,
        then.problem,
        then.beams,
        then.search_prefilled,
    )
