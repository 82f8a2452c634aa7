"""Conversations that keep their state: each turn tokenises and computes only what is new.

The tokens a turn is computed on are those of the whole conversation, templated and tokenised anew; only the work is less.
The model's answer need not be in them as it was sampled: its text may tokenise otherwise, or the template may trim it. So
nothing is assumed about what a state and the next prompt have in common: it is measured.

    the state        |------ kept ------|-- answer as sampled --|
    the next prompt  |------ kept ------|-- answer as written, new messages, start of the next answer --|
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from segue.base.errors import InvalidRequest, SnapshotError, StateError
from segue.base.types import SamplingParams
from segue.engine import Delta, Request, Result, Stream
from segue.model.tokenized_text import TokenizedText, common_prefix
from segue.state import State
from segue.state.store import SavedState

if TYPE_CHECKING:
    from segue.model.engine import Engine

Message = Mapping[str, Any]
New = str | Message | Iterable[Message]
_NOTE_VERSION = 1
_NOT_OPTIONS = ("self", "messages", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Turn:
    """What undoing a turn goes back to: the first so many messages, and a state's first so many tokens."""

    num_messages: int
    num_tokens: int


class Session:
    """A conversation, and the state its last answer left. Made by `Engine.session` and `Engine.load_session`.

    A turn is taken in as a whole when it ends. One that is refused or fails changes nothing: the state before it stays held
    until there is the next. A state that the engine gave up costs time only, for the conversation is all here.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Iterable[Message],
        options: Mapping[str, Any],
        *,
        params: SamplingParams | None,
        hold: bool | float,
        salt: str,
        job_id: str | None,
    ) -> None:
        """`options` go to the template, the others into each request."""
        for name in _NOT_OPTIONS:
            if name in options:
                raise InvalidRequest(name, "is the session's own business, not an option of the template")
        self._engine = engine
        self._usual = Request((), params or SamplingParams(), hold=hold, salt=salt, job_id=job_id)
        self._messages = [deepcopy(dict(message)) for message in messages]
        self._options = deepcopy(dict(options))
        self._turns: list[Turn] = []
        self._state: State | None = None
        self._text = TokenizedText(engine.model.tokenizer)
        self._answering = self._closed = False

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far: a copy."""
        return deepcopy(self._messages)

    @property
    def state(self) -> State | None:
        return self._state

    def send(self, new: New, params: SamplingParams | None = None) -> Result:
        """Say something, and wait for the answer. Text is the user's; messages can be of any role."""
        reply = self.stream(new, params)
        for _ in reply:
            pass
        return reply.result

    def stream(self, new: New, params: SamplingParams | None = None) -> Reply:
        """As `send`, with the answer as it comes."""
        self._require_idle()
        added = _as_messages(new)
        tokens, parent = self._tokens([*self._messages, *added]), self._state
        kept = common_prefix(parent.tokens, tokens) if parent is not None else 0
        request = replace(self._usual, prompt=tokens, params=params or self._usual.params)
        if request.params.n != 1:
            raise InvalidRequest("n", f"is {request.params.n}, and a conversation goes on from one answer")
        if parent is not None and kept and self._is_known(parent):
            at = None if kept == parent.num_tokens else kept
            request = replace(request, prompt=None, parent=parent, at=at, suffix=tokens[kept:])
        stream = self._engine.stream(request)
        self._answering = True
        return Reply(self, stream, added, kept)

    def fork(self) -> Session:
        """Another session that goes on from here by itself, with the KV up to here by reference."""
        self._require_idle()
        child = copy(self)
        child._messages, child._turns = self._messages[:], self._turns[:]
        child._state = self._state_up_to(None)
        return child

    def undo(self, turns: int = 1) -> None:
        """Take back the last turns: what was sent in each, and its answer."""
        self._require_idle()
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= len(self._turns):
            raise InvalidRequest("turns", f"{len(self._turns)} can be undone, not {turns!r}")
        undone = self._turns[-turns:]
        self._replace_state(self._state_up_to(min(turn.num_tokens for turn in undone)))
        del self._turns[-turns:]
        del self._messages[undone[0].num_messages :]

    def save(self, path: str | Path) -> int:
        """Write the session to a file, with its KV; how many bytes. A state that is gone is computed again first."""
        self._require_idle()
        if self._state is None or not self._is_known(self._state):
            self._replace_state(self._computed_again())
        assert self._state is not None
        note = {
            "session": _NOTE_VERSION,
            "messages": self._messages,
            "options": self._options,
            "turns": [[turn.num_messages, turn.num_tokens] for turn in self._turns],
        }
        return self._engine.save(self._state, path, note=note)

    @classmethod
    def load(cls, engine: Engine, path: str | Path, *, job_id: str | None, **terms: Any) -> Self:
        """Nothing changes unless the file is a session's, all of it."""
        with SavedState.open(Path(path)) as saved:
            note, job = _checked_note(saved.snapshot.note), saved.snapshot.job
        session = cls(engine, note["messages"], note["options"], job_id=job_id or job, **terms)
        session._turns = [Turn(*turn) for turn in note["turns"]]
        session._state = engine.load(path, salt=session._usual.salt, hold=session._usual.hold)
        return session

    def close(self) -> None:
        """Give up the hold, for good. The messages can still be read."""
        self._closed = True
        self._replace_state(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_in(self, added: list[dict[str, Any]], kept: int, result: Result) -> None:
        """A turn has ended, or was ended early. One without a token leaves no trace."""
        answer = result.completions[0]
        self._answering = False
        if not answer.token_ids:
            return
        state = answer.state
        if answer.finish_reason is None:
            with suppress(StateError):  # an interrupted step ends its request, which cannot be forked then
                state = self._engine.fork(result.request_id, salt=self._usual.salt, hold=self._usual.hold)
        if state is None or not self._is_known(state):
            state = self._state  # the one from before has to do
        self._turns.append(Turn(len(self._messages), kept))
        self._messages += [*added, {"role": "assistant", "content": answer.text}]
        self._replace_state(state)

    def _replace_state(self, state: State | None) -> None:
        old, self._state = self._state, None if self._closed else state
        for unused in (old, state):
            if unused is not None and unused is not self._state:
                self._engine.release(unused)

    def _state_up_to(self, num_tokens: int | None) -> State | None:
        """A new state with the first tokens of ours, or all; None if there are none or the engine has given it up."""
        state = self._state
        if state is None or num_tokens == 0 or not self._is_known(state):
            return None
        at = None if num_tokens is None else min(num_tokens, state.num_tokens)
        return self._engine.fork(state, at, salt=self._usual.salt, hold=self._usual.hold)

    def _computed_again(self) -> State | None:
        if not self._messages:
            raise InvalidRequest("messages", "there are none yet, so there is nothing to save")
        request = replace(self._usual, prompt=self._tokens(self._messages), params=SamplingParams(max_tokens=1))
        return self._engine.generate(request)[0].state

    def _is_known(self, state: State) -> bool:
        """The engine may have given it up, and its id may be another's by now."""
        try:
            return self._engine.state(state.id, salt=self._usual.salt) is state
        except StateError:
            return False

    def _tokens(self, messages: Sequence[Message]) -> array[int]:
        """What `Engine.chat_prompt` gives."""
        text = self._engine.model.chat_template.render(messages, **self._options)
        self._text = self._text.changed_to(text)
        return self._text.tokens

    def _require_idle(self) -> None:
        if self._closed:
            raise StateError("the session is closed")
        if self._answering:
            raise StateError("the session is answering: read the answer to its end, or close it")


class Reply:
    """A session's answer as it comes. To close it early, or to interrupt it, keeps what there is as the answer."""

    def __init__(self, session: Session, stream: Stream, added: list[dict[str, Any]], kept: int) -> None:
        self._session = session
        self._stream = stream
        self._added = added
        self._kept = kept
        self._ended = False

    @property
    def result(self) -> Result:
        """Complete once the last delta has come."""
        return self._stream.result

    def __iter__(self) -> Reply:
        return self

    def __next__(self) -> Delta:
        try:
            delta = next(self._stream)
        except (StopIteration, KeyboardInterrupt):
            self.close()
            raise
        except BaseException:
            self._ended, self._session._answering = True, False
            self._stream.close()
            raise
        if delta.finish_reason is not None:
            self.close()
        return delta

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            try:
                self._session._take_in(self._added, self._kept, self.result)
            finally:
                self._stream.close()

    def __del__(self) -> None:
        self.close()


# What callers and files say


def _as_messages(new: New) -> list[dict[str, Any]]:
    if isinstance(new, str):
        new = {"role": "user", "content": new}
    messages = [new] if isinstance(new, Mapping) else list(new) if isinstance(new, Iterable) else []
    if not messages or not all(map(_is_message, messages)):
        raise InvalidRequest("messages", "must be text, or one or more messages, each with a role")
    return [deepcopy(dict(message)) for message in messages]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _is_turn(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int and number >= 0 for number in value)


def _checked_note(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file is a stranger's: what it says is believed only in the form that `Session.save` writes."""
    if note.get("session") != _NOTE_VERSION or note.keys() != {"session", "messages", "options", "turns"}:
        raise SnapshotError("the file holds a state but not a session, or one of another version of Segue")
    messages, options, turns = note["messages"], note["options"], note["turns"]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise SnapshotError("the session's messages are not messages")
    if not isinstance(options, dict) or any(name in options for name in _NOT_OPTIONS):
        raise SnapshotError("the session's options are not options of a template")
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        raise SnapshotError("the session's turns are not pairs of numbers")
    if any(start >= stop for start, stop in pairwise([*(start for start, _ in turns), len(messages)])):
        raise SnapshotError("the session's turns are not in the order of its messages")
    return note
