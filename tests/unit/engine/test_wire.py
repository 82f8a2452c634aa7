"""Requests that move over a socket: the answer is the same, and whoever dies, nothing is lost and nothing leaks."""

import socket
import threading
import time

import pytest

from segue.base.errors import NoRoom, RequestTooLong, SnapshotError, StateError, StepFailed
from segue.base.types import FinishReason
from segue.engine import EngineCore, TokenLogprobs
from segue.engine.frames import HEADER, Kind, Link
from segue.engine.wire import RemoteStream, receive_request, send_request, stream_back
from segue.state.codec import DIGEST_BYTES
from tests.fakes import FakeExecutor, cut_chunks, expected
from tests.wires import ANSWER, PROMPT, assert_empty, make, other_side, params, serve, start, tokens_of


@pytest.fixture(autouse=True)
def one_block_per_chunk(monkeypatch):
    cut_chunks(monkeypatch, 1)


class WithLogprobs(FakeExecutor):
    def execute(self, plan):
        result = super().execute(plan)
        for place, token in enumerate(result.tokens):
            result.logprobs[place] = TokenLogprobs(-0.25 * token, 1, ((token, -0.25 * token), (3, float("-inf"))))
        return result


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
        for _ in range(2):
            with pytest.raises(error, match=why):
                send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert_empty(here, there)


@pytest.mark.parametrize("ended", [False, True])
def test_an_id_that_is_taken_there_becomes_another(ended):
    here, there = make(), make()
    other = there.stream([5, 6], params(), request_id="mine")
    for _ in range(ANSWER if ended else 3):
        next(other)
    with other_side(serve, there) as sock:
        stream = here.stream(PROMPT, params(), request_id="mine")
        deltas = [next(stream)]
        assert (send_request(sock, here, "mine") == "mine") is ended
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    list(other)
    assert other.result.token_ids == expected([5, 6], ANSWER)
    assert_empty(here, there)


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


def test_a_silent_destination_is_waited_for_no_longer_than_the_timeout():
    here = make()

    def say_nothing(sock):
        while sock.recv(2**16):
            pass

    with other_side(say_nothing) as sock:
        stream, deltas = start(here, 2)
        began = time.monotonic()
        with pytest.raises(StateError, match="timed out"):
            send_request(sock, here, stream.result.request_id, timeout=0.1)
        assert time.monotonic() - began < 2
        sock.outcome.result(5)  # it was told that nothing more will come
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


class NoWayBack(socket.socket):
    """The connection breaks at the very last moment."""

    def sendall(self, data, flags=0):
        if data[0] == Kind.COMMITTED:
            raise ConnectionResetError("gone")
        super().sendall(data, flags)


def test_if_the_last_word_does_not_arrive_the_source_has_the_request():
    here, there = make(), make()

    def work(sock):
        with pytest.raises(StateError, match="gone"), NoWayBack(fileno=sock.detach()) as broken:
            receive_request(broken, there)

    with other_side(work) as sock:
        stream, deltas = start(here, 2)
        with pytest.raises(StateError, match="connection"):
            send_request(sock, here, stream.result.request_id)
        deltas += stream
    assert tokens_of(deltas) == expected(PROMPT, ANSWER)
    assert there.has_work is False
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
        sock.outcome.result(5)
    assert there.stats().generated_tokens < 10
    assert_empty(here, there)


def test_one_that_is_aborted_there_ends_here():
    here, there = make(), make()
    with other_side(lambda sock: serve(sock, there, between=lambda delta: there.abort(delta.request_id))) as sock:
        stream, _ = start(here, 2)
        send_request(sock, here, stream.result.request_id)
        assert [delta.finish_reason for delta in stream] == [None, FinishReason.ABORT]
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
