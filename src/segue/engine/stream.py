"""One request's deltas, read as they come, wherever the request goes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from segue.engine.outputs import Delta, Result

if TYPE_CHECKING:
    from segue.engine.loop import EngineLoop


class Mailbox:
    """Where a stream's deltas wait to be read, and, once another engine has taken the request over, where they come from."""

    def __init__(self) -> None:
        self.deltas: deque[Delta] = deque()
        self.successor: Iterator[Delta] | None = None

    def close(self) -> None:
        """Nobody reads any more: the request ends wherever it went."""
        close = getattr(self.successor, "close", None)
        if close is not None:
            close()


class Stream:
    """Ends by itself, or by `close()`, which frees the request. Reading runs the engine as far as needed."""

    def __init__(self, engine: EngineLoop, result: Result, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._open = True
        self.result = result

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        delta = self._next() if self._open else None
        if delta is None:
            self.close()
            raise StopIteration
        if delta.error is not None:
            self.close()
            raise delta.error
        return delta

    def _next(self) -> Delta | None:
        mailbox = self._mailbox
        while not mailbox.deltas:
            if mailbox.successor is not None:
                return self._next_elsewhere(mailbox.successor)
            if self.result.finished_at is not None:
                return None
            self._engine.advance_for(self.result.request_id)
        return mailbox.deltas.popleft()

    def _next_elsewhere(self, successor: Iterator[Delta]) -> Delta | None:
        delta = next(successor, None)
        if delta is None or delta.finish_reason is not None:
            self.result.finished_at = self._engine.now()
            self._mailbox.successor = None
        if delta is not None:
            if self.result.first_token_at is None and delta.token_ids:
                self.result.first_token_at = self._engine.now()
            self.result.error = delta.error
            self.result.completions[0].add(delta)
        return delta

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._engine.unfollow(self.result.request_id, self._mailbox)

    def __del__(self) -> None:
        if self._open:
            self._engine.abandon(self.result.request_id, self._mailbox)
