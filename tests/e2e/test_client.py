"""Our own client against real servers: every verb, and a request that moves from one server to another."""

import json
import socket
import time

import pytest

from segue import Engine, SamplingParams
from segue.base.errors import InvalidRequest, SegueError, UnknownState
from segue.client import Client, Completion
from tests.servers import running


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with running("tiny", "--state-dir", str(tmp_path_factory.mktemp("a"))) as first, running("tiny") as second:
        yield first, second


@pytest.fixture(scope="module")
def clients(servers):
    with Client(servers[0].url) as first, Client(servers[1].url) as second:
        yield first, second


@pytest.fixture(autouse=True)
def nothing_is_left(servers):
    yield
    for server in servers:
        server.wait_until(lambda server=server: server.metric("num_requests_running") == 0)
        for state in server.get("/v1/states")[2]["data"]:
            server.post(f"/v1/states/release/{state['id']}")
        server.wait_until(lambda server=server: server.usage() == 0.0)


LONG = {"temperature": 0.8, "seed": 11, "max_tokens": 1500, "ignore_eos": True}


def test_generation_and_the_verbs(clients):
    client, _ = clients
    first = client.complete("A tale", max_tokens=20, temperature=0, ignore_eos=True, hold_seconds=60)
    assert first.state.num_held == first.state.num_tokens - 1
    *pieces, streamed = client.stream("A tale", max_tokens=20, temperature=0, ignore_eos=True)
    assert "".join(pieces) == streamed.text == first.text
    assert streamed.usage["completion_tokens"] == 20
    child = client.fork(first.state.id, at=12, hold_seconds=30)
    assert (child.num_tokens, child.num_held) == (12, 12)
    assert client.hold(child.id).expires_in is None
    assert client.save(child.id, "kept") > 0 and client.saved() == ["kept"]
    assert client.release(child.id).num_held == 0
    assert client.load("kept").num_held == 12
    assert {state.id for state in client.states()} >= {first.state.id, child.id}
    assert client.state(first.state.id).num_tokens == first.state.num_tokens
    with pytest.raises(UnknownState):
        client.state("none")
    with pytest.raises(InvalidRequest, match="max_tokens") as refused:
        client.complete("x", max_tokens=0)
    assert refused.value.field == "max_tokens"


def test_a_stream_is_cut_into_lines_at_newlines_alone(clients):
    """Python's own idea of a line ends at these too, and they stand in JSON as they are."""
    text = "a\u2028b\u2029c\u0085d\x0be\nf"
    *pieces, whole = clients[0].stream(text, max_tokens=1, temperature=0, echo=True)
    assert "".join(pieces) == whole.text and whole.text.startswith(text)


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [("a", {"n": 2}, "n"), (["a", "b"], {}, "prompt"), (["a"], {}, "prompt"), ([[1], [2]], {}, "prompt")],
)
def test_what_has_several_answers_is_not_sent(prompt, fields, field):
    with Client("http://127.0.0.1:1") as client:  # nobody is there
        for ask in (client.complete, client.stream):
            with pytest.raises(InvalidRequest, match="one answer") as refused:
                ask(prompt, **fields)
            assert refused.value.field == field


def text_of(lines):
    """What an event stream says."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_request_moves_between_servers_without_a_break(clients, servers):
    source, destination = clients
    expected = source.complete("Once", **LONG).text
    body = {"prompt": "Once", "stream": True, **LONG}
    with source._http.stream("POST", "/v1/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        moved = source.move(request_id, destination)
        rest = list(moved)
        before = list(response.iter_lines())
    whole = rest[-1]
    assert isinstance(whole, Completion) and whole.finish_reason == "length"
    assert any('"finish_reason":"moved"' in line for line in before)
    assert len(whole.text) > 100
    assert text_of(before) + whole.text == expected


def test_a_move_that_fails_leaves_the_request_where_it_is(clients, servers):
    source, destination = clients
    body = {"prompt": "Once", "stream": True, **LONG, "cache_salt": "mine"}
    expected = source.complete("Once", **LONG).text
    with source._http.stream("POST", "/v1/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        with pytest.raises(SegueError):  # another scope does not see it
            list(source.move(request_id, destination))
        path = f"/v1/requests/{request_id}/export"
        status, _, _ = servers[0].request("POST", f"{path}?cache_salt=mine", raw=b"")
        assert status == 200
        assert servers[0].request("POST", f"{path}/abort", raw=b"")[0] == 400  # not without the salt
        assert servers[0].request("POST", f"{path}/abort?cache_salt=mine", raw=b"")[0] == 200
        assert text_of(response.iter_lines()) == expected


def test_a_request_whose_importer_leaves_ends(clients, servers):
    """Whether it goes before the request has arrived in the engine, or right after."""
    source, _ = clients
    with source._http.stream("POST", "/v1/completions", json={"prompt": "Once", "stream": True, **LONG}) as response:
        request_id = response.headers["x-request-id"]
        data = source._http.post(f"/v1/requests/{request_id}/export").content
        head = (
            f"POST /v1/requests/import?stream=true&hold_seconds=900 HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}"
        )
        for pause in (0.0, 0.0, 0.002, 0.01):
            with socket.create_connection(("127.0.0.1", int(servers[1].url.rsplit(":", 1)[1]))) as leaving:
                leaving.sendall(head.encode() + b"\r\n\r\n" + data)
                time.sleep(pause)
        with socket.create_connection(("127.0.0.1", int(servers[1].url.rsplit(":", 1)[1]))) as leaving:
            leaving.sendall(head.encode() + b"\r\n\r\n" + data[: len(data) // 2])
        source._http.post(f"/v1/requests/{request_id}/export/abort")
        servers[1].wait_until(lambda: servers[1].metric("num_requests_running") == 0, seconds=3)
        assert not any(state["num_held"] for state in servers[1].get("/v1/states")[2]["data"])


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x89SGU\r\n\x1a\n" + b"\0" * 100])
def test_what_is_no_request_is_not_imported(servers, data):
    status, _, answer = servers[1].request("POST", "/v1/requests/import", raw=data)
    assert status == 400 and "/" not in answer["error"]["message"]


def test_the_client_and_the_engine_agree(clients):
    with Engine("tiny") as engine:
        expected = engine.generate("same", SamplingParams(max_tokens=9, temperature=0))[0].text
    assert clients[0].complete("same", max_tokens=9, temperature=0).text == expected
