"""What the HTTP process and the engine's process say to each other: MessagePack, each message with its length before it.

    HTTP process                                     engine process
    Start             the model and its options  →
                                                 ←   Ready, or Failed
    Submit, Abort     requests                   →
                                                 ←   Refused, Deltas: one message for all that a step produced
    Ask               everything else            →
                                                 ←   Reply

Token ids travel as the bytes of an array of C ints: both ends are the same machine.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from segue.base import errors
from segue.base.errors import InvalidRequest, SegueError
from segue.base.types import BeamParams, SamplingParams

_LENGTH = struct.Struct("<I")
_KINDS: dict[str, type[SegueError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SegueError)
}
_DEFAULTS = {SamplingParams: SamplingParams(), BeamParams: BeamParams(max_tokens=1)}


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """An error of ours on its way to the other process."""

    kind: str
    message: str
    field: str | None = None


class Start(msgspec.Struct, tag=True, frozen=True):
    model: str
    options: dict[str, Any]
    policy: str | None = None
    policy_state: str | None = None  # a file
    policy_model: str | None = None  # another
    catalogues: dict[str, str] = {}  # files, by the name that requests call them


class Submit(msgspec.Struct, tag=True, frozen=True):
    """With a `parent`, `tokens` are the suffix. `hold` as in `Request`. After the last step of a job nothing of it is held."""

    request_id: str
    tokens: bytes
    params: dict[str, Any]
    salt: str = ""
    parent: str | None = None
    at: int | str | None = None
    job_id: str | None = None
    hold: bool | float = False
    priority: int = 0
    is_last_step: bool = False
    beam: dict[str, Any] | None = None  # a search, at once or, if the answers are thoughts, after each of them
    thinks: bool = False
    search_suffix: bytes = b""
    search_rest: bytes | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Ask(msgspec.Struct, tag=True, frozen=True):
    number: int
    verb: str
    arguments: dict[str, Any]


class Ready(msgspec.Struct, tag=True, frozen=True):
    backend: str
    budget: str
    block_size: int
    num_blocks: int
    max_len: int
    max_running: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    problem: Problem


class Refused(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    problem: Problem


class StateInfo(msgspec.Struct, array_like=True, frozen=True):
    """A state as the HTTP process knows it. `expires_in` is seconds; None while held without limit, or not at all."""

    id: str
    num_tokens: int
    num_computed: int
    num_held: int
    job_id: str | None
    expires_in: float | None
    unfinished: bool


class FoundBeam(msgspec.Struct, array_like=True, frozen=True):
    """A line that a search found; `answer` is the thought it followed."""

    tokens: list[int]
    score: float
    logprob: float
    logprobs: list[float]
    finish: str
    items: list[str]
    answer: int


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What one step added to one answer; the fields after `logprobs` come with the last part only. There is `text` only where
    the engine looked for a stop string in it; elsewhere the HTTP process makes it from the tokens."""

    request_id: str
    index: int
    tokens: list[int]
    text: str
    logprobs: list[tuple[float, int, list[tuple[int, float]]]]
    finish: str | None = None
    reuse: tuple[int, int, int, int] = (0, 0, 0, 0)  # held, cached, recomputed, new: together the prompt
    state: StateInfo | None = None
    problem: Problem | None = None
    beams: list[FoundBeam] | None = None  # with a search's very last part
    search_prefilled: int = 0


class Deltas(msgspec.Struct, tag=True, frozen=True):
    parts: list[Part]


class Reply(msgspec.Struct, tag=True, frozen=True):
    number: int
    value: Any = None
    problem: Problem | None = None


ToEngine = Start | Submit | Abort | Ask
FromEngine = Ready | Failed | Refused | Deltas | Reply
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into messages."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[Any]:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


def problem_of(error: SegueError) -> Problem:
    field = error.field if isinstance(error, InvalidRequest) else None
    message = str(error).removeprefix(f"{field}: ") if field is not None else str(error)
    return Problem(type(error).__name__, message, field)


def error_of(problem: Problem) -> SegueError:
    kind = _KINDS.get(problem.kind, SegueError)
    return kind(problem.field or "", problem.message) if issubclass(kind, InvalidRequest) else kind(problem.message)


def as_dict(params: SamplingParams | BeamParams) -> dict[str, Any]:
    """What differs from the defaults, as plain values."""
    defaults = _DEFAULTS[type(params)]
    changed = {
        name: value
        for name in params.__dataclass_fields__
        if (value := getattr(params, name)) != getattr(defaults, name) or name == "max_tokens"
    }
    if "logit_bias" in changed:
        changed["logit_bias"] = dict(changed["logit_bias"])
    return changed


def as_bytes(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def as_tokens(data: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens
