"""Turns whose parent has not ended yet: they go on from what it leaves, or end with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, ParentFailed, SegueError
from segue.base.types import FinishReason
from segue.engine.admission import check_lengths
from segue.engine.sequence import Heir, Turn
from segue.state import State, StateLedger

WHY_GONE = {
    FinishReason.ABORT: "was aborted",
    FinishReason.ERROR: "failed",
    FinishReason.MOVED: "was moved to another engine",
}


class Orphan(NamedTuple):
    """A turn that waited for its parent in vain."""

    turn: Turn
    error: SegueError


class Heirs:
    """Each parent knows its heirs; nobody else does until it has ended."""

    def __init__(self, config: EngineConfig, states: StateLedger, submit: Callable[[Turn], None]) -> None:
        self._config = config
        self._states = states
        self._submit = submit
        self._orphans: list[Orphan] = []

    def wait(self, heir: Heir) -> None:
        heir.turn.awaits = heir.parent
        heir.parent.heirs.append(heir)

    def leave(self, turn: Turn) -> None:
        """A turn does not wait any more, if it did."""
        if turn.awaits is not None:
            turn.awaits.heirs = [heir for heir in turn.awaits.heirs if heir.turn is not turn]
            turn.awaits = None

    def take(self, turn: Turn, index: int | None) -> list[Heir]:
        """The heirs of one answer, or of all, which from now on are the caller's concern."""
        taken = [heir for heir in turn.heirs if index is None or heir.index == index]
        turn.heirs = [heir for heir in turn.heirs if heir not in taken]
        return taken

    def endow(self, heir: Heir, state: State) -> None:
        """The parent has ended well: the heir's prompt is what it left, and the suffix."""
        turn = heir.turn
        at = state.num_tokens if heir.at is None else heir.at
        try:
            if at > state.num_tokens:
                raise InvalidRequest("at", f"{at} is past the end of the parent, which has {state.num_tokens} tokens")
            check_lengths(at + len(turn.prompt), turn.params, turn.search, self._config)
        except InvalidRequest as error:
            self._orphan(turn, error)
            return
        turn.awaits, turn.parent, turn.num_shared = None, state, at
        turn.begin_with(state.tokens[:at] + turn.prompt)
        self._submit(turn)

    def disinherit(self, turn: Turn, index: int | None, reason: FinishReason) -> None:
        """The heirs of one answer, or of all, will never run; nor will theirs."""
        for heir in self.take(turn, index):
            self._orphan(heir.turn, ParentFailed(f"its parent {turn.id!r} {WHY_GONE[reason]}"))

    def take_orphans(self) -> list[Orphan]:
        """Those that will never run and whose callers have not been told."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def _orphan(self, turn: Turn, error: SegueError) -> None:
        """End a turn that never ran, and all that wait for it, however long that line is."""
        line = [Orphan(turn, error)]
        for turn, _ in line:
            turn.awaits = None
            self._states.note_failure(turn.id, turn.scope, WHY_GONE[FinishReason.ERROR])
            failed = ParentFailed(f"its parent {turn.id!r} {WHY_GONE[FinishReason.ERROR]}")
            line += [Orphan(heir.turn, failed) for heir in self.take(turn, None)]
        self._orphans += line
