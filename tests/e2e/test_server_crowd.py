"""Many streams at once, some of whose clients leave: the others get all of their answer, and nothing is left behind."""

import asyncio
import json
import random
import time

import pytest

from tests.servers import running

FIELDS = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with running(
        "tiny", "--quiet", "--num-blocks", "4000"
    ) as started:  # every page is written soon: memory is flat then
        yield started


def resident(pid):
    """Bytes of memory a process has."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


async def one(server, prompt, leave_after):
    """The text of a stream; None if its client left."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(FIELDS | {"prompt": prompt}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    received = b""
    try:
        while b"[DONE]" not in received:
            piece = await asyncio.wait_for(reader.read(65536), 120)
            assert piece, "the server closed a stream"
            received += piece
            if leave_after is not None and received.count(b"data: ") > leave_after:
                writer.transport.abort()
                return None
    finally:
        writer.close()
    assert b"200 OK" in received.split(b"\r\n", 1)[0]
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["text"] for event in events)


async def crowd(server, num_streams, seconds, seed):
    """That many clients at a time, one after the other, a third of whom leave early; how many were answered."""
    rng = random.Random(seed)
    expected, deadline = {}, time.monotonic() + seconds
    answered = 0

    async def client():
        nonlocal answered
        while time.monotonic() < deadline:
            prompt = f"prompt {rng.randrange(50)} " * rng.randrange(1, 8)
            leave_after = rng.randrange(0, 50) if rng.random() < 0.3 else None
            text = await one(server, prompt, leave_after)
            if text is not None:
                assert expected.setdefault(prompt, text) == text
                answered += 1

    await asyncio.gather(*(client() for _ in range(num_streams)))
    return answered


def settled(server):
    server.wait_until(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0, 60)
    assert server.usage() == 0.0
    assert server.post("/v1/check")[0] == 200
    assert server.get("/health")[2]["restarts"] == 0


def test_a_crowd_in_which_some_leave(server):
    assert asyncio.run(crowd(server, 40, 6, seed=1)) > 40
    settled(server)
    assert server.metric("requests_total", outcome="aborted") > 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_minutes_of_two_hundred_streams(server):
    asyncio.run(crowd(server, 200, 20, seed=2))
    settled(server)
    pids = server.process.pid, server.engine_pid()
    before = [resident(pid) for pid in pids]
    assert asyncio.run(crowd(server, 200, 120, seed=3)) > 400
    settled(server)
    for pid, size in zip(pids, before, strict=True):
        assert resident(pid) < size + 32 * 2**20
