"""Which states a job holds, so that a later turn, and the end of the job, give back what they no longer need."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_JOBS = 10_000
Key = tuple[str, str]  # salt and job id


@dataclass(frozen=True, slots=True)
class _Turn:
    key: Key
    earlier: tuple[str, ...]  # what the job held when the turn came
    is_last: bool


class JobHolds:
    """A turn of a job goes on from what the job held when the turn came, so that is given back when the turn has ended.
    What a turn beside it holds meanwhile stays. With the last step, everything goes.

    Bounded: the job that was longest without a turn is forgotten, and its holds end by their own time.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Key, list[str]] = OrderedDict()
        self._turns: dict[str, _Turn] = {}

    def begin(self, request_id: str, salt: str, job_id: str, *, is_last: bool) -> None:
        key = salt, job_id
        self._turns[request_id] = _Turn(key, tuple(self._held.get(key, ())), is_last)

    def forget(self, request_id: str) -> None:
        """The turn came to nothing: what the job holds stays."""
        self._turns.pop(request_id, None)

    def end(self, request_id: str, held: list[str]) -> tuple[str, list[str]]:
        """A turn has ended and left these states held; the salt, and what is to be released."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return "", []
        known = self._held.pop(turn.key, [])
        if turn.is_last:
            return turn.key[0], [*known, *held]
        self._held[turn.key] = [state for state in known if state not in turn.earlier] + held
        while len(self._held) > _MOST_JOBS:
            self._held.popitem(last=False)
        return turn.key[0], [state for state in turn.earlier if state in known]
