"""Requests under way, and what has come of them: tokens become text, deltas and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from segue.base.clock import Clock
from segue.base.errors import SegueError
from segue.base.types import FinishReason
from segue.engine.beam import Beam, merged
from segue.engine.executor import TokenLogprobs
from segue.engine.handoff import Export
from segue.engine.outputs import Completion, Delta, Result
from segue.engine.scheduler import Produced
from segue.engine.sequence import Reuse, Sequence, Turn
from segue.engine.text import AnswerText, Tokenizer
from segue.state import Progress

Finish = Callable[[Sequence, FinishReason], None]


@dataclass(slots=True)
class Active:
    """One request under way. `export` is there while it is on its way to another engine."""

    turn: Turn
    result: Result
    texts: list[AnswerText | None]
    unfinished: int  # answers whose last delta is still to come
    export: Export | None = None
    found: dict[int, list[Beam]] = field(default_factory=dict)  # by answers whose search has ended


class Answers:
    """By request id, from submission until the last delta has been made."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Clock) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._active: dict[str, Active] = {}
        self.reuse = Reuse()  # of all requests that have ended
        self.num_prompt_tokens = 0
        self.num_generated = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._active

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._active))

    def get(self, request_id: str) -> Active | None:
        return self._active.get(request_id)

    def open(self, turn: Turn, before: Progress | None = None) -> Active:
        """With `before`, the output that the turn brings is in the result from the start, and its text goes on from it."""
        completions = [Completion(index) for index in range(turn.params.n)]
        result = Result(turn.id, turn.prompt, turn.num_prompt, completions, turn.arrived_at)
        active = Active(turn, result, [self._text(turn) for _ in completions], turn.params.n)
        if before is not None:
            first, text = completions[0], active.texts[0]
            first.token_ids += turn.prompt[turn.num_prompt :]
            first.logprobs += [TokenLogprobs(*entry) for entry in before.logprobs]
            first.text = "".join([text.push(token) for token in first.token_ids]) if text is not None else ""
        self._active[turn.id] = active
        return active

    def publish(self, produced: list[Produced], finish: Finish) -> list[Delta]:
        """The deltas of one step. `finish` ends a sequence whose text ran into a stop string."""
        now = self._clock.now()
        self.num_generated += len(produced)
        deltas = []
        for sequence, token, logprobs in produced:
            request_id, index = sequence.turn.id, sequence.index
            active = self._active[request_id]
            result = active.result
            if result.first_token_at is None:
                result.first_token_at = now
                result.set_prompt(active.turn.prompt, active.turn.num_prompt)  # an heir's is known only by now
            text = active.texts[index]
            piece = _next_piece(text, token, sequence, finish) if text is not None else ""
            if sequence.finish_reason is None and logprobs is None:  # nearly always, and once for every token
                delta = Delta(request_id, index, (token,), piece)
                completion = result.completions[index]
                completion.token_ids.append(token)
                if piece:
                    completion.text += piece
            else:
                chosen = (logprobs,) if logprobs is not None else ()
                reason = sequence.finish_reason if sequence.search is None else None
                reuse = sequence.reuse if reason is not None else None
                delta = Delta(request_id, index, (token,), piece, chosen, reason, state=sequence.state, reuse=reuse)
                self._record(active, delta)
            deltas.append(delta)
        return deltas

    def conclude(self, ended: list[Sequence]) -> list[Delta]:
        """The last deltas of answers whose search is over; with a request's very last one comes what was found."""
        now = self._clock.now()
        deltas = []
        for sequence in ended:
            active, thought = self._active[sequence.turn.id], sequence.thought
            if active.result.first_token_at is None:
                active.result.first_token_at = now
                active.result.set_prompt(active.turn.prompt, active.turn.num_prompt)
            assert sequence.search is not None
            active.found[sequence.index] = sequence.search.found
            is_last = len(active.found) == len(active.result.completions)
            beams = self._merged(active) if is_last else None
            reason = sequence.finish_reason if thought is None else thought.reason
            delta = Delta(
                sequence.turn.id,
                sequence.index,
                (),
                "",
                finish_reason=reason,
                state=sequence.state,
                reuse=sequence.reuse,
                beams=beams,
                search_prefilled=thought.num_prefilled if thought is not None else 0,
            )
            deltas.append(delta)
            if beams is not None:
                self.num_generated += sum(len(beam.token_ids) for beam in beams)
                active.result.take(beams, is_answer=thought is None)
            self._record(active, delta)
        return deltas

    def _merged(self, active: Active) -> tuple[Beam, ...]:
        search = active.turn.search
        assert search is not None
        count = search.params.n or search.params.width
        found = [lines for _, lines in sorted(active.found.items())]  # whichever ended first
        best = merged(found, search.params.merge, len(found), count)
        if (constraint := search.constraint) is not None:
            best = [beam._replace(items=constraint.names(len(beam.token_ids), beam.node), node=0) for beam in best]
        if self._tokenizer is not None and active.turn.detokenize:
            best = [beam._replace(text=_text_of(beam, self._tokenizer)) for beam in best]
        return tuple(best)

    def end(self, active: Active, indices: Iterable[int], error: SegueError) -> list[Delta]:
        """The last deltas of a request that came to nothing."""
        active.result.error = error
        self.retire(active)
        return [Delta(active.turn.id, index, (), "", (), FinishReason.ERROR, error) for index in indices]

    def retire(self, active: Active) -> None:
        active.result.finished_at = self._clock.now()
        self.num_prompt_tokens += active.turn.num_prompt
        if active.turn.sequences and (new := active.turn.sequences[0].reuse) is not None:
            had = self.reuse
            self.reuse = Reuse(
                had.held + new.held,
                had.cached + new.cached,
                had.recomputed + new.recomputed,
                had.new + new.new,
                had.loaded + new.loaded,
            )
        del self._active[active.turn.id]

    def _record(self, active: Active, delta: Delta) -> None:
        active.result.completions[delta.index].add(delta)
        if delta.finish_reason is not None:
            active.unfinished -= 1
            if not active.unfinished:
                self.retire(active)

    def _text(self, turn: Turn) -> AnswerText | None:
        """None where nobody needs it; a stop string is found in the text, so there it is needed."""
        params = turn.params
        if self._tokenizer is None or not (turn.detokenize or params.stop):
            return None
        return AnswerText(self._tokenizer.answer_stream(), params.stop, params.include_stop, params.min_tokens)


def _next_piece(text: AnswerText, token: int, sequence: Sequence, finish: Finish) -> str:
    """A token that ends the answer by being itself (eos, stop token) is not part of its text."""
    hidden = _reason(sequence) is FinishReason.STOP and not sequence.sampling.params.include_stop
    piece = "" if hidden else text.push(token)
    if text.stopped and sequence.turn.search is not None:
        sequence.end_thought(sequence.turn.search, FinishReason.STOP, by_text=True)
    elif text.stopped:
        finish(sequence, FinishReason.STOP)
        sequence.finish_reason = FinishReason.STOP
    return piece + text.flush() if _reason(sequence) is not None else piece


def _text_of(beam: Beam, tokenizer: Tokenizer) -> str:
    """A token that ends the line by being itself is not part of its text."""
    stream = tokenizer.answer_stream()
    hidden = beam.finish_reason is FinishReason.STOP and not beam.items
    return stream.push(beam.token_ids[:-1] if hidden else beam.token_ids) + stream.flush()


def _reason(sequence: Sequence) -> FinishReason | None:
    """Why no more tokens of this answer come, if so."""
    return sequence.thought.reason if sequence.thought is not None else sequence.finish_reason
