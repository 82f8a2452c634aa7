"""Traces, for those who want them: one OpenTelemetry span for each HTTP request that generates.

    Traced ── makes ──▶ a span ◀── start, first_token, end ── Service.run, Generation
      └── when the request is over: Tracer.write

Without a tracer there is only a span that forgets, and OpenTelemetry is not imported. A span has names, counts and times in
it, and never a key, a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

import segue
from segue.base.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from segue.server.generation import Usage

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_CLOSE_SECONDS = 5.0  # for the last spans to reach a collector that may not be there
_MOST_CHARACTERS = 256  # of an attribute


class Span:
    """What is told about a request. This one forgets it: nobody traces."""

    __slots__ = ()

    def start(self, model: str, tenant: str) -> None:
        """The request asks the engine for something; without this it leaves no span."""

    def first_token(self, seconds: float) -> None:
        """It came `seconds` after the request."""

    def end(self, usage: Usage, outcome: str) -> None:
        """Of a generation. If a request needs a second one, because a parent was forgotten, the last one counts."""


class KeptSpan(Span):
    """Remembers what it is told, until it is written."""

    __slots__ = (
        "began_ns",
        "first_token_ns",
        "first_token_seconds",
        "model",
        "outcome",
        "request_id",
        "status",
        "tenant",
        "traceparent",
        "usage",
    )

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        self.began_ns = time.time_ns()
        self.model: str | None = None
        self.tenant = ""
        self.first_token_ns: int | None = None
        self.first_token_seconds = 0.0
        self.usage: Usage | None = None
        self.outcome: str | None = None
        self.status: int | None = None
        self.request_id: str | None = None

    def start(self, model: str, tenant: str) -> None:
        self.model, self.tenant = model, tenant

    def first_token(self, seconds: float) -> None:
        self.first_token_ns, self.first_token_seconds = time.time_ns(), seconds

    def end(self, usage: Usage, outcome: str) -> None:
        self.usage, self.outcome = usage, outcome

    def final_outcome(self) -> str:
        """`finished` and `aborted` as in the metrics; what was answered with an error is `refused` or, from 500, `failed`."""
        if self.status is None or self.status == 499:
            return "aborted"
        if self.status >= 400:
            return "failed" if self.status >= 500 else "refused"
        return self.outcome or "aborted"

    def attributes(self, route: str) -> dict[str, str | int]:
        """OpenTelemetry's names where it has them."""
        made: dict[str, str | int | None] = {
            "gen_ai.request.model": self.model,
            "http.route": route,
            "http.response.status_code": self.status,
            "segue.request_id": self.request_id,
            "segue.tenant": self.tenant,
            "segue.outcome": self.final_outcome(),
        }
        if self.usage is not None:
            made |= {
                "gen_ai.usage.input_tokens": self.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": self.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": self.usage.inherited_tokens,
            }
        return {name: value for name, value in made.items() if value is not None}


_FORGETS = Span()
_current: ContextVar[Span] = ContextVar("segue.span", default=_FORGETS)


def current_span() -> Span:
    """Of the HTTP request that is being served."""
    return _current.get()


class Tracer:
    """Writes spans by OpenTelemetry's SDK, which sends them from a thread of its own and drops them if it cannot keep up.

    The SDK's own environment variables hold: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = Resource({"service.name": "segue", "service.version": segue.__version__})
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=_MOST_CHARACTERS),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("segue", segue.__version__)
        self._parents = TraceContextTextMapPropagator()
        self._nothing = Context()
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR

    def write(self, span: KeptSpan, route: str) -> None:
        """A span that is over now. Its parent is the caller's, if the caller said one that can be read."""
        caller = {} if span.traceparent is None else {"traceparent": span.traceparent}
        written = self._tracer.start_span(
            "segue.generate",
            self._parents.extract(caller, self._nothing),
            self._kind,
            span.attributes(route),
            start_time=span.began_ns,
        )
        if span.first_token_ns is not None:
            written.add_event("first_token", {"seconds": span.first_token_seconds}, span.first_token_ns)
        if span.final_outcome() == "failed":
            written.set_status(self._error)
        written.end()

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def otlp_tracer(url: str) -> Tracer:
    """To a collector, over HTTP. A URL without a path gets OTLP's own."""
    try:
        parts = urlsplit(str(url))
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        known = False
    if not known:
        raise InvalidRequest("otlp", "must be the URL of a collector, as http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        path = parts.path if parts.path.strip("/") else "/v1/traces"
        return Tracer(OTLPSpanExporter(parts._replace(path=path).geturl()))
    except ImportError as error:
        raise InvalidRequest("otlp", f"needs OpenTelemetry: pip install 'segue[otel]' ({error})") from error


class Traced:
    """An ASGI middleware, to be the outermost: a span has the whole of its request in it, the last byte too."""

    def __init__(self, app: Any, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        span = KeptSpan(Headers(scope=scope).get("traceparent"))

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.status = message["status"]
                span.request_id = Headers(raw=list(message.get("headers", ()))).get("x-request-id")
            await send(message)

        before = _current.set(span)
        try:
            await self._app(scope, receive, note)
        except Exception:
            span.status = 500  # what is answered further out
            raise
        finally:
            _current.reset(before)
            if span.model is not None:
                self._tracer.write(span, getattr(scope.get("route"), "path", ""))

    async def _live(self, scope: Any, receive: Receive, send: Send) -> None:
        """A signal ends the process right after its shutdown, so the last spans go before that."""

        async def close_first(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await asyncio.to_thread(self._tracer.close)
            await send(message)

        await self._app(scope, receive, close_first)
