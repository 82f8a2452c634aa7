"""Where an asyncio stream's deltas arrive, and what becomes of them when their request goes elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.base.errors import SegueError
from segue.engine.outputs import Delta

if TYPE_CHECKING:
    from segue.engine.async_engine import AsyncEngine


class Inbox:
    """Where one stream's deltas arrive, and the event loop they must be handed over on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._left = False

    async def get(self) -> Item:
        return await self._items.get()

    def put(self, item: Item) -> None:
        self._items.put_nowait(item)
        if self._left:
            self.leave()

    def leave(self) -> None:
        """The reader has gone: a request that went elsewhere ends there."""
        self._left = True
        while not self._items.empty():
            item = self._items.get_nowait()
            if isinstance(item, Move):
                item.abort()


@dataclass(frozen=True, slots=True)
class Move:
    """Where a request goes on, and where its deltas arrive there."""

    destination: AsyncEngine
    request_id: str
    inbox: Inbox

    def deltas(self) -> AsyncGenerator[Delta]:
        return self.destination.deltas(self.request_id, 1, self.inbox)

    def abort(self) -> None:
        """End it there, or wherever it went from there."""
        with suppress(RuntimeError):  # that event loop is no more
            self.inbox.loop.call_soon_threadsafe(self.inbox.leave)
        self.destination.post(lambda: self.destination.end(self.request_id, self.inbox))

    def forget(self) -> None:
        """It has no reader: its deltas are not kept."""
        self.destination.post(lambda: self.destination.drop_inbox(self.request_id, self.inbox))


Item = Delta | SegueError | Move


def put_all(loop: asyncio.AbstractEventLoop, items: list[tuple[Inbox, Item]]) -> bool:
    """False if the loop is no more."""

    def put() -> None:
        for inbox, item in items:
            inbox.put(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
