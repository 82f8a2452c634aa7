"""Whatever is sent to it, a server goes on: no 5xx, no hang, nothing that leaks, and no stack trace in an answer."""

import contextlib
import http.client
import itertools
import json
import random
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
import schemathesis
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from segue.server import failures
from segue.server.door import Door
from segue.server.fields import TokenizeBody
from segue.server.protocol import limited
from segue.server.service import Limits
from segue.server.tenants import Tenants
from tests.servers import running

NUM_BODIES = 5000
HEAD_SECONDS = 3
PATIENCE = 60  # seconds after which something hangs, on however busy a machine
MAX_REQUESTS = 256
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--quiet", "--max-model-len", "512", "--max-requests", str(MAX_REQUESTS))
    options += ("--head-seconds", str(HEAD_SECONDS), "--state-dir", str(tmp_path_factory.mktemp("states")))
    with running("tiny", *options, env={"OMP_NUM_THREADS": "1"}) as started:  # two would spin, and keep our cores
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.wait_until(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    for state in server.get("/v1/states")[2]["data"]:
        if state["num_held"]:
            server.post(f"/v1/states/release/{state['id']}")
    server.wait_until(lambda: server.usage() == 0.0)  # what another `cache_salt` holds ends by itself
    status, _, health = server.get("/health")
    assert (status, health["restarts"]) == (200, 0)
    everything = {"prompt": ["x", "y"], "n": MAX_REQUESTS // 2, "max_tokens": 1}
    server.wait_until(lambda: server.post("/v1/completions", everything)[0] == 200)  # no place is taken for ever


# What an answer may be


def check_answer(status, body, what, content_type="application/json"):
    """`what` was sent; it is shown if its answer is not one that we promise."""
    shown = f"{what!r:.600}\n-> {status} {body[:600]!r}"
    assert 200 <= status < 500, shown
    assert b"Traceback" not in body and b'File "' not in body and b'"server_error"' not in body, shown
    if status >= 400:
        assert content_type.startswith("application/json"), shown
        message = json.loads(body)["error"]["message"]
        assert isinstance(message, str) and message, shown
        place = re.search(r"/(work|home|usr|tmp|root|var|opt|proc)/|site-packages|\.py\b", message)
        assert place is None or place.group() in urllib.parse.unquote(repr(what)), (
            shown
        )  # it may repeat what it was told


class Sender:
    """Requests over a connection that is kept for as long as the server keeps it."""

    def __init__(self, url):
        self._place = urllib.parse.urlsplit(url)
        self._connection = None

    def send(self, method, path, body=None, headers=JSON):
        for attempt in (1, 2):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._place.hostname, self._place.port, timeout=PATIENCE)
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                answer = response.status, response.read(), response.headers.get("content-type", "")
            except (http.client.RemoteDisconnected, ConnectionError):
                self.close()
                if attempt == 2:  # a kept connection may have ended meanwhile, a new one must not
                    raise
                continue
            if response.will_close:
                self.close()
            return answer
        raise AssertionError("unreachable")

    def close(self):
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connect(server, timeout=PATIENCE):
    place = urllib.parse.urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=timeout)


def reset(sock):
    """Ends a connection as a client that crashes does: no goodbye, and what was sent to it is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def heard(sock):
    """All that comes until the other side ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            data += part
    return data


def answers_in(data):
    """The status and body of each answer in what a connection said."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(re.match(rb"HTTP/1\.1 (\d{3}) ", head)[1])
        length = re.search(rb"content-length: (\d+)", head)
        size = int(length[1]) if length else 0 if status < 200 else len(rest)
        found += [(status, rest[:size])] if status >= 200 else []
        data = rest[size:]
    return found


def head_of(path, *lines, method="POST"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: here", *lines, "", ""]).encode()


def post_of(path, body, *lines):
    data = json.dumps(body).encode()
    return head_of(path, "content-type: application/json", f"content-length: {len(data)}", *lines) + data


# Malformed bodies

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["zz"], "logit_bias": {"5": 1.5}}
STATE = {"job_id": "j", "hold_seconds": 0.01, "priority": 1, "cache_salt": "s"}
VALID = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 3, "n": 2, **SAMPLING, **STATE}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "stop_token_ids": [1]}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "extra_body": {"hold_seconds": 0.01, "job_id": "k"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"continuation_of": "STATE", "continuation_suffix": "and", "fork_at": 3, "max_tokens": 2}),
    ("/v1/completions", {"continuation_of": "STATE", "continuation_token_ids": [5], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **SAMPLING}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES[:2],
            "max_completion_tokens": 3,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"thinking": False},
            "stream": True,
            **STATE,
        },
    ),
    ("/v1/responses", {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 3, "metadata": {"a": "b"}}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "2"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "max_output_tokens": 3,
            "stream": True,
        },
    ),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": False}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 300]}),
    ("/v1/states/fork/STATE", {"at": 3, "hold_seconds": 0.01, "cache_salt": ""}),
    ("/v1/states/hold/STATE", {"seconds": 5.0, "cache_salt": ""}),
    ("/v1/states/release/STATE", {"cache_salt": ""}),
    ("/v1/states/save/STATE", {"name": "kept", "cache_salt": ""}),
    ("/v1/states/load", {"name": "kept", "hold_seconds": 0.01, "cache_salt": ""}),
]
# Values as they stand in JSON's text, since some of these can be written there and nowhere else. None is a number that would
# be a valid count of answers: then they might be too many for the server, which is a 503.
VALUES = [
    b"null", b"true", b"false", b"[]", b"{}", b'""', b"0", b"-0", b"-1", b"1", b"0.1", b"-0.0", b"1e-400", b"1e999",
    b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"2147483648", b"-2147483649", b"9223372036854775808",
    b"18446744073709551616", b"1" + b"0" * 400, b"-1" + b"0" * 400, b"9" * 5000, b"1e308", b'"x"', b'"1"', b"[null]",
    b"[1, 2]", b"[[1], [2]]", b'["a"]', b'[""]', b"[-1]", b"[1e3]", b"[4294967296]", b'{"a": 1}', b'{"": null}',
    b'{"type": "text"}', b'[{"type": "text", "text": 5}]', b'[{"role": "user"}]', b'[{"type": "image_url"}]',
    b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"a\\u0000b"', b'{"\\ud800": "\\ud800"}', b'{"\\u0000": 1}',
    b'"' + b"a" * 100_000 + b'"', b'["' + b"b" * 100_000 + b'"]', b'"' + "é€😀".encode() * 100 + b'"',
    b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b"\xff", b"[" * 10_000 + b"]" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b"[" * 10_000, b"[" * 300 + b"]" * 300, b"[" * 900 + b"]" * 900,
    b'{"a":' * 900 + b"1" + b"}" * 900, b'"../../etc/passwd"', b'"{{ 7 * 7 }}"', b'"<|im_end|>"', b"'x'", b"undefined",
    b"01", b"1.", b".5", b"+1", b"0x10", b"//", b"[1,]", b'"\n"', b'"\\x"', b'"\\u12"', b'"open',
]  # fmt: skip
TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=utf-16",
         "application/", "json", "", "application/xml", "a" * 1000, "application/vnd.x+json", "\xff/\xfe"]  # fmt: skip


def nodes(value, path=()):
    """Where every value in a body stands."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in inner:
        yield from nodes(child, (*path, name))


def changed(body, path, change):
    """`body` as JSON, with another text in the place of one of its values."""
    if not path:
        return change(json.dumps(body).encode())
    copy = json.loads(json.dumps(body))
    parent = copy
    for name in path[:-1]:
        parent = parent[name]
    kept = json.dumps(parent[path[-1]]).encode()
    parent[path[-1]] = "@here@"
    return json.dumps(copy).encode().replace(b'"@here@"', change(kept), 1)


def with_a_wrong_value(rng, body):
    return changed(body, rng.choice(list(nodes(body))), lambda _: rng.choice(VALUES))


def with_wrong_values(rng, body):
    for _ in range(2):
        body = {
            **body,
            rng.choice(list(body)): rng.choice(["x", None, [], {}, -1, 0, 1.5, True, [[]], "\ud800", 2**80]),
        }
    return json.dumps(body).encode()


def with_a_wrong_name(rng, body):
    name = json.dumps(rng.choice(list(body))).encode()
    other = rng.choice(
        [b'"extra_body"', b'""', b'"\\ud800"', b'"__class__"', b'"\xff"', b'"' + b"k" * 9000 + b'"', b"5"]
    )
    return json.dumps(body).encode().replace(name, other, 1)


def with_more_fields(rng, body):
    name = rng.choice([*body, "extra_body", "unknown", "\ud800", "self", "model_config", "n" * 5000])
    more = b"%b: %b" % (json.dumps(name).encode(), rng.choice(VALUES))
    whole = json.dumps(body).encode()
    return whole[:-1] + b", " + more + b"}" if rng.random() < 0.5 else b"{" + more + b", " + whole[1:]


def with_less(rng, body):
    return json.dumps({name: value for name, value in body.items() if rng.random() < 0.6}).encode()


def cut_short(rng, body):
    whole = json.dumps(body).encode()
    return whole[: rng.randrange(len(whole))]


def with_flipped_bits(rng, body):
    whole = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([1, 1, 2, 8])):
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(whole)


def with_strange_bytes(rng, body):
    whole = json.dumps(body).encode()
    at = rng.randrange(len(whole) + 1)
    return (
        whole[:at]
        + rng.choice([b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b",", b'"', b"\\", b"}", b"\n"])
        + whole[at:]
    )


def in_another_encoding(rng, body):
    text = json.dumps(body, ensure_ascii=False)
    return rng.choice(
        [b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), text.encode("utf-32-le"), text.encode("utf-7"),
         (text * 2).encode(), b"\x1f\x8b\x08" + rng.randbytes(50), rng.randbytes(200), b"", b" " * 1000, b"\x00" * 1000,
         f"[{text}]".encode(), json.dumps(text).encode(), b"null", b"3", b"[]", b'"x"', b"true", b"{" * 5000]
    )  # fmt: skip


MUTATIONS = [
    *[with_a_wrong_value] * 6, *[with_wrong_values] * 2, with_a_wrong_name, with_more_fields, with_less, cut_short,
    with_flipped_bits, with_strange_bytes, in_another_encoding,
]  # fmt: skip


def malformed(seed, count):
    """Path, body and headers of requests that are wrong in some way; a few turn out to be right."""
    rng = random.Random(seed)
    for number in range(count):
        path, body = VALID[number % len(VALID)]
        data = rng.choice(MUTATIONS)(rng, body)
        headers = dict(JSON)
        if rng.random() < 0.04:
            headers["content-type"] = rng.choice(TYPES)
        if rng.random() < 0.02:
            headers["content-encoding"] = rng.choice(["gzip", "br", "nonsense"])
        yield path, data, headers


def test_malformed_bodies(server):
    state = server.post("/v1/completions", {"prompt": "to go on from", "max_tokens": 4, "hold_seconds": 60})[2]["id"]
    server.post(f"/v1/states/save/{state}", {"name": "kept"})
    local = threading.local()

    def one(request):
        path, data, headers = request
        if not hasattr(local, "sender"):
            local.sender = Sender(server.url)
        data = data.replace(b"STATE", state.encode())
        status, answer, kind = local.sender.send("POST", path.replace("STATE", state), data, headers)
        check_answer(status, answer, (path, data, headers), kind)
        return path, status

    with ThreadPoolExecutor(4) as pool:
        counts = Counter(pool.map(one, malformed(1, NUM_BODIES)))
    refused = sum(count for (_, status), count in counts.items() if status >= 400)
    assert counts.total() == NUM_BODIES and refused > NUM_BODIES // 2, counts
    assert all(counts[path, 200] and counts[path, 400] for path, _ in VALID), counts


def test_the_bodies_they_are_made_from_are_valid(server):
    """Or else mutations would show nothing."""
    state = server.post("/v1/completions", {"prompt": "to go on from", "max_tokens": 4, "hold_seconds": 60})[2]["id"]
    sender = Sender(server.url)
    server.post(f"/v1/states/save/{state}", {"name": "kept"})
    for path, body in VALID:
        data = json.dumps(body).replace("STATE", state).encode()
        status, answer, _ = sender.send("POST", path.replace("STATE", state), data)
        assert status == 200, (path, body, answer)


def test_more_answers_than_the_server_ever_gives_are_the_clients_mistake(server):
    assert server.post("/v1/completions", {"prompt": ["x"] * 3, "n": 128, "max_tokens": 1})[0] == 400


# Methods and paths


def test_wrong_methods(server):
    sender = Sender(server.url)
    paths = server.get("/openapi.json")[2]["paths"]
    assert len(paths) >= 15
    for path, operations in paths.items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND"):
            if method.lower() in operations:
                continue
            status, answer, kind = sender.send(method, re.sub(r"\{.*?\}", "x", path), b"" if method == "POST" else None)
            assert status in (404, 405), (method, path, status)
            if method != "HEAD":
                check_answer(status, answer, (method, path), kind)


STRANGE = ["%00", "..%2f..", "../..", "%2e%2e/%2e%2e", "a" * 8000, "%ff%fe", "%ED%A0%80", "%", "%zz", "%25", "%0d%0aX:%20y", "",
           "/", "//", ";", "a%20b", "%F0%9F%98%80", "{state_id}", "*", "x?cache_salt=%00", "x?cache_salt=%ff&cache_salt=b",
           "x?" + "a=1&" * 5000, "x?cache_salt=" + "a" * 257, "x#fragment", "None", "-1", "__proto__"]  # fmt: skip


@pytest.mark.parametrize("prefix", ["/", "/v1/", "/v1/states/", "/v1/states/hold/", "/v1/states/save/", "/v1/responses/",
                                    "/v1/models/", "//", "/docs/"])  # fmt: skip
def test_strange_paths(server, prefix):
    sender = Sender(server.url)
    for rest, method in itertools.product(STRANGE, ("GET", "POST", "DELETE")):
        status, answer, kind = sender.send(method, prefix + rest, b"{}" if method == "POST" else None)
        check_answer(status, answer, (method, prefix + rest), kind)
        assert status >= 300 or prefix + rest in ("//",), (method, prefix + rest, status)


# Bytes that are not quite HTTP

CHUNKED = ("content-type: application/json", "transfer-encoding: chunked")
CLOSE = "connection: close"
RAW = {
    "nothing of HTTP": (b"\x00\x01\x02\x03\xff", {400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "an unknown method": (head_of("/health", method="BREW"), {400}),
    "CONNECT": (b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n\r\n", {400, 404, 405}),
    "a URL of bytes": (b"GET /v1/states/\xff\xfe?\xff HTTP/1.1\r\nhost: here\r\n\r\n", {400}),
    "a URL of spaces": (b"GET /a b c HTTP/1.1\r\nhost: here\r\n\r\n", {400}),
    "a null byte in a header": (b"GET /health HTTP/1.1\r\nhost: he\x00re\r\n\r\n", {400}),
    "a header without a name": (b"GET /health HTTP/1.1\r\n: here\r\n\r\n", {400}),
    "a long URL": (head_of("/" + "a" * 100_000, method="GET"), {431}),
    "a long header": (head_of("/health", "x: " + "a" * 100_000, method="GET"), {431}),
    "a header without end": (b"GET /health HTTP/1.1\r\nx: " + b"a" * 1_000_000, {431}),
    "many headers": (head_of("/health", *(f"x-{number}: {number}" for number in range(10_000)), method="GET"), {431}),
    "a head that is just not too long": (head_of("/health", "x: " + "a" * 60_000, CLOSE, method="GET"), {200}),
    "a host that is none": (b"GET /v1/completions/ HTTP/1.1\r\nhost: [\r\nconnection: close\r\n\r\n", {307, 400, 404, 405}),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", {200}),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\nhost: here\r\n\r\n", {400, 505}),
    "no version": (b"GET /health\r\n\r\n", {200, 400}),
    "a huge length": (head_of("/tokenize", f"content-length: {10**12}") + b"{", {413}),
    "a length beyond numbers": (head_of("/tokenize", f"content-length: {10**40}") + b"{", {400}),
    "a negative length": (head_of("/tokenize", "content-length: -5") + b"{}", {400}),
    "two lengths": (head_of("/tokenize", "content-length: 2", "content-length: 3") + b"{} ", {400}),
    "a length and chunks": (head_of("/tokenize", *CHUNKED, "content-length: 2") + b"2\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk of no size": (head_of("/tokenize", *CHUNKED) + b"zz\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk of negative size": (head_of("/tokenize", *CHUNKED) + b"-1\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk of huge size": (head_of("/tokenize", *CHUNKED) + b"f" * 18 + b"\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk that goes on": (head_of("/tokenize", *CHUNKED) + b"2\r\n{}oops\r\n0\r\n\r\n", {400}),
    "chunks": (head_of("/tokenize", *CHUNKED, CLOSE) + b'10;x=y\r\n{"prompt": "two"\r\n1\r\n}\r\n0\r\na: b\r\n\r\n', {200}),
    "an unknown coding": (head_of("/tokenize", "transfer-encoding: gzip", CLOSE) + b"{}", {400}),
    "a body that is not expected": (head_of("/health", "content-length: 2", CLOSE, method="GET") + b"{}", {200}),
    "a continuation that is asked for": (post_of("/tokenize", {"prompt": "x"}, CLOSE, "expect: 100-continue"), {200}),
    "a web socket": (head_of("/tokenize", "connection: upgrade, close", "upgrade: websocket", method="GET") + b"x", {405}),
    "a body and then garbage": (post_of("/v1/completions", {"prompt": "x", "max_tokens": 300}) + b"\x00garbage", {200, 400}),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_not_quite_http(server, name):
    data, expected = RAW[name]
    with connect(server) as sock:
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it is sent
            sock.sendall(data)
        answers = answers_in(heard(sock))
    assert answers or len(data) > 1 << 16, name  # a connection that ends with bytes unread may take its answer with it
    assert len(answers) <= 1 or name == "a body and then garbage", answers
    for status, body in answers:
        if status != 505:
            check_answer(status, body, data)
        assert status in expected, (name, answers)


def test_a_body_over_the_limit_in_chunks(server):
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connect(server) as sock:
        sock.sendall(head_of("/v1/completions", *CHUNKED) + chunk * 34)
        answers = answers_in(heard(sock))
    assert [status for status, _ in answers] == [413], answers


def test_pipelined_requests_are_answered_in_their_order(server):
    sent = [post_of("/tokenize", {"prompt": "x" * number}) for number in range(1, 21)]
    with connect(server) as sock:
        sock.sendall(b"".join(sent) + head_of("/health", CLOSE, method="GET"))
        answers = answers_in(heard(sock))
    assert [status for status, _ in answers] == [200] * 21
    counts = [json.loads(body)["count"] for _, body in answers[:-1]]
    assert counts == list(range(counts[0], counts[0] + 20))


# Clients that leave


LONG = {"prompt": "for ever", "max_tokens": 400, "ignore_eos": True}
ENDLESS = LONG | {"stream": True, "n": 50, "logprobs": 20}  # more than sockets hold: it ends only if somebody reads


def test_connections_that_are_cut(server):
    rng = random.Random(2)
    paths = [("/v1/completions", LONG), ("/v1/chat/completions", {"messages": MESSAGES[:1], "max_tokens": 300}),
             ("/v1/responses", {"input": "on", "max_output_tokens": 300})]  # fmt: skip
    before = server.metric("requests_total", outcome="aborted") or 0
    for number in range(100):
        path, body = paths[number % 3]
        data = post_of(path, body | {"stream": rng.random() < 0.8, "hold_seconds": 60})
        sock = connect(server)
        sock.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        time.sleep(rng.choice([0, 0, 0.001, 0.01, 0.03]))
        if rng.random() < 0.3:
            sock.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                sock.recv(rng.choice([1, 100, 10_000]))
        reset(sock) if rng.random() < 0.8 else sock.close()
    server.wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("requests_total", outcome="aborted") > before


def test_a_cut_ends_the_request_before_a_pipelined_one(server):
    """uvicorn tells only the last request of a connection that its client is gone."""
    before = server.metric("requests_total", outcome="aborted") or 0
    with connect(server) as sock:
        sock.sendall(post_of("/v1/completions", ENDLESS) + head_of("/health", method="GET"))
        assert sock.recv(100)
        reset(sock)
    server.wait_until(lambda: (server.metric("requests_total", outcome="aborted") or 0) > before)


def test_clients_that_read_nothing_do_not_stop_others(server):
    large = post_of("/detokenize", {"tokens": [5] * 400_000})  # its answer is larger still
    socks = [connect(server) for _ in range(2)]
    for number, sock in enumerate(socks):
        sock.sendall(large * 2 * number + post_of("/v1/completions", ENDLESS))
    for _ in range(10):
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    for sock in socks:
        reset(sock)


# Clients that are slow


def test_slow_clients_do_not_stop_others_and_are_sent_away(server):
    body = post_of("/v1/completions", {"prompt": "x" * 100, "max_tokens": 1})
    half = [b"", b"GET /hea", head_of("/health", "x: y", method="GET")[:-4], body[: len(body) - 50]]
    socks = [connect(server) for _ in range(100)]
    for number, sock in enumerate(socks):
        sock.sendall(half[number % 4])
    for number in range(20):
        assert server.get("/health")[0] == 200
        assert server.post("/v1/completions", {"prompt": f"{number}", "max_tokens": 1})[0] == 200
    for number, sock in enumerate(socks):
        if number % 4 != 3:
            statuses = [status for status, _ in answers_in(heard(sock))]
            assert statuses == ([408] if number % 4 else []), "an answer to what was not asked"
        sock.close()


def test_a_byte_now_and_then_gains_no_time(server):
    """Neither in a first request, nor after one, nor in a body that nobody waits for."""
    one_more = {
        b"\r\n": b"\r\n",
        b"GET /health HTTP/1.1\r\nx: ": b"a",
        head_of("/health", method="GET"): b"\r\n",
        head_of("/health", "content-length: 1000000", method="GET"): b"a",
    }
    slow = {connect(server): more for more in one_more.values()}
    for sock, start in zip(slow, one_more, strict=True):
        sock.sendall(start)
    deadline = time.monotonic() + PATIENCE
    while slow:
        assert time.monotonic() < deadline, slow
        for sock, more in list(slow.items()):
            with contextlib.suppress(ConnectionError):
                if not has_ended(sock):
                    sock.sendall(more)
                    continue
            del slow[sock]
            sock.close()


def has_ended(sock):
    """Whether the other side has ended the connection; what it said before is dropped."""
    sock.settimeout(0.05)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    return True


# The same door and connections with small limits


@contextlib.contextmanager
def small_server(limits):
    """No engine: a route with a body, behind the real door, on real connections."""
    app = FastAPI()
    failures.install(app)
    app.add_middleware(Door, tenants=Tenants({}), limits=limits)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> str:
        return body.prompt

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        return StreamingResponse(itertools.repeat(b"x" * 100_000))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, http=limited(limits), lifespan="off", ws="none", log_config=None, access_log=False,
                                timeout_keep_alive=PATIENCE)  # fmt: skip
        made = uvicorn.Server(config)
        made.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=made.run, args=([listening],))
        thread.start()
        try:
            yield made
        finally:
            made.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_body_that_does_not_come_is_given_up():
    whole = post_of("/tokenize", {"prompt": "x" * 100})
    with small_server(Limits(body_seconds=0.3)) as server:
        for data in (whole[:-20], head_of("/tokenize", *CHUNKED) + b"2\r\n{"):
            with connect(server) as sock:
                sock.sendall(data)
                [(status, body)] = answers_in(heard(sock))
            assert status == 408
            check_answer(status, body, data)


def test_a_body_that_is_too_large_is_given_up():
    with small_server(Limits(max_body_bytes=1000)) as server:
        declared = post_of("/tokenize", {"prompt": "x" * 1000})
        chunked = head_of("/tokenize", *CHUNKED) + (b"200\r\n" + b" " * 512 + b"\r\n") * 2
        for data in (declared, chunked):
            with connect(server) as sock:
                sock.sendall(data)
                [(status, body)] = answers_in(heard(sock))
            assert status == 413
            check_answer(status, body, data)
        status, _, _ = Sender(server.url).send("POST", "/tokenize", json.dumps({"prompt": "x" * 900}))
        assert status == 200


def test_a_client_that_reads_nothing_is_given_up_and_a_slow_one_is_not():
    with small_server(Limits(stall_seconds=1.0)) as server, connect(server) as sock:
        sock.sendall(head_of("/endless", method="GET"))
        began = last = time.monotonic()
        while last < began + 3 and time.monotonic() < last + 0.5:  # we may be too slow ourselves, which shows nothing
            last = time.monotonic()
            assert sock.recv(1 << 20)
            time.sleep(0.1)
        server_side = server.server_state.connections
        deadline = time.monotonic() + PATIENCE
        while server_side:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_connections_over_the_limit_are_closed():
    with small_server(Limits(max_connections=5)) as server:
        kept = [connect(server) for _ in range(5)]
        for sock in kept:  # an answer shows that the connection is counted
            sock.sendall(post_of("/tokenize", {"prompt": "x"}))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            with connect(server) as sock:
                assert heard(sock) == b""
        kept.pop().close()
        deadline = time.monotonic() + PATIENCE
        while True:
            with connect(server) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(post_of("/tokenize", {"prompt": "x"}, CLOSE))
                if heard(sock).startswith(b"HTTP/1.1 200"):
                    break
            assert time.monotonic() < deadline
        for sock in kept:
            sock.close()


# What the schema says can be sent, and what it says cannot


def bounded(case):
    """The same request, but one that is soon over: what it holds under a salt of its own could not be released."""
    if isinstance(case.body, dict):
        most = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2, "hold_seconds": 0.01}
        for name, value in most.items():
            given = case.body.get(name)
            if isinstance(given, int | float) and not isinstance(given, bool) and given > value:
                case.body[name] = value
    return case


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name.lower())
def test_schemathesis(server, mode):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    deadline = time.monotonic() + 30  # each mode
    num_calls = 0

    def run(operation):
        @hypothesis.settings(
            max_examples=15, derandomize=True, deadline=None, database=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def calls(case):
            nonlocal num_calls
            if time.monotonic() < deadline:
                num_calls += 1
                response = bounded(case).call_and_validate(checks=[not_a_server_error], timeout=PATIENCE)
                if response.status_code >= 400 and case.method != "HEAD":
                    check_answer(response.status_code, response.content, case)

        calls()

    for found in schema.get_all_operations():
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing about it can be wrong
            run(found.ok())
    assert num_calls > 50
