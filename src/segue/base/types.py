"""Values that cross layers: what a caller asks for, and who may share KV with whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from segue.base.errors import InvalidRequest

MAX_LOGPROBS = 100
MAX_SEED = 2**63 - 1
MAX_WIDTH = 512  # beams of one search
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scope:
    """KV is shared only inside one scope: same tenant salt, same adapter, same model."""

    salt: str = ""
    adapter: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        for name, text in (("salt", self.salt), ("adapter", self.adapter)):
            if not text.isascii() and not _is_text(text):
                raise InvalidRequest(name, "has half a surrogate pair in it, which is no text")

    @property
    def tenant(self) -> str:
        """Whose it is: the salt up to a null character. A tenant may have several salts; quotas count them together."""
        return self.salt.partition("\0")[0]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class FinishReason(StrEnum):
    STOP = "stop"  # eos, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's own limit
    ABORT = "abort"  # the caller's wish
    MOVED = "moved"  # goes on in another engine
    ERROR = "error"  # its step failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; a value that cannot work is refused here, by name.

    `temperature=0` is greedy. `max_tokens=None` means: up to the model's length. `seed=None` draws one per request, so that a
    request can still be resumed exactly. `allowed_token_ids`, if any, are all that is ever sampled.
    `logprobs=k` returns the k most likely tokens at each step beside the chosen one,
    from the model's own distribution (before temperature, penalties and bias).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        for name in ("stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _frozen_mapping("logit_bias", self.logit_bias))
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be True or False, got {getattr(self, name)!r}")
        self._check_numbers()
        self._check_counts()
        self._check_stops()

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", "must be above 0 (use temperature=0 for greedy)")
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty", "must be above 0 (1 leaves logits as they are)")
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, None)
            _real("logit_bias", bias, -100.0, 100.0)

    def _check_counts(self) -> None:
        _whole("top_k", self.top_k, 0, None)
        _whole("n", self.n, 1, 1024)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is over max_tokens={self.max_tokens}")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", "each stop string must be a non-empty string")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _whole(name, token, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search: `width` lines at a time, of at most `max_tokens` tokens; the `n` best are returned, all by default.

    A line's score is its log-probability divided by its length to the power of `length_penalty`. A line ends with an eos or stop
    token, or where a catalogue has no more. `early_stopping`: stop as soon as `width` lines have ended (True), when the best one
    that goes on is worse than all of those at its present length (False), or at any length ("never"). With a `temperature`,
    lines are drawn, without replacement, by `seed`.

    `catalogue`, a name that the engine knows or the thing itself, limits lines to its items, of those `allow` names if given
    and without those that `deny` does; `allowed_token_ids` limits every token. `scoring` says what a token's log-probability is
    taken over: "full", the whole vocabulary, or "legal", what was allowed in its place. Where several thoughts lead to the same
    line, `merge` gives it its "best" score, or, with "sum", that of all of them together.
    """

    width: int = 4
    max_tokens: int | None = None
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    catalogue: Any = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    scoring: Literal["full", "legal"] = "full"
    merge: Literal["best", "sum"] = "best"

    def __post_init__(self) -> None:
        if isinstance(self.deny, str):
            raise InvalidRequest("deny", "must be a list of names")
        for name in ("stop_token_ids", "allowed_token_ids", "deny"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        _whole("width", self.width, 1, MAX_WIDTH)
        for name in ("max_tokens", "n"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, None if name == "max_tokens" else self.width)
        _real("length_penalty", self.length_penalty, -10.0, 10.0)
        _real("temperature", self.temperature, 0.0, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _whole(name, token, 0, None)
        self._check_words()

    def _check_words(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest("early_stopping", f'must be true, false or "never", got {self.early_stopping!r:.40}')
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"must be True or False, got {self.ignore_eos!r:.40}")
        for name, known in (("scoring", ("full", "legal")), ("merge", ("best", "sum"))):
            if getattr(self, name) not in known:
                raise InvalidRequest(name, f"must be {known[0]!r} or {known[1]!r}, got {getattr(self, name)!r:.40}")
        if isinstance(self.allow, str):
            raise InvalidRequest("allow", "must be a list of names")
        if self.allow is not None:
            object.__setattr__(self, "allow", _tuple("allow", self.allow))
        for name in ("allow", "deny"):
            items = getattr(self, name)
            if items and self.catalogue is None:
                raise InvalidRequest(name, "names items of a catalogue, and there is none")
            if any(not isinstance(item, str) for item in items or ()):
                raise InvalidRequest(name, "must be names of items")
        if self.catalogue is not None and self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "the catalogue says already what is allowed")
        if self.catalogue is None and self.max_tokens is None:
            raise InvalidRequest("max_tokens", "is missing: without a catalogue nothing else ends the search")
        if self.scoring == "legal" and self.catalogue is None and not self.allowed_token_ids:
            raise InvalidRequest(
                "scoring", "'legal' needs something that says what is: a catalogue or allowed_token_ids"
            )


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise InvalidRequest(name, f"must be a list, got {values!r}")
    return tuple(values)


def _frozen_mapping(name: str, values: object) -> Mapping[int, float]:
    """A copy, so that what was checked cannot change."""
    if values is None:
        return _NO_BIAS
    if not isinstance(values, Mapping):
        raise InvalidRequest(name, f"must map token ids to numbers, got {values!r}")
    return MappingProxyType(dict(values)) if values else _NO_BIAS


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidRequest(name, f"must be a number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be between {low:g} and {high:g}, got {value!r:.40}")


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(name, f"must be {bound}, got {value}")
