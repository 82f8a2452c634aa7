"""Reads an answer as it comes: gives out what is certain, holds back what may still become a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import groupby

from segue.toolcalls import grammars
from segue.toolcalls.calls import NotACall, Piece, ToolCall
from segue.toolcalls.source import SPACE, Source, Unfinished, Wait

MAX_CALL_BYTES = 4 * 2**20

Grammar = Callable[[Source, bytes], Wait[list[ToolCall]]]


class CallReader(ABC):
    """One per answer. The pieces it gives are the same however the text is cut, once adjacent strings are joined.

    A `<think>` block that the answer begins with is content, whatever is in it.
    """

    def __init__(self) -> None:
        self._source = Source()
        self._out: list[Piece] = []
        self._reading = self._answer()

    def push(self, text: str) -> list[Piece]:
        """What is certain by now: content and completed calls, in order."""
        if self._source.ended:
            return [text] if text else []
        self._source.push(text)
        return self._read_on()

    def flush(self) -> list[Piece]:
        """The answer has ended: the rest of it."""
        self._source.ended = True
        return self._read_on()

    def _read_on(self) -> list[Piece]:
        next(self._reading, None)
        out, self._out = self._out, []
        pieces: list[Piece] = []
        for kind, alike in groupby(out, key=type):
            run = list(alike)
            pieces += ["".join(map(str, run))] if kind is str else run
        return pieces

    def _answer(self) -> Wait[None]:
        try:
            yield from self._think()
            yield from self._calls()
        except Unfinished:
            pass
        self._give(len(self._source.data))
        while (yield from self._source.more()):
            self._give(len(self._source.data))

    @abstractmethod
    def _calls(self) -> Wait[None]:
        """Reads the answer until the rest of it is certain to be content."""

    def _think(self) -> Wait[None]:
        yield from self._source.skip_space()
        if (yield from self._source.accept(b"<think>")):
            self._give(self._source.at)
            if (yield from self._text_until((b"</think>",))):
                self._give(self._source.at)
        self._source.at = 0

    def _text_until(self, tags: tuple[bytes, ...]) -> Wait[bytes | None]:
        """Gives out the text before the next of `tags`, which all begin alike, and passes it; None at the answer's end.

        Whitespace is held back while it may turn out to touch a call: what is held begins with it.
        """
        source = self._source
        while True:
            found = source.data.find(tags[0][:1], source.at)
            stop = found if found >= 0 else len(source.data)
            if written := source.data[source.at : stop].rstrip(SPACE):
                self._give(source.at + len(written))
                continue
            source.at = stop
            if found < 0:
                if not (yield from source.more()):
                    return None
                continue
            for tag in tags:
                if (yield from source.accept(tag)):
                    return tag
            self._give(stop + 1)

    def _attempt(self, start: int, grammar: Wait[list[ToolCall]]) -> Wait[list[ToolCall] | None]:
        """The calls that `grammar` finds in what begins at `start`; None if there is none."""
        self._source.limit = start + MAX_CALL_BYTES
        try:
            return (yield from grammar)
        except NotACall:
            return None
        finally:
            self._source.limit = None

    def _give(self, size: int) -> None:
        """Gives out the first `size` bytes held, as content."""
        if size:
            self._out.append(self._source.take(size))

    def _give_calls(self, calls: list[ToolCall]) -> Wait[None]:
        """Gives out `calls` in place of all that was passed, and drops the whitespace behind them."""
        self._out += calls
        self._source.take(self._source.at)
        yield from self._source.skip_space()
        self._source.take(self._source.at)


class _TaggedReader(CallReader):
    """For formats in which a tag opens a call, wherever in the answer."""

    def __init__(self, tags: tuple[bytes, ...], grammar: Grammar) -> None:
        super().__init__()
        self._tags = tags
        self._grammar = grammar

    def _calls(self) -> Wait[None]:
        source = self._source
        while tag := (yield from self._text_until(self._tags)):
            start = source.at - len(tag)
            calls = yield from self._attempt(start, self._grammar(source, tag))
            if calls is None:
                self._give(start + 1)
            else:
                yield from self._give_calls(calls)


class _LlamaReader(CallReader):
    """For Llama 3: the answer begins with calls or has none. They may be parted by whitespace and `;`."""

    def _calls(self) -> Wait[None]:
        source = self._source
        yield from source.skip_space()
        start = source.at
        if not (yield from source.accept(grammars.PYTHON_TAG)):
            whole = yield from self._attempt(start, grammars.llama_whole(source))
            if whole is not None:
                yield from self._give_calls(whole)
            return
        calls = yield from self._attempt(start, grammars.llama_first(source))
        while calls:
            yield from self._give_calls(calls)
            calls = yield from self._attempt(0, grammars.llama_next(source))
        if calls is not None:
            source.take(source.at)


_READERS: dict[str, Callable[[], CallReader]] = {
    "hermes": lambda: _TaggedReader((grammars.TOOL_CALL,), grammars.hermes),
    "qwen-coder": lambda: _TaggedReader((grammars.TOOL_CALL, grammars.FUNCTION), grammars.qwen_coder),
    "llama": _LlamaReader,
    "mistral": lambda: _TaggedReader((grammars.TOOL_CALLS,), grammars.mistral),
}
FORMATS: tuple[str, ...] = tuple(_READERS)


def reader(format: str) -> CallReader:
    """For one answer of a model that writes its calls in `format`."""
    if format not in _READERS:
        raise ValueError(f"no tool call format {format!r}; known are {', '.join(FORMATS)}")
    return _READERS[format]()
