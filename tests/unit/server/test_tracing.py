"""One span for each HTTP request that generates, with counts and times in it and no secrets."""

import asyncio
import subprocess
import sys
import time

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from segue.base.config import Environment
from segue.base.errors import EngineClosed, InvalidRequest, UnknownState
from segue.model.loading import open_model
from segue.server import tracing
from segue.server.app import create_app
from segue.server.messages import Part
from segue.server.metrics import Metrics
from segue.server.remote_engine import RemoteEngine
from segue.server.service import Limits, Service
from segue.server.tenants import Tenant, Tenants
from segue.server.tracing import Traced, Tracer, otlp_tracer

KEY, PROMPT, ANSWER = "sk-very-secret-key", "the hidden prompt", "the hidden answer"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class FakeAnswering:
    """Gives the answer in two parts, or what the engine's problem is."""

    def __init__(self, engine, call):
        tokens = engine.tokens
        first = Part(call.request_id, 0, tokens[:3], "", [])
        parts = [first, Part(call.request_id, 0, tokens[3:], "", [], finish="length", reuse=(1, 2, 0, 5))]
        self._news = [[part] for part in parts] if engine.problem is None else [engine.problem]
        if engine.dies:
            self._news[1] = EngineClosed("it is gone")

    async def next(self):
        if not self._news:
            return []
        news = self._news.pop(0)
        if isinstance(news, Exception):
            raise news
        if news == "silence":
            await asyncio.sleep(60)
        return news

    def close(self):
        pass


class FakeEngine(RemoteEngine):
    """Without a process."""

    def __init__(self, tokens):
        super().__init__("tiny", {})
        self.tokens = tokens
        self.problem, self.dies = None, False

    async def start(self):
        pass

    async def close(self):
        pass

    def submit(self, calls):
        return FakeAnswering(self, calls[0])


class Traces:
    """An application with a traced door, and the spans it wrote."""

    def __init__(self, **limits):
        model = open_model("tiny", Environment.read().cache_dir)
        self.engine = FakeEngine(model.tokenizer.encode(ANSWER, False))
        tenants = Tenants({KEY: Tenant("acme")})
        self.service = Service(model, self.engine, tenants, Metrics(), limits=Limits(**limits), served_name="small")
        self.app = create_app(self.service)
        self.exporter = InMemorySpanExporter()
        self.tracer = Tracer(self.exporter)
        self.app.add_middleware(Traced, tracer=self.tracer)

    def post(self, path="/v1/completions", *, key=KEY, headers=None, timeout=10, **body):
        async def ask():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                given = {"authorization": f"Bearer {key}"} | (headers or {})
                return await asyncio.wait_for(client.post(path, json=body, headers=given), timeout)

        return asyncio.run(ask())

    def spans(self):
        self.tracer.close()
        return self.exporter.get_finished_spans()

    def span(self):
        [span] = self.spans()
        return span


@pytest.fixture
def traces():
    made = Traces()
    yield made
    made.tracer.close()


def test_a_span_has_the_counts_and_the_callers_trace(traces):
    before = time.time_ns()
    answer = traces.post(prompt=PROMPT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == ANSWER
    span = traces.span()
    assert (span.name, span.kind, span.status.status_code) == ("segue.generate", SpanKind.SERVER, StatusCode.UNSET)
    assert dict(span.attributes) == {
        "gen_ai.request.model": "small",
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": len(traces.engine.tokens),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "segue.request_id": answer.json()["id"],
        "segue.tenant": "acme",
        "segue.outcome": "finished",
    }
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    [event] = span.events
    assert event.name == "first_token" and 0 <= event.attributes["seconds"] < 10
    assert before <= span.start_time <= event.timestamp <= span.end_time <= time.time_ns()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_route_that_generates_has_one_and_no_secret_is_in_it(traces, path, stream):
    said = {
        "/v1/completions": {"prompt": PROMPT},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
        "/v1/responses": {"input": PROMPT},
    }
    answer = traces.post(path, stream=stream, **said[path])
    assert answer.status_code == 200 and ("hidden answer" in answer.text or stream)
    span = traces.span()
    assert span.attributes["segue.outcome"] == "finished" and span.attributes["http.route"] == path
    for secret in (KEY, PROMPT, ANSWER, "hidden"):
        assert secret not in span.to_json()


@pytest.mark.parametrize(
    "parent", [None, "", "nonsense", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", "é" * 600]
)
def test_without_a_parent_that_can_be_read_it_is_a_trace_of_its_own(traces, parent):
    traces.post(prompt=PROMPT, headers={} if parent is None else {"traceparent": parent.encode()})
    span = traces.span()
    assert span.parent is None and f"{span.context.trace_id:032x}" != TRACE


def test_a_caller_that_does_not_sample_is_heard(traces):
    traces.post(prompt=PROMPT, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert traces.spans() == ()


def test_what_is_turned_away_at_the_door_has_none(traces):
    assert traces.post(prompt=PROMPT, key="wrong").status_code == 401
    assert traces.post(prompt=PROMPT, temperature="hot").status_code == 400
    assert traces.post(prompt=PROMPT, model=PROMPT).status_code == 404
    assert traces.post("/tokenize", prompt=PROMPT).status_code == 200
    assert traces.spans() == ()


def test_refused_failed_and_broken(traces):
    for problem, status, outcome in (
        (UnknownState(f"not known: {PROMPT}"), 404, "refused"),
        (EngineClosed("it is gone"), 503, "failed"),
        (RuntimeError(PROMPT), 500, "failed"),
    ):
        traces.exporter.clear()
        traces.engine.problem = problem
        assert traces.post(prompt=PROMPT).status_code == status
        traces.tracer._provider.force_flush()
        [span] = traces.exporter.get_finished_spans()
        assert span.attributes["segue.outcome"] == outcome and span.attributes["http.response.status_code"] == status
        assert (span.status.status_code == StatusCode.ERROR) == (outcome == "failed")
        assert not span.events and PROMPT not in span.to_json()


def test_an_engine_that_ends_in_a_stream(traces):
    traces.engine.dies = True
    assert traces.post(prompt=PROMPT, stream=True).status_code == 200
    span = traces.span()
    assert span.attributes["segue.outcome"] == "failed" and span.attributes["gen_ai.usage.output_tokens"] == 3
    assert len(span.events) == 1


def test_a_client_that_leaves(traces):
    traces.engine.problem = "silence"
    with pytest.raises(TimeoutError):
        traces.post(prompt=PROMPT, timeout=0.2)
    span = traces.span()
    assert span.attributes["segue.outcome"] == "aborted" and span.attributes["gen_ai.usage.output_tokens"] == 0


def test_over_the_limit_of_the_server():
    traces = Traces(max_requests=1)
    traces.service.num_sequences = 1
    assert traces.post(prompt=PROMPT).status_code == 503
    assert dict(traces.span().attributes)["segue.outcome"] == "failed"


def test_requests_at_a_time_have_their_own(traces):
    async def both():
        transport = httpx.ASGITransport(traces.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {"authorization": f"Bearer {KEY}"}
            asked = [client.post("/v1/completions", json={"prompt": PROMPT}, headers=headers) for _ in range(20)]
            return await asyncio.gather(*asked)

    ids = {answer.json()["id"] for answer in asyncio.run(both())}
    assert {span.attributes["segue.request_id"] for span in traces.spans()} == ids and len(ids) == 20


def test_the_end_of_the_application_sends_the_last_ones(traces):
    async def live():
        messages = asyncio.Queue()
        for kind in ("startup", "shutdown"):
            messages.put_nowait({"type": f"lifespan.{kind}"})
        sent = []

        async def send(message):
            sent.append((message["type"], len(traces.exporter.get_finished_spans())))

        await traces.app({"type": "lifespan", "asgi": {"version": "3.0"}}, messages.get, send)
        return sent

    traces.post(prompt=PROMPT)
    assert asyncio.run(live()) == [("lifespan.startup.complete", 0), ("lifespan.shutdown.complete", 1)]


# Off


def test_without_a_tracer_nothing_is_imported_and_nothing_kept():
    code = (
        "import sys\n"
        "import segue.cli.serve, segue.server.app, segue.server.tracing\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "span = segue.server.tracing.current_span()\n"
        "assert type(span) is segue.server.tracing.Span and not hasattr(span, '__dict__')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_a_missing_package_is_named_by_its_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InvalidRequest, match=r"^otlp: needs OpenTelemetry: pip install 'segue\[otel\]'"):
        otlp_tracer("http://localhost:4318")


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "ftp://here", "http://", "http://[::1", "file:///etc/passwd", 4318]
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(InvalidRequest, match=r"^otlp: "):
        otlp_tracer(url)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://here:4318", "http://here:4318/v1/traces"),
        ("https://here/", "https://here/v1/traces"),
        ("http://here/otel/v1/traces?a=b", "http://here/otel/v1/traces?a=b"),
    ],
)
def test_a_url_without_a_path_gets_one(monkeypatch, url, endpoint):
    monkeypatch.setattr(tracing, "Tracer", lambda exporter: exporter)
    assert otlp_tracer(url)._endpoint == endpoint
