"""The middleware, over an application that only says what vLLM would."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from segue.vllm.frontend import Middleware
from segue.vllm.hooks import reports

STATE = {"state_id": "cmpl-x-0-12ab34cd", "num_tokens": 20, "held_tokens": 19}
COUNTS = {"inherited_tokens": 5, "recomputed_tokens": 0, "new_tokens": 9}


class Output:
    def __init__(self, request_id, report) -> None:
        self.request_id, self.kv_transfer_params = request_id, {"segue": report}


class App:
    """Answers with `parts`, and keeps what it was asked. `hears`: what an engine says before the first of them."""

    def __init__(self, parts, hears=(), status=200, kind=b"application/json") -> None:
        self.parts, self.hears, self.status, self.kind = parts, hears, status, kind
        self.asked, self.headers = None, {}

    async def __call__(self, scope, receive, send):
        self.headers = dict(scope["headers"])
        self.asked = json.loads((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", self.kind)]})
        name = self.headers.get(b"x-request-id", b"").decode()
        for request_id, report in self.hears:
            reports.hear([Output(request_id.replace("NAME", name), report)])
        for at, part in enumerate(self.parts):
            await send({"type": "http.response.body", "body": part, "more_body": at + 1 < len(self.parts)})


def ask(app, middleware=None, path="/v1/completions", ranks=(0,), **body):
    """Status and body. `ranks`: of the engines that the server has."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    middleware = middleware or Middleware(app)
    middleware._app = app
    server = SimpleNamespace(
        engine_client=SimpleNamespace(engine_core=SimpleNamespace(engine_ranks_managed=list(ranks)))
    )
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": SimpleNamespace(state=server)}
    asyncio.run(middleware(scope, receive, send))
    assert [message["type"] for message in sent].count("http.response.start") == 1
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def answer(*choices):
    return json.dumps({"id": "cmpl-x", "choices": list(choices), "kv_transfer_params": {"segue": {}}}).encode()


def test_what_is_not_ours_passes_as_it_came():
    app = App([b"{ }"])
    assert ask(app, prompt="x", stream=False) == (200, b"{ }")
    assert app.asked == {"prompt": "x", "stream": False} and b"x-request-id" not in app.headers


def test_fields_go_down_and_each_choice_has_its_own_state():
    heard = [
        (f"{choice}_cmpl-NAME-{prompt}-12ab34cd", COUNTS | STATE | {"state_id": f"s{prompt}{choice}"})
        for prompt in range(2)
        for choice in range(2)
    ]
    app = App([answer(*({"index": at, "text": ""} for at in range(4)))], heard)
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
    heard = [("cmpl-NAME-0-12ab34cd", COUNTS | STATE)]
    status, body = ask(App(parts, heard, kind=b"text/event-stream; charset=utf-8"), prompt="x", hold_seconds=5)
    first, last, done, _ = body.split(b"\n\n")
    assert status == 200 and first + b"\n\n" == parts[0] and done == b"data: [DONE]"
    said = json.loads(last.removeprefix(b"data: "))
    assert said["choices"][0]["state"] == {"id": STATE["state_id"], "num_tokens": 20, "held_tokens": 19}
    assert said["segue"] == COUNTS


@pytest.mark.parametrize("path, name", [("/v1/completions", "cmpl-NAME-0"), ("/v1/chat/completions", "chatcmpl-NAME")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_has_its_status_and_reason(path, name, streams):
    report = {"error": "no state 'y' is known", "type": "UnknownState", "status": 404}
    kind = b"text/event-stream" if streams else b"application/json"
    app = App([b'data: {"error": "internal"}\n\n', b"data: [DONE]\n\n"], [(f"{name}-12ab34cd", report)], 500, kind)
    status, body = ask(app, path=path, prompt="x", continuation_of="y")
    assert status == 404 and json.loads(body)["error"]["message"] == report["error"]
    assert not reports._noted


@pytest.mark.parametrize("ranks, told", [((0, 1), b"1"), ((1, 2), b"0"), ((1,), None), ((2, 3), None)])
def test_a_continuation_goes_to_the_engine_that_has_its_parent(ranks, told):
    middleware = Middleware(None)
    app = App([answer({"index": 0, "text": ""})], [("cmpl-NAME-0-12ab34cd", COUNTS | STATE | {"rank": 1})])
    ask(app, middleware, prompt="x", hold_seconds=5, job_id="j", ranks=ranks)
    assert b"x-data-parallel-rank" not in app.headers
    for fields in ({"continuation_of": STATE["state_id"]}, {"continuation_of": "cmpl-x"}, {"job_id": "j"}):
        app.hears = []
        ask(app, middleware, prompt="y", ranks=ranks, **fields)
        assert app.headers.get(b"x-data-parallel-rank") == told
    refused = {"error": "gone", "type": "StateGone", "status": 410}
    app.hears, app.status = [("cmpl-NAME-0-12ab34cd", refused)], 500
    ask(app, middleware, prompt="y", continuation_of="cmpl-x", ranks=ranks)
    app.hears, app.status = [], 200
    ask(app, middleware, prompt="y", continuation_of="cmpl-x", ranks=ranks)
    assert app.headers.get(b"x-data-parallel-rank") == told  # a refusal changes nothing


@pytest.mark.parametrize("field", [{"hold_seconds": 5}, {"state_id": "a"}])
def test_a_search_leaves_no_state_and_says_so(field):
    app = App([answer()])
    status, body = ask(app, prompt="x", use_beam_search=True, n=2, continuation_of="y", **field)
    assert status == 400 and next(iter(field)) in json.loads(body)["error"]["message"] and app.asked is None
