"""Writes docs/metrics.md: `python deploy/make_metrics_doc.py`. The table is the server's own."""

from __future__ import annotations

from pathlib import Path

from segue.server.metrics import TABLE, Entry

FILE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """\
# Metrics

Made by `deploy/make_metrics_doc.py` from the table in `src/segue/server/metrics.py`.

`GET /metrics` gives them in Prometheus's text format. It asks for no key. While there is no engine, the engine's
metrics are missing: a dashboard shows a gap. The engine's counters start at 0 with each new engine, which `rate()`
expects. Seconds are seconds, and a share is from 0 to 1.

`segue serve --vllm-metrics` gives the names of the last column as well, so that dashboards made for vLLM work.
`deploy/grafana.json` is a dashboard for the names of the first.

"""

_TAIL = """
A histogram `h` has the series `h_bucket`, `h_sum` and `h_count`.

## Recompute ratio

The share of the needed prompt tokens that had to be computed:

```
recompute ratio = rate(segue:prefilled_tokens_total) / rate(segue:prompt_tokens_total)
```

0: all of it was found in memory. 1: nothing was. Prompt tokens = prefilled tokens + hits of all sources. The source
`lease` is a held state. The source `index` is the prefix cache.

The first turn of a conversation has nothing to find, so the ratio is never 0 for long.
`segue:recomputed_tokens_total` is the part that was there once and lost: what more memory or longer holds would save.

## Traces

`segue serve --otlp http://localhost:4318` sends one OpenTelemetry span for each HTTP request that generates, to a
collector, by OTLP over HTTP. It needs `pip install 'segue[otel]'`.

The span is called `segue.generate`. It lasts from the request's arrival to the last byte of its answer. Its parent is
the caller's span, if the request has a `traceparent` header. A request that is turned away for its key or its fields has
no span; one that is over a limit has.

| attribute | meaning |
| --- | --- |
| `gen_ai.request.model` | the model, as the server calls it |
| `gen_ai.usage.input_tokens` | tokens of the prompt; 0 if the answer did not end |
| `gen_ai.usage.output_tokens` | tokens of the answers |
| `gen_ai.usage.cache_read.input_tokens` | of the prompt, tokens found in memory |
| `segue.request_id` | the `x-request-id` of the answer, as in the log |
| `segue.tenant` | the tenant's name; empty if the server has no keys |
| `segue.outcome` | `finished`, `aborted`, `refused` or `failed` |
| `http.route`, `http.response.status_code` | what was asked, and the status |

`aborted`: the client left, or the engine ended in the middle of a stream. `refused`: the status is 4xx. `failed`: it is
5xx, and the span has the status of an error.

The event `first_token` has `seconds`: the time to the first token, as in the metric. A span never has a key, a prompt or
an answer in it.

Spans are sent from a thread of their own. If the collector is away they are dropped, and no request waits. At shutdown
the last ones get 5 seconds. The SDK's environment variables hold, such as `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and
`OTEL_EXPORTER_OTLP_HEADERS`.
"""


def page() -> str:
    lines = ["| name | kind | meaning | labels | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    return _HEAD + "\n".join([*lines, *map(_row, TABLE)]) + "\n" + _TAIL


def _row(entry: Entry) -> str:
    suffix = "_total" if entry.kind == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in entry.labels)
    alias = "" if entry.alias is None else f"`vllm:{entry.alias}{suffix}`"
    return f"| `segue:{entry.name}{suffix}` | {entry.kind} | {entry.help} | {labels} | {alias} |"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
