"""Two ends of a socket, an engine at each, and a fake model that takes no time."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from segue.base.config import EngineConfig
from segue.base.errors import StateError
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.engine.frames import Kind
from segue.engine.wire import receive_request, stream_back
from tests.fakes import VOCAB, FakeExecutor

PROMPT = list(range(30))
ANSWER = 12


def make(num_blocks=64, size=4, *, kind=EngineCore, executor=FakeExecutor, model="m", max_model_len=200, **options):
    config = EngineConfig(num_blocks, size, 64, 8, max_model_len=max_model_len, **options)
    return kind(executor(num_blocks, size), config, vocab_size=VOCAB, model_fingerprint=model)


def params(**more):
    return SamplingParams(**{"max_tokens": ANSWER, "temperature": 0, **more})


class Counted(socket.socket):
    """Remembers what was sent, frame by frame."""

    def __init__(self, sock):
        super().__init__(fileno=sock.detach())
        self.frames = []

    def sendall(self, data, flags=0):
        self.frames.append(bytes(data))
        super().sendall(data, flags)

    @property
    def kinds(self):
        return [Kind(frame[0]) for frame in self.frames]


@contextmanager
def other_side(work, *given):
    """Runs `work(socket, …)` in a thread of its own, which ends well unless the test says otherwise."""
    near, far = socket.socketpair()
    near = Counted(near)
    with ThreadPoolExecutor(1) as thread, near:

        def run():
            with far:
                return work(far, *given)

        near.outcome = thread.submit(run)
        yield near
        near.close()
    near.outcome.result()


def serve(sock, engine, *, between=None):
    """What a destination does with each request that comes, until the connection is closed."""
    while True:
        try:
            request_id = receive_request(sock, engine, timeout=5)
        except StateError:
            return
        if request_id is not None:
            stream_back(sock, engine, request_id, between=between, timeout=5)


def start(engine, num_deltas, prompt=PROMPT, **more):
    """A stream, and what has come of it so far."""
    stream = engine.stream(prompt, params(**more))
    return stream, [next(stream) for _ in range(num_deltas)]


def tokens_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def assert_empty(*engines):
    for engine in engines:
        engine.check()
        assert engine.kv.usage == 0.0
