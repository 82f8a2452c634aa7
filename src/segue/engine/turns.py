"""From what a caller asks to a turn the scheduler can run; what could never run is refused here."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable

from segue.base.clock import Clock
from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, StateError
from segue.base.types import MAX_SEED, BeamParams, SamplingParams, Scope
from segue.engine.admission import Prompt, as_token_ids, check_lengths, check_prompt, check_vocabulary
from segue.engine.answers import Answers
from segue.engine.beam import Catalogued, Constraint, Search
from segue.engine.desk import StateDesk
from segue.engine.request import At, Request, as_hold
from segue.engine.scheduler import Scheduler
from segue.engine.sequence import Heir, Hold, Sequence, Turn
from segue.engine.text import Tokenizer
from segue.state import Progress, State


class TurnMaker:
    """Changes nothing, except that a fork of a running request takes a lease on its KV."""

    def __init__(
        self,
        scheduler: Scheduler,
        desk: StateDesk,
        answers: Answers,
        clock: Clock,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int | None,
        fingerprint: str,
    ) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._answers = answers
        self._clock = clock
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._reserved: set[str] = set()
        self.catalogues: dict[str, Catalogued] = {}  # by the name that requests call them
        self._eos_ids = frozenset(tokenizer.eos_ids) if tokenizer is not None else frozenset()

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    # Parts

    def encode(self, field: str, text: Prompt, *, add_special: bool) -> array[int]:
        """Token ids of a text; ids pass through, checked."""
        if not isinstance(text, str):
            return as_token_ids(text, field)
        if not text:
            return array("i")
        if self._tokenizer is None:
            raise InvalidRequest(field, "this engine has no tokenizer: pass token ids")
        return array("i", self._tokenizer.encode(text, add_special=add_special))

    def scope(self, salt: str, adapter: str) -> Scope:
        if adapter:
            raise InvalidRequest("adapter", f"{adapter!r} is not known: this engine has no adapters")
        return Scope(salt=salt, model=self._fingerprint)

    def check_free(self, name: str, salt: str, num_answers: int = 1) -> None:
        """A new request or state of this tenant may have this id, and its answers' states theirs."""
        self._scheduler.expire(self._clock.now())  # an engine that was idle has not looked
        for wanted in answer_names(name, num_answers):
            if self._is_taken(wanted):
                raise InvalidRequest("request_id", f"{wanted!r} is in use: a request with this id has not ended")
            state = self._desk.ledger.get(wanted)
            if state is not None and (state.num_held or state.scope.salt != salt):
                raise InvalidRequest("request_id", f"{wanted!r} is in use: release the state that has it first")

    def free_id(self, name: str) -> str | None:
        """The id, if nothing at all has it."""
        return None if self._is_taken(name) or self._desk.ledger.get(name) is not None else name

    def reserve(self, name: str) -> Callable[[], None]:
        """Keep an id for what is about to arrive; call the result when it has, or will not."""
        self._reserved.add(name)
        return lambda: self._reserved.discard(name)

    def _is_taken(self, name: str) -> bool:
        if name in self._answers or name in self._reserved:
            return True
        base, _, number = name.rpartition("/")
        active = self._answers.get(base)
        return active is not None and number in map(str, range(active.turn.params.n if active.turn.params.n > 1 else 0))

    def unfinished(self, name: str, salt: str) -> Sequence | None:
        """The sequence that a request id, or request id/index, names, if it is under way and the caller's."""
        answer = self._answer(name, salt)
        if answer is None:
            return None
        turn, index = answer
        if not turn.sequences:
            raise StateError(f"{name!r} waits for its own parent and has no tokens yet")
        return turn.sequences[index]

    def _answer(self, name: str, salt: str) -> tuple[Turn, int] | None:
        """Which answer of which turn a name stands for, if that has not ended."""
        base, _, number = name.rpartition("/")
        active = self._answers.get(name) or self._answers.get(base)
        if active is None or active.turn.scope.salt != salt:
            return None
        turn = active.turn
        if name == turn.id:
            if turn.params.n > 1:
                raise InvalidRequest("parent", f"{name!r} has {turn.params.n} answers: name one, such as '{name}/0'")
            number = "0"
        elif turn.params.n == 1 or name not in answer_names(turn.id, turn.params.n):
            return None
        index = int(number)
        ended = turn.sequences and turn.sequences[index].finish_reason is not None
        return None if ended else (turn, index)

    # Turns

    def first(self, request: Request, request_id: str) -> Turn:
        assert request.prompt is not None
        prompt = self.encode("prompt", request.prompt, add_special=True)
        params, search = self._asked(request)
        check_prompt(prompt)
        check_vocabulary("prompt", prompt, params, search, self._vocab_size)
        check_lengths(len(prompt), params, search, self._config)
        return self._turn(request, request_id, prompt, self.scope(request.salt, request.adapter), params, search)

    def continuation(self, request: Request, request_id: str) -> Turn | Heir:
        """An heir if the parent has not ended. Only the suffix is looked at token by token."""
        assert request.parent is not None
        params, search = self._asked(request)
        suffix = self.encode("suffix", request.suffix, add_special=False)
        check_vocabulary("suffix", suffix, params, search, self._vocab_size)
        answer = self._answer(request.parent, request.salt) if isinstance(request.parent, str) else None
        if answer is None:
            parent = self._desk.find(request.parent, request.salt)
        elif request.at == "now":
            parent = self._present(request, request_id, len(suffix), params, search)
        else:
            return self._heir(request, request_id, *answer, suffix, params, search)
        at = position(request.at, parent)
        _check_adapter(request.adapter, parent.scope)
        check_lengths(at + len(suffix), params, search, self._config)
        kept = parent.tokens if at == parent.num_tokens else parent.tokens[:at]
        prompt = kept + suffix  # the one thing here whose cost grows with the parent: a copy of its token ids
        turn = self._turn(request, request_id, prompt, parent.scope, params, search)
        turn.parent, turn.num_shared = parent, at
        return turn

    def _heir(
        self,
        request: Request,
        request_id: str,
        parent: Turn,
        index: int,
        suffix: array[int],
        params: SamplingParams,
        search: Search | None,
    ) -> Heir:
        """What is too long already is refused at once; the rest is seen when the parent has ended."""
        _check_adapter(request.adapter, parent.scope)
        so_far = len(parent.sequences[index].tokens) if parent.sequences else 1
        at = request.at if isinstance(request.at, int) else None
        check_lengths((so_far if at is None else at) + len(suffix), params, search, self._config)
        return Heir(self._turn(request, request_id, suffix, parent.scope, params, search), parent, index, at)

    def _present(
        self, request: Request, request_id: str, num_suffix: int, params: SamplingParams, search: Search | None
    ) -> State:
        """A running request where it stands. Whatever could refuse the child is looked at before the lease is taken."""
        assert isinstance(request.parent, str)
        sequence = self.unfinished(request.parent, request.salt)
        assert sequence is not None
        _check_adapter(request.adapter, sequence.turn.scope)
        check_lengths(len(sequence.tokens) + num_suffix, params, search, self._config)
        return self._scheduler.fork(sequence, f"{request_id}/parent", transient=True)

    def resumed(self, state: State, request_id: str, hold: Hold | None, *, consume: bool) -> Turn:
        """A request that had not finished, as it was."""
        progress = self.checked_progress(state.progress, state.tokens)
        return Turn(
            request_id,
            state.tokens[:],
            progress.params,
            state.scope,
            progress.seed,
            self._clock.now(),
            self._eos_ids,
            state.job,
            hold,
            parent=state,
            num_shared=state.num_tokens,
            consume=consume,
            num_output=state.num_tokens - progress.num_prompt,
        )

    def checked_progress(self, progress: Progress | None, tokens: array[int]) -> Progress:
        if progress is None:
            raise StateError("it had finished: continue it instead")
        if progress.params.n != 1:
            raise StateError(f"one answer can be resumed, and its parameters ask for {progress.params.n}")
        check_vocabulary("tokens", tokens, progress.params, None, self._vocab_size)
        check_lengths(progress.num_prompt, progress.params, None, self._config)
        limit = progress.num_prompt + (progress.params.max_tokens or self._config.max_sequence_len)
        if not progress.num_prompt <= len(tokens) < min(limit, self._config.max_sequence_len):
            raise StateError("it has no room left to go on in")
        return progress

    def _asked(self, request: Request) -> tuple[SamplingParams, Search | None]:
        """How to sample, and the search that follows, if any. What is searched at once samples nothing."""
        beam = request.beam or (request.then.beam if request.then is not None else None)
        if beam is None:
            return request.params, None
        constraint = self._constrain(beam) if beam.catalogue is not None else None
        most = min(beam.max_tokens or MAX_SEED, constraint.depth if constraint is not None else MAX_SEED)
        if constraint is not None and most < constraint.depth:
            raise InvalidRequest("max_tokens", f"{most} is less than the {constraint.depth} tokens that items have")
        if (then := request.then) is None:
            return SamplingParams(max_tokens=most), Search(beam, most, constraint, False, array("i"))
        rest = then.rest
        if rest is None and isinstance(text := then.suffix, str):
            found = [stop for stop in request.params.stop if text.startswith(stop)]
            rest = text.removeprefix(max(found, key=len)) if found else None
        suffix = self.encode("then.suffix", then.suffix, add_special=False)
        tokens = None if rest is None else self.encode("then.rest", rest, add_special=False)
        return request.params, Search(beam, most, constraint, True, suffix, tokens)

    def _constrain(self, beam: BeamParams) -> Constraint:
        """A catalogue by its name, or itself, without what this request does not want of it."""
        catalogue = beam.catalogue
        if isinstance(catalogue, str):
            if catalogue not in self.catalogues:
                raise InvalidRequest("catalogue", f"{catalogue!r} is not known: there are {sorted(self.catalogues)}")
            catalogue = self.catalogues[catalogue]
        if not isinstance(catalogue, Catalogued):
            raise InvalidRequest("catalogue", f"must be a Catalogue or the name of one, not {type(catalogue).__name__}")
        constraint = catalogue.restricted(beam.allow, beam.deny)
        if self._vocab_size is not None and constraint.max_token >= self._vocab_size:
            raise InvalidRequest(
                "catalogue", f"token id {constraint.max_token} is outside the vocabulary of {self._vocab_size}"
            )
        return constraint

    def _turn(
        self,
        request: Request,
        request_id: str,
        prompt: array[int],
        scope: Scope,
        params: SamplingParams,
        search: Search | None,
    ) -> Turn:
        return Turn(
            request_id,
            prompt,
            params,
            scope,
            secrets.randbits(62) if params.seed is None else params.seed,
            self._clock.now(),
            self._eos_ids,
            request.job_id,
            as_hold(request.hold, request.value),
            consume=request.consume,
            priority=request.priority,
            is_last_step=request.is_last_step,
            detokenize=request.detokenize,
            search=search,
        )


def answer_names(name: str, num_answers: int) -> list[str]:
    """What the states of a request's answers are called, and the request itself."""
    return [name] if num_answers == 1 else [name, *(f"{name}/{index}" for index in range(num_answers))]


def position(at: At, state: State) -> int:
    """How many of a state's tokens a child keeps."""
    if at is None or at == "now":
        return state.num_tokens
    if at > state.num_tokens:
        raise InvalidRequest("at", f"{at} is past the end of {state.id!r}, which has {state.num_tokens} tokens")
    return at


def _check_adapter(adapter: str, parent: Scope) -> None:
    if adapter != parent.adapter:
        raise InvalidRequest("adapter", f"is {adapter!r}, and the parent was computed with {parent.adapter!r}")
