"""HTTP answers on their way out: whole ones are held back, so that what the scheduler said can be told in them; streams pass."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from segue.vllm.reports import Hearing, Report

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_COUNTS = ("inherited_tokens", "recomputed_tokens", "new_tokens")


class Answer:
    """A response that is held back until it is whole. One that streams, or is packed, passes at once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.start: MutableMapping[str, Any] | None = None
        self.body = b""

    @property
    def status(self) -> int:
        assert self.start is not None
        return int(self.start["status"])

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = {key.lower(): value for key, value in message["headers"]}
            self.start = message
            if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                await self.stream_begins()
            elif b"content-encoding" in headers:
                await self.pass_on()
        elif message["type"] == "http.response.body" and self.start is not None:
            self.body += message.get("body", b"")
        else:
            await self._send(await self.part(message))

    async def stream_begins(self) -> None:
        await self.pass_on()

    async def pass_on(self) -> None:
        """Hold nothing back any more."""
        start, self.start = self.start, None
        assert start is not None
        await self._send(start)

    async def part(self, message: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Of a response that is not held back."""
        return message

    async def respond(self, status: int, body: bytes) -> None:
        start, self.start = self.start, None
        assert start is not None
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class Told(Answer):
    """An answer with what the scheduler reported in its place: in each choice its state, and a refusal with its status.

    `ranks`: of the engines that have the states it tells, by their names. Of a stream, the head waits for the first part, which
    may be that all was refused.
    """

    def __init__(self, send: Send, here: Hearing) -> None:
        super().__init__(send)
        self._here = here
        self._head: MutableMapping[str, Any] | None = None  # of a stream
        self._is_refused = False
        self.ranks: dict[str, int] = {}

    async def stream_begins(self) -> None:
        self._head, self.start = self.start, None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._is_refused:
            return
        if self._head is not None:
            head, self._head = self._head, None
            refused = self._here.refusal
            if refused is not None:
                self._is_refused = True
                await refuse(self._send, refused["status"], refused["error"], refused["type"])
                return
            await self._send(head)
        await super().send(message)

    async def part(self, message: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A choice's last one tells its state."""
        body = message.get("body", b"")
        if not self._here.found or b'"finish_reason":"' not in body.replace(b" ", b""):
            return message
        events = body.split(b"\n\n")
        return {**message, "body": b"\n\n".join(self._event(event) for event in events)}

    async def finish(self) -> None:
        """Of what was held back."""
        if self.start is None:
            return
        refused = self._here.refusal if self.status >= 400 else None
        if refused is not None:
            await self.respond(refused["status"], error(refused["status"], refused["error"], refused["type"]))
            return
        with suppress(ValueError):
            said = json.loads(self.body)
            if isinstance(said, dict) and self._here.found:
                self._tell(said, self._here.found)
                (said.get("kv_transfer_params") or {}).pop("segue", None)
                said["kv_transfer_params"] = said.get("kv_transfer_params") or None
                self.body = json.dumps(said).encode()
        await self.respond(self.status, self.body)

    def _event(self, event: bytes) -> bytes:
        try:
            said = json.loads(event.removeprefix(b"data: "))
        except ValueError:
            return event
        found = self._here.found
        ended = {choice["index"] for choice in said.get("choices", ()) if choice.get("finish_reason") is not None}
        self._tell(said, {index: report for index, report in found.items() if index in ended})
        return b"data: " + json.dumps(said).encode()

    def _tell(self, said: dict[str, Any], found: dict[int, Report]) -> None:
        if not found:
            return
        for choice in said.get("choices", ()):
            report = found.get(choice.get("index", 0), {})
            if "state_id" in report:
                self.ranks[report["state_id"]] = report.get("rank", 0)
                choice["state"] = {
                    "id": report["state_id"],
                    "num_tokens": report["num_tokens"],
                    "held_tokens": report["held_tokens"],
                }
        said["segue"] = {name: sum(report.get(name, 0) for report in found.values()) for name in _COUNTS}
        for report in found.values():
            if "fallback" in report:
                said["segue"]["fallback"] = report["fallback"]


def error(status: int, message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "code": status, "param": None}}).encode()


async def refuse(send: Send, status: int, message: str, kind: str) -> None:
    await respond(send, status, error(status, message, kind))


async def respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
