"""What /metrics shows, from one table: a name, what kind it is, what it means, and where its number comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from segue.server.generation import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series, and say little


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric. `source` names a field of the engine's stats; without one, the server counts it itself. `alias` is what
    vLLM's dashboards call the same thing."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    source: str | None = None
    labels: tuple[str, ...] = ()
    alias: str | None = None


TABLE = (
    Entry(
        "kv_cache_usage_perc",
        "gauge",
        "Share of KV blocks that somebody holds; 1 is all.",
        source="kv_usage",
        alias="kv_cache_usage_perc",
    ),
    Entry(
        "num_requests_running",
        "gauge",
        "Sequences in the running batch.",
        source="num_running",
        alias="num_requests_running",
    ),
    Entry(
        "num_requests_waiting",
        "gauge",
        "Sequences that wait to be admitted.",
        source="num_waiting",
        alias="num_requests_waiting",
    ),
    Entry("kv_blocks", "gauge", "KV blocks there are; the usage is a share of these.", source="kv_blocks"),
    Entry("block_size", "gauge", "Tokens in a block.", source="block_size"),
    Entry("leased_blocks", "gauge", "KV blocks under leases.", source="leased_blocks"),
    Entry("known_states", "gauge", "States that can be continued.", source="num_states"),
    Entry(
        "prompt_tokens",
        "counter",
        "Prompt tokens of ended requests: the tokens needed.",
        source="prompt_tokens",
        alias="prompt_tokens",
    ),
    Entry("prefilled_tokens", "counter", "Of those, tokens that had to be computed.", source="prefilled_tokens"),
    Entry("prefix_hit_tokens", "counter", "Of those, tokens found in memory, by where.", labels=("source",)),
    Entry(
        "recomputed_tokens", "counter", "Of those, tokens whose KV was there once and lost.", source="recomputed_tokens"
    ),
    Entry("generated_tokens", "counter", "Tokens sampled.", source="generated_tokens", alias="generation_tokens"),
    Entry(
        "preemptions",
        "counter",
        "Running sequences that had to give up their memory.",
        source="num_preemptions",
        alias="num_preemptions",
    ),
    Entry("revoked_blocks", "counter", "Leased blocks taken back by pressure or a quota.", source="revoked_blocks"),
    Entry("steps", "counter", "Steps run.", source="num_steps"),
    Entry("engine_restarts", "counter", "Times the engine's process was started again.", source="restarts"),
    Entry(
        "time_to_first_token_seconds",
        "histogram",
        "From arrival to the first token.",
        alias="time_to_first_token_seconds",
    ),
    Entry(
        "inter_token_latency_seconds",
        "histogram",
        "From one token of an answer to the next.",
        alias="inter_token_latency_seconds",
    ),
    Entry(
        "e2e_request_latency_seconds",
        "histogram",
        "From arrival to the last token.",
        alias="e2e_request_latency_seconds",
    ),
    Entry("requests", "counter", "Requests that generate, by tenant and how they ended.", labels=("tenant", "outcome")),
    Entry(
        "tenant_tokens", "counter", "Tokens by tenant and kind: prompt, cached, generated.", labels=("tenant", "kind")
    ),
)


class Metrics:
    """The server's own counts, and the engine's at the time they are asked for."""

    def __init__(self, *, vllm_names: bool = False) -> None:
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._own: dict[str, list[Any]] = {}
        for entry in TABLE:
            if entry.source is None and entry.name != "prefix_hit_tokens":
                self._own[entry.name] = [self._make(entry, name) for name in self._names(entry)]
        self._engine = _EngineMetrics([(entry, self._names(entry)) for entry in TABLE])
        self._registry.register(self._engine)

    def _names(self, entry: Entry) -> list[str]:
        names = [f"segue:{entry.name}"]
        return [*names, f"vllm:{entry.alias}"] if self._vllm_names and entry.alias is not None else names

    def _make(self, entry: Entry, name: str) -> Counter | Histogram:
        if entry.kind == "histogram":
            return Histogram(name, entry.help, buckets=_SECONDS, registry=self._registry)
        return Counter(name, entry.help, entry.labels, registry=self._registry)

    def first_token(self, seconds: float) -> None:
        for metric in self._own["time_to_first_token_seconds"]:
            metric.observe(seconds)

    def inter_token(self, seconds: float, count: int) -> None:
        """`count` tokens came at once, `seconds` apart on average."""
        for metric in self._own["inter_token_latency_seconds"]:
            for _ in range(count):
                metric.observe(seconds)

    def request_ended(self, tenant: str, outcome: str, seconds: float, usage: Usage) -> None:
        for metric in self._own["e2e_request_latency_seconds"]:
            metric.observe(seconds)
        for metric in self._own["requests"]:
            metric.labels(tenant, outcome).inc()
        [tokens] = self._own["tenant_tokens"]
        tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
        tokens.labels(tenant, "cached").inc(usage.inherited_tokens)
        tokens.labels(tenant, "generated").inc(usage.completion_tokens)

    def render(self, stats: Mapping[str, Any]) -> bytes:
        self._engine.stats = stats
        return generate_latest(self._registry)


class _EngineMetrics:
    """Reads the engine's stats; while there is no engine, they are not there, which a dashboard shows as a gap."""

    def __init__(self, entries: list[tuple[Entry, list[str]]]) -> None:
        self._entries = entries
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        for entry, names in self._entries:
            for name in names:
                if entry.source is not None and entry.source in self.stats:
                    family = GaugeMetricFamily if entry.kind == "gauge" else CounterMetricFamily
                    yield family(name, entry.help, value=self.stats[entry.source])
        if "reused_tokens" in self.stats:
            [entry] = [entry for entry in TABLE if entry.name == "prefix_hit_tokens"]
            hits = CounterMetricFamily(f"segue:{entry.name}", entry.help, labels=entry.labels)
            hits.add_metric(["lease"], self.stats["held_tokens"])
            hits.add_metric(["index"], self.stats["reused_tokens"] - self.stats["held_tokens"])
            yield hits
