"""What a caller asks for: to answer a prompt, or to go on from a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from segue.base.errors import InvalidRequest
from segue.base.types import BeamParams, SamplingParams
from segue.engine.admission import Prompt
from segue.engine.sequence import Hold
from segue.state import State

At = int | Literal["now"] | None
MAX_HOLD_SECONDS = 1e9  # some thirty years


@dataclass(frozen=True, slots=True)
class Then:
    """What follows a thought: the `suffix`, and a search. A thought that was stopped may have the first part of the suffix, which
    is then not repeated: the stop string, if a suffix that is text begins with it (for token ids, say by `rest` what is left
    then), or else tokens."""

    beam: BeamParams
    suffix: Prompt = ()
    rest: Prompt | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.beam, BeamParams):
            raise InvalidRequest("beam", f"must be BeamParams, not {type(self.beam).__name__}")


_NO_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Request:
    """Either a `prompt`, or a `parent` (a state, or the id of a state or a request) with a `suffix`.

    A continuation keeps the parent's first `at` tokens, all by default. While the parent runs it waits for its end, or, with
    `at="now"`, forks it where it stands. With `consume` it takes the parent's memory over, so that nothing is copied.
    `hold` keeps the answer's KV when it ends: for so many seconds, or with True until it is released. `value` is what losing
    a held block would cost, to compare holds with: the least valuable gives way first. `request_id` must be free in the whole
    engine: whoever lets tenants choose ids puts something of the tenant's before them. `priority` is for the policy: by
    default the smallest runs first. Turns with the same `job_id` (of one salt) are a job, whose KV the policy may keep between
    them, until the one with `is_last_step`. Without `detokenize`, deltas have token ids and no text, unless a stop string is
    sought. With `beam`, the answers are the lines that a search finds, and `params` are not used; with `then`, each answer is a
    thought, and a search follows it without a break: what it found is in the result's `beams`.
    """

    prompt: Prompt | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    parent: State | str | None = None
    suffix: Prompt = ()
    at: At = None
    consume: bool = False
    request_id: str | None = None
    salt: str = ""
    adapter: str = ""
    job_id: str | None = None
    hold: bool | float = False
    value: float = 0.0
    priority: int = 0
    is_last_step: bool = False
    detokenize: bool = True
    beam: BeamParams | None = None
    then: Then | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequest("params", f"must be SamplingParams, not {type(self.params).__name__}")
        for name in ("request_id", "job_id"):
            check_id(name, getattr(self, name))
        for name in ("salt", "adapter"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(name, f"must be a string, not {type(getattr(self, name)).__name__}")
        check_terms(self.hold, self.value)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest("priority", f"must be a whole number, got {self.priority!r}")
        for name in ("detokenize", "is_last_step"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be True or False, got {getattr(self, name)!r}")
        self._check_search()
        self._check_parent()

    def _check_search(self) -> None:
        for name, kind in (("beam", BeamParams), ("then", Then)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(name, f"must be {kind.__name__}, not {type(value).__name__}")
        if self.beam is not None and self.then is not None:
            raise InvalidRequest("beam", "is given and a search that follows a thought too: there is one search")
        if self.beam is not None and self.params != _NO_PARAMS:
            raise InvalidRequest("params", "are for sampling, and a search samples nothing before it: leave them out")

    def _check_parent(self) -> None:
        if self.parent is None:
            if self.prompt is None:
                raise InvalidRequest("prompt", "is missing: give a prompt, or a parent to continue")
            for name, absent in (("suffix", ()), ("at", None), ("consume", False)):
                if getattr(self, name) is not absent:
                    raise InvalidRequest(name, "is for a continuation: name its parent")
            return
        if self.prompt is not None:
            raise InvalidRequest("prompt", "is given and a parent too: what follows the parent is the suffix")
        if not isinstance(self.parent, (State, str)) or not self.parent:
            raise InvalidRequest("parent", f"must be a state or an id, not {type(self.parent).__name__}")
        if not isinstance(self.consume, bool):
            raise InvalidRequest("consume", f"must be True or False, not {self.consume!r}")
        check_at(self.at)


def check_id(field: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequest(field, "must be a non-empty string")


def check_at(at: object) -> None:
    if at is None or at == "now":
        return
    if isinstance(at, bool) or not isinstance(at, int) or at < 1:
        raise InvalidRequest("at", f"must be a number of tokens, at least 1, or 'now', got {at!r}")


def check_terms(hold: object, value: object) -> None:
    if not isinstance(hold, (bool, int, float)) or not 0 <= hold <= MAX_HOLD_SECONDS:
        raise InvalidRequest("hold", f"must be True, False or up to {MAX_HOLD_SECONDS:g} seconds, got {hold!r:.40}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidRequest("value", f"must be a number, got {value!r}")


def as_request(request: Request | Prompt, params: SamplingParams | None, options: Mapping[str, Any]) -> Request:
    if not isinstance(request, Request):
        return Request(request, SamplingParams() if params is None else params, **options)
    changes = dict(options) if params is None else {**options, "params": params}
    return replace(request, **changes) if changes else request


def as_hold(hold: bool | float, value: float) -> Hold | None:
    """True is without limit, a number is seconds, False is not at all; 0 seconds hold nothing."""
    if hold is False:
        return None
    return Hold(None if hold is True else float(hold), value)
