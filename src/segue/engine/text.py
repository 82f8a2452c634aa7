"""From tokens to text as they come, and stop strings wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class TextStream(Protocol):
    """Detokenises as tokens come. Never gives out half a character that a later token completes."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Collection[int]: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def answer_stream(self, skip_special: bool = True) -> TextStream:
        """For text that follows a prompt."""
        ...


Decode = Callable[[Sequence[int]], str]


def decoder(tokenizer: Tokenizer) -> Decode:
    """A whole answer at once, its special tokens written out: some mark tool calls."""

    def decode(ids: Sequence[int]) -> str:
        stream = tokenizer.answer_stream(skip_special=False)
        return stream.push(ids) + stream.flush()

    return decode


class StopStrings:
    """Passes text through until a stop string appears in it; text that may be the start of one is held back.

    `found` says that one appeared: what comes after it is dropped, and it too unless `include`.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        hits = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found = True
            at, length = min(hits)
            return text[: at + length] if self._include else text[:at]
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """One answer's text: detokenised, cut at a stop string."""

    def __init__(self, stream: TextStream, stops: Sequence[str], include_stop: bool, min_tokens: int) -> None:
        self._stream = stream
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops is not None and self._stops.found

    def push(self, token: int) -> str:
        text = self._stream.push((token,))
        self._num_tokens += 1
        if self._stops is None or self._num_tokens <= self._min_tokens:
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        rest = self._stream.flush()
        if self._stops is None:
            return rest
        return "" if self._stops.found else self._stops.push(rest) + self._stops.flush()
