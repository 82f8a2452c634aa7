"""Requests that move over a socket: the answer is the same, and whoever dies, nothing is lost and nothing leaks."""

import json
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import NoRoom, RequestTooLong, SegueError, SnapshotError, StateError, StepFailed
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, TokenLogprobs
from segue.engine.frames import HEADER, Kind, Link
from segue.engine.wire import RemoteStream, receive_request, send_request, stream_back
from segue.state import codec
from segue.state.codec import DIGEST_BYTES, MAGIC, chunk_digest
from tests.fakes import VOCAB, FakeExecutor, expected

PROMPT = list(range(30))
ANSWER = 12


@pytest.fixture(autouse=True)
def one_block_per_chunk(monkeypatch):
    monkeypatch.setattr("segue.engine.desk._CHUNK_BYTES", 1)


class WithLogprobs(FakeExecutor):
    def execute(self, plan):
        result = super().execute(plan)
        for place, token in enumerate(result.tokens):
            result.logprobs[place] = TokenLogprobs(-0.25 * token, 1, ((token, -0.25 * token), (3, float("-inf"))))
        return result


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


# It goes on as if nothing had happened


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("size", "other_size"), [(4, 4), (4, 16), (5, 3)])
@pytest.mark.parametrize("num_deltas", [0, 1, 7, ANSWER - 1])
def test_the_stream_goes_on_without_a_break(num_deltas, size, other_size, caching):
    here = make(size=size, prefix_caching=caching)
    there = make(size=other_size, prefix_caching=caching)
    with other_side(serve, there) as sock:
        stream, deltas = start(here, num_deltas, temperature=1, seed=7)
        moved_id = send_request(sock, here, stream.result.request_id)
        assert_empty(here)
        deltas += stream
    assert tokens_of(deltas) == stream.result.token_ids == expected(PROMPT, ANSWER, 7, 1.0)
    assert deltas[-1].finish_reason is stream.result.completions[0].finish_reason is FinishReason.LENGTH
    assert {delta.request_id for delta in deltas} == {stream.result.request_id}
    assert there.state(moved_id).tokens.tolist() == PROMPT + stream.result.token_ids
    assert there._executor.num_computed <= ANSWER + (0 if num_deltas else len(PROMPT))
    assert_empty(here, there)


def test_moved_on_while_its_deltas_pass_through():
    here, middle, there = make(), make(size=3), make(size=8)

    def move_on(delta):
        seen.append(delta)
        if len(seen) == 4:
            send_request(onward, middle, delta.request_id)
            assert_empty(middle)

    seen = []
    with other_side(serve, there) as onward, other_side(lambda sock: serve(sock, middle, between=move_on)) as sock:
        stream, deltas = start(here, 3)
        send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert tokens_of(seen) == expected(PROMPT, ANSWER)[3:]
    assert there.stats().generated_tokens == ANSWER - 3 - 4
    assert_empty(here, middle, there)


def test_there_and_back_again():
    here, there = make(), make(size=8)
    near, far = socket.socketpair()

    def send_back(delta):
        if len(delta_ids) == 3:
            send_request(far, there, delta.request_id, timeout=5)
        delta_ids.append(delta.request_id)

    delta_ids = []
    with near, far, other_side(lambda sock: serve(sock, there, between=send_back)) as sock:
        stream, deltas = start(here, 2)
        send_request(sock, here, stream.result.request_id)
        back = receive_request(near, here, timeout=5)
        stream_back(near, here, back, timeout=5)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here, there)


def test_everything_about_a_token_travels():
    here, there = make(executor=WithLogprobs), make(executor=WithLogprobs)
    whole = here.generate(PROMPT, params(logprobs=1))[0].completions[0]
    with other_side(serve, there) as sock:
        stream, _ = start(here, 4, logprobs=1)
        send_request(sock, here, stream.result.request_id)
        last = list(stream)[-1]
    assert stream.result.completions[0].logprobs == whole.logprobs
    assert len(there.generate(PROMPT, params(logprobs=1))[0].completions[0].logprobs) == ANSWER
    assert last.reuse.held == len(PROMPT) + 3 and last.reuse.new == 1


def test_one_without_a_reader_ends_here_and_can_be_read_from_the_socket():
    here, there = make(), make()
    with other_side(serve, there) as sock:
        request_id = here.submit(PROMPT, params())
        deltas = [delta for _ in range(3) for delta in here.step()]
        send_request(sock, here, request_id)
        [moved] = here.step()
        assert moved.finish_reason is FinishReason.MOVED
        deltas += RemoteStream(sock, request_id)
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)


def test_only_what_is_missing_is_shipped():
    here, there = make(), make()
    there.generate(PROMPT[:17], params(max_tokens=1))
    with other_side(serve, there) as sock:
        for already, prompt in ((16, PROMPT), (28, [*PROMPT[:28], 49, 48])):
            shipped_before = len(sock.frames)
            stream, deltas = start(here, 2, prompt)
            send_request(sock, here, stream.result.request_id)
            deltas += stream
            assert tokens_of(deltas) == expected(prompt, ANSWER)
            hello, *chunks, end = sock.frames[shipped_before:]
            assert sum(map(len, chunks)) == (31 - already) * 12 + len(chunks) * (HEADER.size + 4 + DIGEST_BYTES)
            assert len(chunks) == -(-(31 - already) // 4) and len(end) == HEADER.size and hello[0] == Kind.HELLO
    assert_empty(here, there)


# What is refused, or fails, leaves the request where it was


def test_a_refusal_says_why_and_the_connection_stays_good():
    here, there = make(), make(num_blocks=13)
    blocker = there.submit([1, 2, 3], params(max_tokens=9))
    there.step()
    assert there.kv.num_free == 11
    with other_side(serve, there) as sock:
        stream, deltas = start(here, 16, max_tokens=19)  # KV for 45 tokens: 12 blocks
        with pytest.raises(NoRoom, match=r"refused.*12 blocks are needed"):
            send_request(sock, here, stream.result.request_id)
        deltas.append(next(stream))
        there.abort(blocker)
        send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, 19)
    assert_empty(here, there)


@pytest.mark.parametrize(
    ("destination", "error", "why"),
    [
        ({"num_blocks": 11}, RequestTooLong, "max_tokens: .*never hold more than 40"),
        ({"max_model_len": 40}, RequestTooLong, "max_tokens: .*limit of 40"),
        ({"max_model_len": 32}, SnapshotError, "up to 32 are taken"),
        ({"model": "another"}, SnapshotError, "belongs to model 'm'"),
    ],
)
def test_what_could_never_run_there_goes_on_here(destination, error, why):
    here, there = make(), make(**destination)
    with other_side(serve, there) as sock:
        stream, deltas = start(here, 5)
        with pytest.raises(error, match=why):
            send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here, there)


def test_an_id_that_is_taken_there_becomes_another():
    here, there = make(), make()
    there.submit([5, 6], params(), request_id="mine")
    with other_side(serve, there) as sock:
        stream = here.stream(PROMPT, params(), request_id="mine")
        deltas = [next(stream)]
        assert send_request(sock, here, "mine").startswith("req-")
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)


def dying(sock, last_frame):
    """A destination that is gone after it has read, or sent, so many frames."""
    link = Link(sock, 5)
    if last_frame == 0:
        return
    link.begin(Kind.HELLO, 2**20).skip()
    if last_frame == 1:
        return
    link.send_json(Kind.WANT, {"first": 0, "count": 9})
    for _ in range(last_frame - 2):
        _, length = link.header()
        link.fill(memoryview(bytearray(length)))


@pytest.mark.parametrize("last_frame", range(13))
def test_if_the_destination_dies_first_the_source_finishes(last_frame):
    here = make()
    with other_side(dying, last_frame) as sock:
        stream, deltas = start(here, 6)
        with pytest.raises(StateError, match="connection"):
            send_request(sock, here, stream.result.request_id, timeout=5)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here)


WANT, COMMITTED, REFUSED, DELTA = (int(kind) for kind in (Kind.WANT, Kind.COMMITTED, Kind.REFUSED, Kind.DELTA))


@pytest.mark.parametrize(
    "answer",
    [
        (WANT, b'{"first": 0, "count": 10}'),
        (WANT, b'{"first": -1, "count": 1}'),
        (WANT, b'{"first": true, "count": 1}'),
        (WANT, b'{"first": 1e99, "count": 1}'),
        (WANT, b'{"first": 0}'),
        (WANT, b"[]"),
        (WANT, b"[" * 100_000),
        (WANT, b"9" * 10_000),
        (WANT, b"\xff\xfe"),
        (COMMITTED, b'{"request_id": "x"}'),
        (REFUSED, b'{"kind": "NoRoom"}'),
        (REFUSED, b'{"kind": "InvalidRequest", "message": "m"}'),
        (REFUSED, b'{"kind": ["NoRoom"], "message": "m"}'),
        (DELTA, b"{}"),
        (200, b"{}"),
        (WANT, None),
    ],
    ids=lambda answer: f"{answer[0]} {answer[1]!r:.20}",
)
def test_a_nonsensical_answer_leaves_the_request_here(answer):
    kind, body = answer

    def reply(sock):
        Link(sock, 5).begin(Kind.HELLO, 2**20).skip()
        sock.sendall(HEADER.pack(kind, 2**60 if body is None else len(body)) + (body or b""))
        with suppress(OSError):
            sock.recv(1)

    here = make()
    with other_side(reply) as sock:
        stream, deltas = start(here, 2)
        with pytest.raises(StateError):
            send_request(sock, here, stream.result.request_id, timeout=5)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here)


def test_a_silent_destination_is_waited_for_no_longer_than_the_timeout():
    here = make()
    with other_side(lambda sock: sock.recv(1, socket.MSG_PEEK) and time.sleep(0.4)) as sock:
        stream, deltas = start(here, 2)
        began = time.monotonic()
        with pytest.raises(StateError, match="timed out"):
            send_request(sock, here, stream.result.request_id, timeout=0.1)
        assert time.monotonic() - began < 0.35
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)


class UnderPressure(EngineCore):
    """Other work comes in between: what is on its way out has to give way in part."""

    def export_request(self, request_id, **options):
        export = super().export_request(request_id, **options)
        self.generate(list(range(10, 40)), params(max_tokens=3))
        return export


def test_lost_chunks_are_computed_again():
    here, there = make(num_blocks=13, kind=UnderPressure), make()
    with other_side(serve, there) as sock:
        stream, deltas = start(here, 3)
        send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert Kind.CHUNK in sock.kinds and Kind.LOST in sock.kinds
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert deltas[-1].reuse.recomputed > 0
    assert_empty(here, there)


# After the request has moved


def test_if_the_destination_dies_later_the_stream_says_so():
    here, there = make(), make()

    def die(sock):
        with pytest.raises(ZeroDivisionError):
            stream_back(sock, there, receive_request(sock, there), between=lambda delta: 1 // (len(delta.text) * 0))

    with other_side(die) as sock:
        stream, _ = start(here, 2)
        send_request(sock, here, stream.result.request_id)
        assert len(tokens_of([next(stream)])) == 1
        with pytest.raises(StateError, match=r"the engine that took .* over is gone"):
            list(stream)
        assert list(stream) == []
    assert_empty(here, there)


@pytest.mark.parametrize("closed", ["stream", "socket"])
def test_if_nobody_reads_any_more_the_destination_stops(closed):
    here, there = make(), make()
    going_on = threading.Event()

    def work(sock):
        with pytest.raises(StateError, match="connection"):
            stream_back(sock, there, receive_request(sock, there), between=lambda delta: going_on.wait(5))

    with other_side(work) as sock:
        stream, _ = start(here, 1, max_tokens=150)
        send_request(sock, here, stream.result.request_id)
        next(stream)
        (stream if closed == "stream" else sock).close()
        going_on.set()
    assert there.stats().generated_tokens < 10
    assert_empty(here, there)


def test_a_step_that_fails_there_is_an_error_here():
    here, there = make(), make()

    def fail(delta):
        there._executor.fail_next = RuntimeError("on fire")

    with other_side(lambda sock: serve(sock, there, between=fail)) as sock:
        stream, _ = start(here, 2)
        send_request(sock, here, stream.result.request_id)
        next(stream)
        with pytest.raises(StepFailed, match="on fire"):
            next(stream)
    assert_empty(here, there)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"token_ids": [true], "text": "", "logprobs": []}',
        b'{"token_ids": 1, "text": "", "logprobs": []}',
        b'{"token_ids": [], "text": 1, "logprobs": []}',
        b'{"token_ids": [], "text": "", "logprobs": [[1]]}',
        b'{"token_ids": [], "text": "", "logprobs": [[1, 1, [[1]]]]}',
        b'{"token_ids": [], "text": "", "logprobs": [], "finish_reason": "tired"}',
        b'{"token_ids": [], "text": "", "logprobs": [], "finish_reason": []}',
        b'{"token_ids": [], "text": "", "logprobs": [], "error": 1}',
        b'{"token_ids": [], "text": "", "logprobs": [], "reuse": [1, 2, 3, 4, 5]}',
    ],
)
def test_a_nonsensical_delta_ends_the_stream(body):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(HEADER.pack(Kind.DELTA, len(body)) + body)
        [last] = RemoteStream(near, "mine")
        assert last.finish_reason is FinishReason.ERROR and isinstance(last.error, StateError)


# Whatever comes in, nothing but a SegueError goes out, and nothing is left behind


def recorded():
    """What a source sends, frame by frame."""
    here, there = make(), make()
    with other_side(serve, there) as sock:
        stream, _ = start(here, 4)
        send_request(sock, here, stream.result.request_id)
        list(stream)
    return sock.frames


def feed(engine, data, timeout=2.0):
    """What a destination makes of these bytes, and of the end of the connection after them."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        try:
            request_id = receive_request(far, engine, timeout=timeout)
        except SegueError:
            request_id = None
        else:
            if request_id is not None:
                for _ in range(200):
                    if not engine.is_active(request_id):
                        break
                    engine.step()
                engine.abort(request_id)
    engine.step()
    assert_empty(engine)
    engine.forget()
    return request_id


def test_if_the_source_dies_nothing_is_left_at_the_destination():
    frames, there = recorded(), make()
    data = b"".join(frames)
    for length in range(0, len(data), 5):
        assert feed(there, data[:length]) is None
    assert feed(there, data) is not None


def test_damaged_chunks_are_computed_again():
    frames, there = recorded(), make()
    for index in range(1, len(frames) - 1):
        damaged = [bytearray(frame) for frame in frames]
        damaged[index][HEADER.size + 4 + index] ^= 0x10
        computed = there._executor.num_computed
        near, far = socket.socketpair()
        with near, far:
            near.sendall(b"".join(damaged))
            request_id = receive_request(far, there, timeout=2)
            stream_back(far, there, request_id)
            assert Link(near, 2).receive(Kind.WANT) and Link(near, 2).receive(Kind.COMMITTED)
            assert tokens_of(RemoteStream(near, "mine")) == expected(PROMPT, ANSWER)[4:]
        assert there._executor.num_computed - computed == 33 - 4 * (index - 1) + ANSWER - 4
        there.forget()
    assert_empty(there)


@pytest.mark.parametrize("kind", range(10))
def test_an_announced_length_is_not_believed(kind):
    there = make()
    assert feed(there, HEADER.pack(kind, 2**62) + bytes(100)) is None
    hello = recorded()[0]
    assert feed(there, hello + HEADER.pack(kind, 2**62) + bytes(100)) is None


def test_a_source_that_drips_is_not_waited_for():
    there, data = make(), b"".join(recorded())
    near, far = socket.socketpair()
    stop = threading.Event()

    def drip(sock):
        for byte in data:
            if stop.wait(0.02):
                return
            sock.send(bytes([byte]))

    with near, far, ThreadPoolExecutor(1) as thread:
        thread.submit(drip, near)
        began = time.monotonic()
        with pytest.raises(StateError, match="timed out"):
            receive_request(far, there, timeout=0.2)
        assert time.monotonic() - began < 0.4
        stop.set()
    assert_empty(there)


def mutated(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
            case 1:
                data[at : at + rng.randrange(1, 40)] = rng.randbytes(rng.randrange(40))
            case 2:
                del data[at : at + rng.randrange(1, 200)]
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 100)]
    return bytes(data)


def test_mutated_bytes():
    there, rng = make(), random.Random(5)
    frames = recorded()
    boundaries = [sum(map(len, frames[:count])) for count in range(len(frames))]
    data = b"".join(frames)
    outcomes = []
    for _ in range(2000):
        start_at = rng.choice((0, *boundaries))
        outcomes.append(feed(there, data[:start_at] + mutated(data[start_at:], rng)))
    assert outcomes.count(None) > 1000 and len(set(outcomes)) > 1, "some get through: a chunk that is as good as lost"


ODD = (None, True, -1, 0, 1, 3, 40, 2**31, 2**63, 1e300, "", "x", "req-1", [], [[]], [1, 2], {}, {"x": 1}, [[60, 1.0]])


def resealed(frames, rng):
    """The header changed at one place, and all digests made to fit: it has to be refused for what it says."""
    preamble = frames[0][HEADER.size :]
    _, length = struct.unpack_from("<II", preamble, len(MAGIC))
    text, rest = preamble[16 : 16 + length], preamble[16 + length + DIGEST_BYTES :]
    header = json.loads(text)
    place = rng.choice((header, header, header["progress"], header["progress"]["params"], header["layout"]))
    place[rng.choice(sorted(place))] = rng.choice(ODD)
    text = json.dumps(header).encode()
    section = MAGIC + struct.pack("<II", codec.VERSION, len(text)) + text
    tokens = bytearray(rest[:-DIGEST_BYTES])
    if rng.random() < 0.2:
        struct.pack_into("<i", tokens, 4 * rng.randrange(len(tokens) // 4), rng.choice((-1, 49, 50, 2**31 - 1)))
    first = chunk_digest(b"", 0, section)
    digest = chunk_digest(first, 0, tokens)
    body = section + first + tokens + digest
    chunks = []
    for frame in frames[1:-1]:
        index, data = struct.unpack_from("<I", frame, HEADER.size)[0], frame[HEADER.size + 4 : -DIGEST_BYTES]
        chunks.append(frame[:-DIGEST_BYTES] + chunk_digest(digest, index, data))
    return HEADER.pack(Kind.HELLO, len(body)) + body + b"".join(chunks) + frames[-1]


def test_headers_that_lie():
    there, rng, frames = make(), random.Random(6), recorded()
    outcomes = [feed(there, resealed(frames, rng)) for _ in range(1500)]
    assert outcomes.count(None) > 300 and len(set(outcomes)) > 1
