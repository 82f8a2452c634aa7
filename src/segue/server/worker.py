"""The engine's process: one thread that steps, hears what is asked between steps, and tells what came of it.

python -m segue.server.worker FD        FD is a socket to the process that serves HTTP; with it, this one ends
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from segue.base.errors import SegueError, StateError, UnknownCatalogue, UnknownState
from segue.base.types import BeamParams, SamplingParams
from segue.engine import Beam, Delta, EngineCore, Export, Request, Then
from segue.engine.holds import JobHolds
from segue.kv import KVEvent, Revoked
from segue.policies import load_learned, make_policy, save_learned
from segue.server.bundle import Bundle
from segue.server.messages import (
    Abort,
    Ask,
    Deltas,
    Failed,
    FoundBeam,
    Frames,
    FromEngine,
    Part,
    Ready,
    Refused,
    Reply,
    Start,
    StateInfo,
    Submit,
    ToEngine,
    as_tokens,
    frame,
    problem_of,
)
from segue.state import State
from segue.state.store import SavedState
from segue.state.store import save as save_snapshot

_log = logging.getLogger(__name__)
_RECEIVE_BYTES = 1 << 18
_LONGEST_SLEEP = 60.0
_LEARNED_SECONDS = 60.0  # what the policy has learned is written this often
_BUNDLE_SECONDS = 0.01  # tokens of one answer that come faster than this travel together
_MOST_BEHIND = 64 << 20  # bytes not yet sent: past this the engine waits for its reader
T = TypeVar("T")


class EngineProcess:
    """Everything happens on one thread but the files of `save` and `load`, whose chunks take their turn between steps."""

    def __init__(
        self,
        engine: EngineCore,
        sock: socket.socket,
        policy_state: Path | None = None,
        catalogue_files: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._catalogue_files = catalogue_files or {}
        self._policy_state = policy_state
        self._learned_at = time.monotonic()
        self._sock = sock
        self._frames = Frames(ToEngine)
        self._out: deque[memoryview] = deque()
        self._behind = 0
        self._tasks: deque[Callable[[], None]] = deque()
        self._bundle = Bundle(_BUNDLE_SECONDS, time.monotonic)
        self._jobs = JobHolds()
        self._left: dict[str, list[str]] = {}  # by request under way: states that its answers have left held
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (sock, self._wake_out, self._wake_in):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wanted = selectors.EVENT_READ
        self._selector.register(sock, self._wanted)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._exports: dict[str, Export] = {}
        self._open = True
        self._num_revoked = 0
        engine.kv.observe(self._observe)
        self._verbs: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "decisions": self._decisions,
            "tiers": self._engine.tiers,
            "states": self._states,
            "state": self._state,
            "fork": self._fork,
            "hold": self._hold,
            "release": self._release,
            "commit_export": self._commit_export,
            "abort_export": self._abort_export,
            "quota": self._engine.set_lease_quota,
            "check": self._engine.check,
            "catalogues": self._catalogues,
        }
        self._slow_verbs: dict[str, Callable[..., Any]] = {
            "save": self._save,
            "load": self._load,
            "export": self._export,
            "import": self._import,
            "reset_tiers": self._reset_tiers,
            "reload_catalogue": self._reload_catalogue,
        }

    def run(self) -> None:
        while self._open:
            self._hear(0.0 if self._has_work() else self._sleep_seconds())
            while self._tasks:
                self._tasks.popleft()()
            if self._engine.has_work and self._behind < _MOST_BEHIND:
                self._tell(self._engine.step())
            if parts := self._bundle.take(everything=not self._engine.has_work):
                self._send(Deltas(parts))
            self._flush()
            if self._policy_state is not None and time.monotonic() > self._learned_at + _LEARNED_SECONDS:
                self.save_learned()
        self.save_learned()

    def save_learned(self) -> None:
        """What the policy has learned survives a restart; that it cannot be written is no reason to stop."""
        if self._policy_state is not None:
            self._learned_at = time.monotonic()
            try:
                save_learned(self._policy_state, self._engine.policy)
            except OSError as error:
                _log.warning("what the policy has learned cannot be written: %s", error)

    def _has_work(self) -> bool:
        return bool(self._tasks or (self._engine.has_work and self._behind < _MOST_BEHIND))

    def _sleep_seconds(self) -> float:
        upcoming = self._engine.expire()
        return _LONGEST_SLEEP if upcoming is None else min(upcoming, _LONGEST_SLEEP)

    # The socket

    def _hear(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._wake_out:
                with suppress(BlockingIOError):
                    self._wake_out.recv(4096)
            elif events & selectors.EVENT_READ:
                self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._open = False
        for message in self._frames.push(data):
            self._carry_out(message)

    def _send(self, message: FromEngine) -> None:
        data = frame(message)
        self._out.append(memoryview(data))
        self._behind += len(data)

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out[0])
                self._behind -= sent
                rest = self._out.popleft()[sent:]
                if rest:
                    self._out.appendleft(rest)
        except BlockingIOError:
            pass  # the rest goes when there is room
        except OSError:
            self._open = False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if wanted != self._wanted:
            self._wanted = wanted
            self._selector.modify(self._sock, wanted)

    # What is asked

    def _carry_out(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            try:
                self._submit(message)
            except SegueError as error:
                self._send(Refused(message.request_id, problem_of(error)))
            except Exception:
                _log.exception("a request failed")
                self._send(Refused(message.request_id, problem_of(SegueError("the engine could not take the request"))))
        elif isinstance(message, Abort):
            self._bundle.drop(message.request_id)
            self._jobs.forget(message.request_id)
            self._left.pop(message.request_id, None)
            self._exports.pop(message.request_id, None)
            self._engine.abort(message.request_id)
        elif isinstance(message, Ask):
            self._answer(message)

    def _submit(self, message: Submit) -> None:
        tokens = as_tokens(message.tokens)
        content: dict[str, Any] = {"prompt": tokens}
        if message.parent is not None:
            content = {"parent": message.parent, "suffix": tokens, "at": message.at}
        if message.beam is not None:
            beam = BeamParams(**message.beam)
            rest = None if message.search_rest is None else as_tokens(message.search_rest)
            then = Then(beam, as_tokens(message.search_suffix), rest)
            content |= {"then": then} if message.thinks else {"beam": beam}
        self._engine.submit(
            Request(
                params=SamplingParams(**message.params),
                request_id=message.request_id,
                salt=message.salt,
                job_id=message.job_id,
                hold=message.hold,
                priority=message.priority,
                is_last_step=message.is_last_step,
                detokenize=message.thinks,  # where a thought ends, only the engine knows
                **content,
            )
        )
        if message.job_id is not None:
            self._jobs.begin(message.request_id, message.salt, message.job_id, is_last=message.is_last_step)

    def _answer(self, ask: Ask) -> None:
        if ask.verb in self._slow_verbs:
            work = self._slow_verbs[ask.verb]
            threading.Thread(target=lambda: self._beside(ask, work), name=f"segue-{ask.verb}", daemon=True).start()
            return
        self._send(_outcome(ask, self._verbs[ask.verb]))

    def _tell(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._bundle.add(self._part(delta))
            if delta.finish_reason is not None:
                self._end_answer(delta)

    def _part(self, delta: Delta) -> Part:
        logprobs = [(entry.chosen, entry.rank, list(entry.top)) for entry in delta.logprobs]
        if delta.finish_reason is None:
            return Part(delta.request_id, delta.index, list(delta.token_ids), delta.text, logprobs)
        reuse = delta.reuse
        return Part(
            delta.request_id,
            delta.index,
            list(delta.token_ids),
            delta.text,
            logprobs,
            delta.finish_reason.value,
            (reuse.held, reuse.cached + reuse.loaded, reuse.recomputed, reuse.new)
            if reuse is not None
            else (0, 0, 0, 0),
            self._info(delta.state) if delta.state is not None else None,
            problem_of(delta.error) if delta.error is not None else None,
            [_found(beam) for beam in delta.beams] if delta.beams is not None else None,
            delta.search_prefilled,
        )

    def _end_answer(self, delta: Delta) -> None:
        """When a turn has ended well, its job gives back what the turn went on from."""
        held = self._left.setdefault(delta.request_id, [])
        if delta.state is not None and delta.state.num_held:
            held.append(delta.state.id)
        if self._engine.is_active(delta.request_id):
            return
        del self._left[delta.request_id]
        if delta.error is not None:
            self._jobs.forget(delta.request_id)
            return
        salt, to_release = self._jobs.end(delta.request_id, held)
        for state_id in to_release:
            with suppress(StateError):  # forgotten already
                self._engine.release(state_id, salt=salt)

    # Verbs

    def _stats(self) -> dict[str, Any]:
        stats = self._engine.stats()
        counts = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
        prefilled = stats.prompt_tokens - stats.reused_tokens
        config = self._engine.config
        return counts | {
            "prefilled_tokens": prefilled,
            "revoked_blocks": self._num_revoked,
            "decisions": {tool: asdict(sums) for tool, sums in self._engine.decision_sums().items()},
            "tiers": self._engine.tiers(),
            "kv_blocks": config.num_blocks - 1,
            "block_size": config.block_size,
        }

    def _decisions(self, tenant: str, limit: int, job_id: str | None) -> list[dict[str, Any]]:
        now = self._engine.now()
        found = islice(self._engine.decisions(tenant, job_id), limit)
        return [decision.to_json() | {"seconds_ago": round(now - decision.decided_at, 3)} for decision in found]

    def _observe(self, event: KVEvent) -> None:
        if isinstance(event, Revoked):
            self._num_revoked += event.num_blocks

    def _info(self, state: State) -> StateInfo:
        expires_at = state.expires_at
        return StateInfo(
            state.id,
            state.num_tokens,
            state.num_computed,
            state.num_held,
            state.job,
            None if expires_at is None else max(expires_at - self._engine.now(), 0.0),
            state.progress is not None,
        )

    def _states(self, salt: str) -> list[StateInfo]:
        return [self._info(state) for state in self._engine.states(salt=salt)]

    def _state(self, state_id: str, salt: str) -> StateInfo:
        return self._info(self._engine.state(state_id, salt=salt))

    def _fork(self, state_id: str, salt: str, at: int | str | None, new_id: str, hold: bool | float) -> StateInfo:
        return self._info(self._engine.fork(state_id, at, state_id=new_id, salt=salt, hold=hold))  # type: ignore[arg-type]

    def _hold(self, state_id: str, salt: str, seconds: float | None) -> StateInfo:
        return self._info(self._engine.hold(state_id, seconds, salt=salt))

    def _release(self, state_id: str, salt: str) -> StateInfo:
        state = self._engine.state(state_id, salt=salt)
        self._engine.release(state)
        return self._info(state)

    # Files, in threads of their own

    def _beside(self, ask: Ask, work: Callable[..., Any]) -> None:
        reply = _outcome(ask, work)
        self._post(lambda: self._send(reply))

    def _save(self, state_id: str, salt: str, path: str, note: dict[str, Any]) -> int:
        outgoing, done = self._in_turn(lambda: self._engine.begin_save(state_id, salt=salt, note=note))
        try:
            return save_snapshot(
                Path(path), outgoing.snapshot, lambda index, out: self._in_turn(lambda: outgoing.read(index, out))
            )
        finally:
            self._post(done)

    def _load(self, path: str, salt: str, state_id: str | None, hold: bool | float) -> StateInfo:
        with SavedState.open(Path(path)) as saved:
            arrival = self._in_turn(
                lambda: self._engine.begin_load(saved.snapshot, state_id=state_id, salt=salt, hold=hold)
            )
            try:
                saved.take(lambda index, data: self._in_turn(lambda: arrival.write(index, data)))
                return self._in_turn(lambda: self._info(arrival.commit()))
            except BaseException:
                self._post(arrival.abort)
                raise

    def _export(self, request_id: str, salt: str, path: str) -> int:
        """The request stands still until `commit_export` or `abort_export`; if it cannot be written, it goes on."""
        export = self._in_turn(lambda: self._engine.export_request(request_id, salt=salt))
        try:
            size = save_snapshot(
                Path(path), export.snapshot, lambda index, out: self._in_turn(lambda: export.read(index, out))
            )
        except BaseException:
            self._post(export.abort)
            raise
        self._exports[request_id] = export
        return size

    def _import(self, path: str, salt: str, request_id: str, hold: bool | float) -> None:
        with SavedState.open(Path(path)) as saved:
            arrival = self._in_turn(
                lambda: self._engine.import_request(saved.snapshot, request_id=request_id, salt=salt, hold=hold)
            )
            try:
                saved.take(lambda index, data: self._in_turn(lambda: arrival.write(index, data)))
                self._in_turn(arrival.commit)
            except BaseException:
                self._post(arrival.abort)
                raise

    def _reset_tiers(self, tenant: str | None) -> dict[str, int]:
        """Whoever steps meanwhile finds nothing of it."""
        gone = self._in_turn(lambda: self._engine.forget_memory(tenant))
        return gone | self._engine.forget_stored(tenant)

    def _catalogues(self) -> dict[str, int]:
        """How many items each has."""
        return {name: len(catalogue) for name, catalogue in self._engine.catalogues.items()}

    def _reload_catalogue(self, name: str) -> int:
        """Read its file again. Searches under way end with the items they began with; if it cannot be read, nothing changes."""
        from segue.model.items import Catalogue

        if name not in self._catalogue_files:
            raise UnknownCatalogue(f"there is no catalogue {name!r:.100} here")
        catalogue = Catalogue.read(self._catalogue_files[name])
        self._in_turn(lambda: self._engine.set_catalogue(name, catalogue))
        return len(catalogue)

    def _commit_export(self, request_id: str) -> None:
        export = self._exports.pop(request_id, None)
        if export is None:
            raise UnknownState(f"{request_id!r} is not on its way to another engine")
        export.commit()

    def _abort_export(self, request_id: str) -> None:
        export = self._exports.pop(request_id, None)
        if export is not None:
            export.abort()

    def _in_turn(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def _post(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with suppress(BlockingIOError):  # full: it will wake anyhow
            self._wake_in.send(b".")


def _found(beam: Beam) -> FoundBeam:
    return FoundBeam(
        list(beam.token_ids),
        beam.score,
        beam.logprob,
        list(beam.logprobs),
        beam.finish_reason.value,
        list(beam.items),
        beam.answer,
    )


def _outcome(ask: Ask, work: Callable[..., Any]) -> Reply:
    try:
        return Reply(ask.number, work(**ask.arguments))
    except SegueError as error:
        return Reply(ask.number, problem=problem_of(error))
    except Exception:
        _log.exception("%s failed", ask.verb)
        return Reply(ask.number, problem=problem_of(SegueError(f"{ask.verb} failed in the engine")))


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that serves; it ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    frames = Frames(ToEngine)
    start: Start | None = None
    while start is None:
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            return
        start = next(frames.push(data), None)
    try:
        from segue.model.engine import Engine
        from segue.model.items import Catalogue

        policy = make_policy(start.policy)
        if start.policy_model is not None:
            policy.use_model(Path(start.policy_model))
        engine = Engine(start.model, own_process=True, policy=policy, **start.options)
        if start.policy_state is not None:
            load_learned(Path(start.policy_state), engine.policy)
        for name, file in start.catalogues.items():
            engine.set_catalogue(name, Catalogue.read(file))
    except SegueError as error:
        sock.sendall(frame(Failed(problem_of(error))))
        return
    gc.collect()
    gc.freeze()  # what there is by now stays: later collections, in which nobody gets a token, need not look through it
    config = engine.config
    ready = Ready(
        engine.backend_note,
        str(engine.budget),
        config.block_size,
        config.num_blocks,
        config.max_sequence_len,
        config.max_running,
    )
    sock.sendall(frame(ready))
    try:
        learned = Path(start.policy_state) if start.policy_state is not None else None
        EngineProcess(engine, sock, learned, start.catalogues).run()
    finally:
        engine.close()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    main(int(sys.argv[1]))
    os._exit(0)
