"""One HTTP request that generates: its calls to the engine, and their parts as text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from segue.base.errors import SegueError
from segue.base.types import FinishReason
from segue.engine.text import AnswerText
from segue.model.tokenizer import TextStream, Tokenizer
from segue.server.messages import FoundBeam, Part, StateInfo
from segue.server.metrics import Metrics
from segue.server.remote_engine import Answering, Call
from segue.server.tracing import Span

Logprob = tuple[int, float, list[tuple[int, float]]]  # token, its log-probability, the most likely tokens with theirs


class Piece(NamedTuple):
    """What was added to one choice. `finish` comes with its last piece."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    finish: str | None = None
    state: StateInfo | None = None
    reuse: tuple[int, int, int, int] = (0, 0, 0, 0)
    beam: FoundBeam | None = None  # if it is a line that a search found


@dataclass(slots=True)
class Usage:
    """Over all calls of a request; a prompt counts once, however many answers it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    inherited_tokens: int = 0
    recomputed_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.inherited_tokens},
        }


@dataclass(slots=True)
class _Choice:
    """`stream` is None where the engine made the text, because it looked for stop strings in it; but not with special tokens in
    it, as `shown` has it."""

    stream: TextStream | None
    hide_stop: bool
    tokens: list[int] = field(default_factory=list)
    shown: AnswerText | None = None
    ending: frozenset[int] = frozenset()  # tokens that may end it by being themselves

    def text_of(self, part: Part) -> str:
        if self.shown is not None:
            return self._shown_text(self.shown, part)
        if self.stream is None:
            return part.text
        tokens = part.tokens
        if part.finish == FinishReason.STOP and self.hide_stop:
            tokens = tokens[:-1]  # a token that ends an answer by being itself is not part of its text
        text = self.stream.push(tokens)
        is_over = part.finish not in (None, FinishReason.MOVED)  # where a request went, its last character is completed
        return text + self.stream.flush() if is_over else text

    def _shown_text(self, shown: AnswerText, part: Part) -> str:
        tokens = part.tokens
        if part.finish == FinishReason.STOP and self.hide_stop and tokens and tokens[-1] in self.ending:
            tokens = tokens[:-1]
        text = "".join("" if shown.stopped else shown.push(token) for token in tokens)
        return text + shown.flush() if part.finish is not None else text


class Generation:
    """Runs calls and gives their answers piece by piece. However it ends, `close` frees everything; a second time it does
    nothing."""

    def __init__(
        self,
        calls: Sequence[Call],
        tokenizer: Tokenizer,
        metrics: Metrics,
        tenant: str,
        span: Span,
        resources: ExitStack,
        *,
        show_special: bool = False,
    ) -> None:
        """`resources` are closed with it. `show_special`: the text has special tokens in it, because some models write tool
        calls with them."""
        self.calls = calls
        self.usage = Usage()
        self.states: dict[int, StateInfo] = {}
        self.beams: list[FoundBeam] = []  # what searches after thoughts have found
        self.search_prefilled = 0  # tokens that they had to compute first
        self._tokenizer = tokenizer
        self._searches = {call.request_id for call in calls if call.beam is not None and not call.thinks}
        self._metrics = metrics
        self._tenant = tenant
        self._span = span
        self._offsets: dict[str, int] = {}
        self._choices: list[_Choice] = []
        for call in calls:
            self._offsets[call.request_id] = len(self._choices)
            for _ in range(call.num_choices):
                self._choices.append(_choice(call, tokenizer, show_special=show_special))
        self._closing = resources
        self._is_open = True
        self._answering: Answering | None = None
        self._began = time.monotonic()
        self._last_token_at: float | None = None
        self._first: list[Part] = []
        self._outcome = "aborted"

    async def start(self, submit: Callable[[Sequence[Call]], Answering], calls: Sequence[Call]) -> None:
        """Returns when the first part is there, so that a refusal can still become a status; or so that others with the same ids
        can be tried instead of `calls`."""
        self._answering = submit(calls)
        self._first = await self._answering.next()

    def fail(self, error: BaseException) -> None:
        """It could not be started."""
        if isinstance(error, SegueError):
            self._outcome = "refused" if error.status < 500 else "failed"
        self.close()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """As they come, those that came together together."""
        assert self._answering is not None
        try:
            parts = self._first
            while parts:
                self._note_times(parts)
                yield [piece for part in parts for piece in self._pieces(part)]
                parts = await self._answering.next()
            self._outcome = "finished"
        except SegueError:
            self._outcome = "failed"
            raise
        finally:
            self.close()

    def output(self, choice: int) -> list[int]:
        """The tokens of a choice so far."""
        return self._choices[choice].tokens

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._answering is not None:
            self._answering.close()
        self._metrics.request_ended(self._tenant, self._outcome, time.monotonic() - self._began, self.usage)
        self._span.end(self.usage, self._outcome)
        self._closing.close()

    def _pieces(self, part: Part) -> list[Piece]:
        """One of an answer; of a search that is the answer, one of each line."""
        piece = self._piece(part)
        if part.beams is None:
            return [piece]
        self.usage.completion_tokens += sum(len(beam.tokens) for beam in part.beams)
        if part.request_id not in self._searches:
            self.beams = part.beams
            return [piece]
        lines = []
        for number, beam in enumerate(part.beams, piece.choice):
            self._choices[number].tokens += beam.tokens
            logprobs: list[Logprob] = [(token, own, []) for token, own in zip(beam.tokens, beam.logprobs, strict=True)]
            state = piece.state if number == piece.choice else None
            line = Piece(number, self.text_of(beam), beam.tokens, logprobs, beam.finish, state, part.reuse, beam)
            lines.append(line)
        return lines

    def text_of(self, beam: FoundBeam) -> str:
        """A token that ends a line by being itself is not part of its text."""
        hidden = beam.finish == FinishReason.STOP and not beam.items
        return self._tokenizer.decode(beam.tokens[:-1] if hidden else beam.tokens)

    def _piece(self, part: Part) -> Piece:
        number = self._offsets[part.request_id] + part.index
        choice = self._choices[number]
        text = choice.text_of(part)
        choice.tokens += part.tokens
        self.usage.completion_tokens += len(part.tokens)
        logprobs = [(token, chosen, top) for token, (chosen, _, top) in zip(part.tokens, part.logprobs, strict=False)]
        if part.finish is None:
            return Piece(number, text, part.tokens, logprobs)
        if part.index == 0:
            held, cached, recomputed, new = part.reuse
            self.usage.prompt_tokens += held + cached + recomputed + new
            self.usage.inherited_tokens += held + cached
            self.usage.recomputed_tokens += recomputed
        self.search_prefilled += part.search_prefilled
        if part.state is not None:
            self.states[number] = part.state
        return Piece(number, text, part.tokens, logprobs, part.finish, part.state, part.reuse)

    def _note_times(self, parts: Sequence[Part]) -> None:
        now = time.monotonic()
        if self._last_token_at is None:
            self._metrics.first_token(now - self._began)
            self._span.first_token(now - self._began)
        else:
            count = sum(len(part.tokens) for part in parts) or 1
            self._metrics.inter_token((now - self._last_token_at) * len(self._choices) / count, count)
        self._last_token_at = now


def _choice(call: Call, tokenizer: Tokenizer, *, show_special: bool) -> _Choice:
    params = call.params
    if call.imported or call.thinks or (params.stop and not show_special):
        return _Choice(None, not params.include_stop)
    stream = tokenizer.answer_stream(skip_special=not show_special)
    if not params.stop:
        return _Choice(stream, not params.include_stop)
    shown = AnswerText(stream, params.stop, params.include_stop, params.min_tokens)
    return _Choice(None, not params.include_stop, shown=shown, ending=tokenizer.special_ids | {*params.stop_token_ids})


def state_json(piece: Piece) -> dict[str, Any] | None:
    """What every finished choice says about the state it left, and where its prompt's KV came from."""
    if piece.state is None:
        return None
    held, cached, recomputed, new = piece.reuse
    return info_json(piece.state) | {
        "inherited_tokens": held + cached,
        "recomputed_tokens": recomputed,
        "new_tokens": new,
    }


def info_json(info: StateInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "num_tokens": info.num_tokens,
        "num_held": info.num_held,
        "expires_in": info.expires_in,
        "job_id": info.job_id,
    }
