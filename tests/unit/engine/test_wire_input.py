"""Whatever the other side sends, nothing but a SegueError comes of it, and nothing is left behind."""

import json
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from segue.base.errors import SegueError, SnapshotError, StateError
from segue.base.types import FinishReason
from segue.engine.frames import HEADER, Kind, Link
from segue.engine.wire import RemoteStream, receive_request, send_request, stream_back
from segue.state import codec
from segue.state.codec import DIGEST_BYTES, MAGIC, chunk_digest
from tests.fakes import cut_chunks, expected
from tests.wires import ANSWER, PROMPT, assert_empty, make, other_side, serve, start, tokens_of


@pytest.fixture(autouse=True)
def one_block_per_chunk(monkeypatch):
    cut_chunks(monkeypatch, 1)


# To a source

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
    assert sock.kinds == [Kind.HELLO]
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here)


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
        b'{"token_ids": [], "text": "", "logprobs": [], "reuse": [1, 2, 3, 4, 5, 6]}',
    ],
)
def test_a_nonsensical_delta_ends_the_stream(body):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(HEADER.pack(Kind.DELTA, len(body)) + body)
        [last] = RemoteStream(near, "mine")
        assert last.finish_reason is FinishReason.ERROR and isinstance(last.error, StateError)
        assert far.recv(1) == b"", "the other side is told to stop"


# To a destination


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


def test_a_hello_with_something_behind_it_is_refused():
    preamble = recorded()[0][HEADER.size :] + b"more"
    near, far = socket.socketpair()
    with near, far:
        near.sendall(HEADER.pack(Kind.HELLO, len(preamble)) + preamble)
        assert receive_request(far, make(), timeout=5) is None
        assert "4 bytes follow" in Link(near, 5).receive(Kind.REFUSED)[1]["message"]


def test_chunks_come_in_order():
    hello, first, second, *rest = recorded()
    for frames in ((hello, second, first, *rest), (hello, second, *rest), (hello, first, first, second, *rest)):
        assert feed(make(), b"".join(frames)) is None


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
@pytest.mark.parametrize("after_hello", [False, True])
def test_an_announced_length_is_not_believed(kind, after_hello):
    """It is refused at once, not when the bytes do not come."""
    there = make()
    near, far = socket.socketpair()
    with near, far:
        near.sendall((recorded()[0] if after_hello else b"") + HEADER.pack(kind, 2**62) + bytes(100))
        with pytest.raises(SnapshotError, match=f"kind {kind} with {2**62} bytes"):
            receive_request(far, there, timeout=60)
    assert_empty(there)


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
        assert time.monotonic() - began < 2
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
