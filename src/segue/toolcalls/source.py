"""An answer's text while it grows, read by code that can wait for more of it.

Reading functions are generators: they yield where the text so far leaves something open, and are resumed when there is
more. A grammar then reads top to bottom, what it decides cannot depend on how the text was cut, and no character is
looked at again because another one came.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from segue.toolcalls.calls import NotACall

T = TypeVar("T")
Wait = Generator[None, None, T]

MAX_DEPTH = 200  # of JSON: far more than a call needs, far less than Python's recursion limit
SPACE = b" \t\r\n"

_SPACES = re.compile(rb"[ \t\r\n]*+")
_BETWEEN_STRINGS = re.compile(rb"[ \t\r\n:,0-9+\-.eEtrufalsn]*+")
_IN_STRING = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\.)*+')


class Unfinished(Exception):
    """A call that the answer's end cuts off, or that grew too large. The rest of the answer is content."""


class Source:
    """`data` is the part of the answer that is not given out yet, and `at` the place in it that reading has reached.

    UTF-8, since a bytearray grows and loses its beginning without copying the rest. `limit`, if set, is a place in
    `data` that reading stops before, so that it sees the same however much was pushed at once.
    """

    def __init__(self) -> None:
        self.data = bytearray()
        self.at = 0
        self.limit: int | None = None
        self.ended = False

    @property
    def end(self) -> int:
        return len(self.data) if self.limit is None else min(len(self.data), self.limit)

    def push(self, text: str) -> None:
        self.data += text.encode("utf-8", "surrogatepass")

    def take(self, size: int) -> str:
        """Removes the first `size` bytes and goes back to the beginning of what is left."""
        text = as_text(self.data[:size])
        del self.data[:size]
        self.at = 0
        return text

    def more(self) -> Wait[bool]:
        """Waits for more text; False if the answer has ended."""
        if self.end == self.limit:
            raise Unfinished
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Wait[bytes]:
        """The next byte, or none at the answer's end."""
        while self.at == self.end:
            if not (yield from self.more()):
                return b""
        return bytes(self.data[self.at : self.at + 1])

    def accept(self, tag: bytes) -> Wait[bool]:
        """Passes `tag` if it comes next, and waits only as long as it may."""
        while not self.data.startswith(tag, self.at, self.end):
            if not self._may_become(tag) or not (yield from self.more()):
                return False
        self.at += len(tag)
        return True

    def accept_last(self, tag: bytes) -> Wait[bool]:
        """As `accept`, and passes a beginning of `tag`, or nothing of it, if the answer ends there."""
        if (yield from self.accept(tag)):
            return True
        if not self.ended or not self._may_become(tag):
            return False
        self.at = self.end
        return True

    def _may_become(self, tag: bytes) -> bool:
        return tag.startswith(bytes(self.data[self.at : min(self.at + len(tag), self.end)]))

    def expect(self, tag: bytes) -> Wait[None]:
        if not (yield from self.accept(tag)):
            raise NotACall

    def run(self, pattern: re.Pattern[bytes]) -> Wait[bytes]:
        """Passes as much as `pattern` matches; it must be one that can be taken up again at any place."""
        start = self.at
        while True:
            match = pattern.match(self.data, self.at, self.end)
            self.at = match.end() if match else self.at
            if self.at < self.end or not (yield from self.more()):
                return bytes(self.data[start : self.at])

    def skip_space(self) -> Wait[None]:
        yield from self.run(_SPACES)

    def pass_until(self, tag: bytes) -> Wait[None]:
        """Passes everything up to `tag`, and that too."""
        while (found := self.data.find(tag, self.at, self.end)) < 0:
            self.at = max(self.at, self.end - len(tag) + 1)
            if not (yield from self.more()):
                raise Unfinished
        self.at = found + len(tag)

    def json_text(self, opening: bytes) -> Wait[str]:
        """The JSON that begins here with `opening`, a bracket. Only its end is sought; the decoder judges it later.

        Reading that fails begins anew behind the call's tag, and yet takes linear time: between strings every tag is
        an error, so a tag met on the way lies in a string here, while a reading that begins at it is outside one. The
        two stay opposed at every quote, and the next tag ends one of them: no byte is read more than twice.
        """
        if (yield from self.peek()) != opening:
            raise NotACall
        start, depth = self.at, 0
        while True:
            yield from self.run(_BETWEEN_STRINGS)
            found = yield from self.peek()
            self.at += 1
            if not found:
                raise Unfinished
            if found == b'"':
                yield from self._rest_of_string()
            elif found in b"]}":
                depth -= 1
                if depth == 0:
                    return as_text(self.data[start : self.at])
            elif found in b"[{" and depth < MAX_DEPTH:
                depth += 1
            else:
                raise NotACall

    def _rest_of_string(self) -> Wait[None]:
        while True:
            yield from self.run(_IN_STRING)
            found = yield from self.peek()
            if found == b'"':
                self.at += 1
                return
            if found and (found != b"\\" or self.at + 1 < self.end):
                raise NotACall
            if not (yield from self.more()):
                raise Unfinished


def as_text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogatepass")
