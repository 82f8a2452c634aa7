"""vLLM's waiting queue in a policy's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.request import Request, RequestStatus

from segue.engine.waiting import WaitingQueue
from segue.vllm.turns import Asked


class PolicyQueue(RequestQueue):
    """A heap by the policy's key, which is asked when a request starts to wait. Nothing is looked at twice in a step."""

    def __init__(
        self, asked: Callable[[Request], Asked], order: Callable[[Asked], tuple[Any, ...]], fair_every: int | None
    ) -> None:
        self._asked = asked
        self._order = order
        self._queue = WaitingQueue(fair_every)
        self._waiting: dict[str, Asked] = {}

    def add_request(self, request: Request) -> None:
        asked = self._asked(request)
        self._waiting[request.request_id] = asked
        self._queue.push(cast(Any, asked), self._order(asked))

    def peek_request(self) -> Request:
        first = cast(Any, self._queue.peek())
        if first is None:
            raise IndexError("nothing waits")
        return cast(Request, first.request)

    def pop_request(self) -> Request:
        request = self.peek_request()
        self._queue.admit(cast(Any, self._waiting.pop(request.request_id)))
        return request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Those that came up and could not run yet: they were not admitted after all."""
        for request in requests:
            self.add_request(request)
            self._queue.num_admitted -= 1

    def remove_request(self, request: Request) -> None:
        if (asked := self._waiting.pop(request.request_id, None)) is not None:
            self._queue.remove(cast(Any, asked))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([asked.request for asked in sorted(self._waiting.values(), key=self._order)])


class Postponed(FCFSRequestQueue):
    """Those that came up and could not run yet, in versions that keep them apart. Who has blocks, and waits for what is loaded
    into them, comes first: behind one that finds no room because of them it would wait for ever."""

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        super().prepend_requests(requests)
        ordered = sorted(self, key=lambda request: request.status != RequestStatus.WAITING_FOR_REMOTE_KVS)
        self.clear()
        self.extend(ordered)
