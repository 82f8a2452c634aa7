"""The middleware, over an application that only says what vLLM would."""

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from segue.vllm.frontend import Middleware
from segue.vllm.hooks import reports

STATE = {"state_id": "cmpl-x-0-12ab34cd", "num_tokens": 20, "held_tokens": 19}
COUNTS = {"inherited_tokens": 5, "recomputed_tokens": 0, "new_tokens": 9}


class App:
    """Answers with `parts`, and keeps what it was asked. `hears`: what an engine says before the first of them, by prompt and
    answer. `meanwhile`: done while it is at it."""

    def __init__(self, parts, hears=None, status=200, kind=b"application/json", n=1, meanwhile=None) -> None:
        self.parts, self.hears, self.status, self.kind, self.n = parts, hears or {}, status, kind, n
        self.asked, self.headers, self.body, self.meanwhile = None, {}, b"", meanwhile

    async def __call__(self, scope, receive, send):
        self.headers, more = dict(scope["headers"]), True
        while more:
            message = await receive()
            self.body, more = self.body + message["body"], message.get("more_body")
        with suppress(ValueError, RecursionError):
            self.asked = json.loads(self.body)
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", self.kind)]})
        name, is_chat = self.headers.get(b"x-request-id", b"").decode(), "chat" in scope["path"]
        for (prompt, index), report in self.hears.items():
            external = f"chatcmpl-{name}" if is_chat else f"cmpl-{name}-{prompt}"
            own = SimpleNamespace(external_req_id=external, request_id=f"{index}_{external}-{id(self):08x}")
            reports.expect(own, SimpleNamespace(n=self.n) if self.n > 1 else None, index)
            if self.meanwhile is not None:
                await self.meanwhile()
            reports.hear([SimpleNamespace(request_id=own.request_id, kv_transfer_params={"segue": report})])
        for at, part in enumerate(self.parts):
            await send({"type": "http.response.body", "body": part, "more_body": at + 1 < len(self.parts)})


async def converse(app, middleware, path, ranks, body, method="POST", headers=(), query=b""):
    sent = []
    parts = [body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20)] or [b""]

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": len(parts) > 0}

    async def send(message):
        sent.append(message)

    middleware._app = app
    core = SimpleNamespace(engine_ranks_managed=list(ranks), core_engine=b"0", _call_utility_async=call)
    server = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": query}
    await middleware(scope | {"app": SimpleNamespace(state=server)}, receive, send)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


called = []


async def call(method, *args, engine):
    called.append((method, *args))
    if method == "segue_status":
        raise RuntimeError("the engine is gone")
    return [{"seconds_ago": 2.0}, {"seconds_ago": 1.0}] if method == "segue_decisions" else True


def ask(app, middleware=None, path="/v1/completions", ranks=(0,), headers=(), **body):
    """Status and body. `ranks`: of the engines that the server has."""
    content = json.dumps(body).encode()
    found = asyncio.run(converse(app, middleware or Middleware(None), path, ranks, content, headers=headers))
    assert not reports._places
    return found


def answer(*choices):
    return json.dumps({"id": "cmpl-x", "choices": list(choices), "kv_transfer_params": {"segue": {}}}).encode()


def test_what_is_not_ours_passes_as_it_came():
    app = App([b"{ }"])
    assert ask(app, prompt="x", stream=False) == (200, b"{ }")
    assert app.asked == {"prompt": "x", "stream": False} and b"x-request-id" not in app.headers


def test_fields_go_down_and_each_choice_has_its_own_state():
    heard = {(prompt, at): COUNTS | STATE | {"state_id": f"s{prompt}{at}"} for prompt in range(2) for at in range(2)}
    app = App([answer(*({"index": at, "text": ""} for at in range(4)))], heard, n=2)
    status, body = ask(app, prompt=["x", "y"], n=2, job_id="j", is_last_step=False, vllm_xargs={"other": 1})
    assert app.asked["vllm_xargs"] == {"other": 1, "job_id": "j", "is_last_step": 0}
    said = json.loads(body)
    assert status == 200 and [choice["state"]["id"] for choice in said["choices"]] == ["s00", "s01", "s10", "s11"]
    assert said["segue"] == {"inherited_tokens": 20, "recomputed_tokens": 0, "new_tokens": 36}
    assert said["kv_transfer_params"] is None


def test_a_suffix_is_the_prompt_of_a_continuation():
    app = App([answer()])
    ask(app, suffix=" more", continuation_of="cmpl-x")
    assert app.asked["prompt"] == " more" and app.asked["add_special_tokens"] is False


def event(choice):
    return b"data: " + json.dumps({"id": "cmpl-x", "choices": [choice]}).encode() + b"\n\n"


def test_a_streams_last_part_tells_the_state():
    parts = [
        event({"index": 0, "text": "a", "finish_reason": None}),
        event({"index": 0, "text": "b", "finish_reason": "length"}),
        b"data: [DONE]\n\n",
    ]
    heard = {(0, 0): COUNTS | STATE}
    status, body = ask(App(parts, heard, kind=b"text/event-stream; charset=utf-8"), prompt="x", hold_seconds=5)
    first, last, done, _ = body.split(b"\n\n")
    assert status == 200 and first + b"\n\n" == parts[0] and done == b"data: [DONE]"
    said = json.loads(last.removeprefix(b"data: "))
    assert said["choices"][0]["state"] == {"id": STATE["state_id"], "num_tokens": 20, "held_tokens": 19}
    assert said["segue"] == COUNTS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_has_its_status_and_reason(path, streams):
    report = {"error": "no state 'y' is known", "type": "UnknownState", "status": 404}
    kind = b"text/event-stream" if streams else b"application/json"
    app = App([b'data: {"error": "internal"}\n\n', b"data: [DONE]\n\n"], {(0, 0): report}, 500, kind)
    status, body = ask(app, path=path, prompt="x", continuation_of="y")
    assert status == 404 and json.loads(body)["error"]["message"] == report["error"]


@pytest.mark.parametrize("ranks, told", [((0, 1), b"1"), ((1, 2), b"0"), ((1,), None), ((2, 3), None)])
def test_a_continuation_goes_to_the_engine_that_has_its_parent(ranks, told):
    middleware, states = Middleware(None), [COUNTS | STATE | {"rank": 1}, COUNTS | {**STATE, "state_id": "other"}]
    app = App([answer(*({"index": at, "text": ""} for at in range(2)))], {(0, 0): states[0], (1, 0): states[1]})
    given = [(b"x-request-id", b"x")]
    ask(app, middleware, prompt=["x", "y"], hold_seconds=5, job_id="j", ranks=ranks, cache_salt="alice", headers=given)
    assert b"x-data-parallel-rank" not in app.headers

    def rank_of(salt, **fields):
        after = App([answer({"index": 0, "text": ""})])
        ask(after, middleware, prompt="y", ranks=ranks, cache_salt=salt, **fields)
        return after.headers.get(b"x-data-parallel-rank")

    for fields in ({"continuation_of": STATE["state_id"]}, {"continuation_of": "cmpl-x"}, {"job_id": "j"}):
        assert rank_of("alice", **fields) == told and rank_of("bob", **fields) is None
    if 0 in ranks:
        assert rank_of("alice", continuation_of="other") == b"0"
    refused = App([b""], {(0, 0): {"error": "gone", "type": "StateGone", "status": 410}}, 500)
    assert ask(refused, middleware, prompt="y", continuation_of="cmpl-x", ranks=ranks, cache_salt="alice")[0] == 410
    assert rank_of("alice", continuation_of="cmpl-x") == told  # a refusal changes nothing


def test_two_requests_of_one_id_hear_what_is_theirs():
    async def both():
        given = [(b"x-request-id", b"same")]
        body = json.dumps({"prompt": "x", "hold_seconds": 5}).encode()
        apps = [
            App([answer({"index": 0, "text": ""})], {(0, 0): COUNTS | {**STATE, "state_id": name}}, meanwhile=pause)
            for name in ("a", "b")
        ]
        return await asyncio.gather(
            *(converse(app, Middleware(app), "/v1/completions", (0,), body, headers=given) for app in apps)
        )

    async def pause():
        await asyncio.sleep(0.01)

    said = [json.loads(body)["choices"][0]["state"]["id"] for _, body in asyncio.run(both())]
    assert said == ["a", "b"]


def test_a_body_that_is_too_long_to_look_at_passes_whole():
    app, body = App([b"{}"]), b'{"prompt": "' + b"x" * (66 << 20) + b'"}'
    assert asyncio.run(converse(app, Middleware(None), "/v1/completions", (0,), body)) == (200, b"{}")
    assert app.body == body


@pytest.mark.parametrize("body", [b"[" * 200_000, b"nonsense", b"[1]", b"", b'{"vllm_xargs": [1], "job_id": "j"}'])
def test_what_is_no_request_is_the_servers_to_refuse(body):
    app = App([b"{}"], status=400)
    assert asyncio.run(converse(app, Middleware(None), "/v1/completions", (0,), body)) == (400, b"{}")
    assert app.body == body


def test_the_id_that_a_request_chose_is_kept():
    app = App([answer()])
    ask(app, prompt="x", hold_seconds=5, request_id="mine")
    assert app.headers[b"x-request-id"] == b"mine"


@pytest.mark.parametrize("status, allowed", [(401, False), (404, True), (405, True)])
def test_a_state_is_let_go_only_by_who_may_ask(status, allowed):
    called.clear()
    app, query = App([b"no"], status=status), b"salt=a%2Fb%3D"
    found, _ = asyncio.run(converse(app, Middleware(None), "/v1/states/a", (0,), b"", "DELETE", query=query))
    assert found == (200 if allowed else status)
    assert called == ([("segue_release", "a", "a/b=")] if allowed else [])


@pytest.mark.parametrize(
    "query, status", [(b"job_id=j&limit=5", 200), (b"", 200), (b"limit=0", 400), (b"limit=x", 400)]
)
def test_decisions_are_listed(query, status):
    called.clear()
    app = App([b"no"], status=404)
    found, body = asyncio.run(converse(app, Middleware(None), "/v1/decisions", (0,), b"", "GET", query=query))
    assert found == status
    if status == 200:
        job, limit = ("j", 5) if query else (None, 100)
        assert called == [("segue_decisions", "", job, limit)]
        assert json.loads(body)["data"] == [{"seconds_ago": 1.0}, {"seconds_ago": 2.0}]


def test_metrics_come_though_the_engine_does_not_answer():
    found = asyncio.run(converse(App([b"vllm:x 1\n"]), Middleware(None), "/metrics", (0,), b"", "GET"))
    assert found == (200, b"vllm:x 1\n")


@pytest.mark.parametrize("field", [{"hold_seconds": 5}, {"state_id": "a"}])
def test_a_search_leaves_no_state_and_says_so(field):
    app = App([answer()])
    status, body = ask(app, prompt="x", use_beam_search=True, n=2, continuation_of="y", **field)
    assert status == 400 and next(iter(field)) in json.loads(body)["error"]["message"] and app.asked is None
