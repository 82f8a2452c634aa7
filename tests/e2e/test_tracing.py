"""A server that sends its traces, and a collector that gets them."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.servers import running


@pytest.fixture
def collector():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            made.got.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.got = []
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_collector_gets_spans_at_the_latest_when_the_server_ends(collector):
    key, prompt = "sk-very-secret-key", "the hidden prompt"
    url = f"http://127.0.0.1:{collector.server_port}"
    with running("tiny", "--otlp", url, env={"SEGUE_API_KEYS": key, "OTEL_BSP_SCHEDULE_DELAY": "600000"}) as server:
        status, headers, answer = server.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}, key=key
        )
        assert status == 200 and not collector.got
        server.stop()
    [(path, kind, body)] = collector.got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = resource.scope_spans[0].spans
    attributes = {item.key: item.value for item in span.attributes}
    assert span.name == "segue.generate" and attributes["segue.tenant"].string_value == "key-1"
    assert attributes["segue.request_id"].string_value == headers["x-request-id"] == answer["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert "service.name" in {item.key for item in resource.resource.attributes}
    assert key.encode() not in body and b"hidden" not in body


def test_a_collector_that_is_away_costs_no_request_anything():
    with running("tiny", "--otlp", "http://127.0.0.1:9", env={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, timeout=5)[0] == 200
        assert server.stop() in (0, -15)
