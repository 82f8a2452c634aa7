"""What /metrics shows, from one table: a name, what kind it is, what it means, and where its number comes from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

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
    Entry("pin_decisions", "counter", "Ends of turns after which the policy decided, by command.", labels=("tool",)),
    Entry("pins", "counter", "Of those, KV kept for the job's next turn.", labels=("tool",)),
    Entry("pin_hits", "counter", "Of those, jobs that came back to it.", labels=("tool",)),
    Entry("pin_late_returns", "counter", "Of those, jobs that came back after it was given up.", labels=("tool",)),
    Entry("pinned_block_seconds", "counter", "Blocks kept, times seconds: used or wasted.", labels=("tool", "kind")),
    Entry("pin_regret_seconds", "counter", "What an oracle would have gained more, by command.", labels=("tool",)),
    Entry("tier_bytes", "gauge", "Bytes of KV in a tier.", labels=("tier",)),
    Entry("tier_capacity_bytes", "gauge", "Bytes that a tier may have.", labels=("tier",)),
    Entry("tier_stored_blocks", "counter", "Blocks copied into a tier.", labels=("tier",)),
    Entry("tier_loaded_blocks", "counter", "Blocks that came back from a tier.", labels=("tier",)),
    Entry("tier_missed_blocks", "counter", "Blocks that a tier did not have after all.", labels=("tier",)),
    Entry(
        "tier_skipped_blocks", "counter", "Blocks not stored: too much was under way, or it was out.", labels=("tier",)
    ),
    Entry("tier_damaged_blocks", "counter", "Blocks that were not what had been stored.", labels=("tier",)),
    Entry("tier_errors", "counter", "Stores and loads that failed.", labels=("tier",)),
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
        self._registry = CollectorRegistry(auto_describe=False)
        names = {entry: _names(entry, vllm_names) for entry in TABLE}
        self._histograms = {entry.name: _Counts() for entry in TABLE if entry.kind == "histogram"}
        self._counters = {
            entry.name: Counter(f"segue:{entry.name}", entry.help, entry.labels, registry=self._registry)
            for entry in TABLE
            if entry.kind == "counter" and "tenant" in entry.labels
        }
        self._engine = _EngineMetrics(names, self._histograms)
        self._registry.register(self._engine)

    def first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].add(seconds)

    def inter_token(self, seconds: float, count: int) -> None:
        """`count` tokens came at once, `seconds` apart on average."""
        self._histograms["inter_token_latency_seconds"].add(seconds, count)

    def request_ended(self, tenant: str, outcome: str, seconds: float, usage: Usage) -> None:
        if outcome == "finished":
            self._histograms["e2e_request_latency_seconds"].add(seconds)
        self._counters["requests"].labels(tenant, outcome).inc()
        tokens = self._counters["tenant_tokens"]
        tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
        tokens.labels(tenant, "cached").inc(usage.inherited_tokens)
        tokens.labels(tenant, "generated").inc(usage.completion_tokens)

    def render(self, stats: Mapping[str, Any]) -> bytes:
        self._engine.stats = stats
        return generate_latest(self._registry)


def _names(entry: Entry, vllm_names: bool) -> list[str]:
    own = [f"segue:{entry.name}"]
    return [*own, f"vllm:{entry.alias}"] if vllm_names and entry.alias is not None else own


class _Counts:
    """A histogram that costs a fraction of a microsecond per token; the library's own locks and looks up each time."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def family(self, name: str, help: str) -> Metric:
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, help, buckets=buckets, sum_value=self._sum)


class _EngineMetrics:
    """Reads the engine's stats; while there is no engine, they are not there, which a dashboard shows as a gap."""

    def __init__(self, names: Mapping[Entry, list[str]], histograms: Mapping[str, _Counts]) -> None:
        self._names = names
        self._histograms = histograms
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        for entry, names in self._names.items():
            for name in names:
                if entry.kind == "histogram":
                    yield self._histograms[entry.name].family(name, entry.help)
                elif entry.source is not None and entry.source in self.stats:
                    family = GaugeMetricFamily if entry.kind == "gauge" else CounterMetricFamily
                    yield family(name, entry.help, value=self.stats[entry.source])
        for entry in TABLE:
            if "reused_tokens" in self.stats and entry.name in _LABELLED:
                family = GaugeMetricFamily if entry.kind == "gauge" else CounterMetricFamily
                series = family(f"segue:{entry.name}", entry.help, labels=entry.labels)
                for labels, value in _LABELLED[entry.name](self.stats):
                    series.add_metric(labels, value)
                yield series


Series = Iterable[tuple[list[str], float]]


def _hits(stats: Mapping[str, Any]) -> Series:
    held, loaded = stats.get("held_tokens", 0), stats.get("loaded_tokens", 0)
    return [(["lease"], held), (["index"], stats.get("reused_tokens", 0) - held - loaded), (["tier"], loaded)]


def _sums(field: str, *labels: str) -> Callable[[Mapping[str, Any]], Series]:
    """Of the policy's decisions, by command."""
    return lambda stats: [([tool or "none", *labels], sums[field]) for tool, sums in stats.get("decisions", {}).items()]


def _tiers(field: str) -> Callable[[Mapping[str, Any]], Series]:
    """Of each tier that has such a number."""
    return lambda stats: [([row["tier"]], row[field]) for row in stats.get("tiers", ()) if row.get(field) is not None]


_LABELLED: dict[str, Callable[[Mapping[str, Any]], Series]] = {
    "prefix_hit_tokens": _hits,
    "pin_decisions": _sums("num_decisions"),
    "pins": _sums("num_pinned"),
    "pin_hits": _sums("num_hits"),
    "pin_late_returns": _sums("num_late"),
    "pin_regret_seconds": _sums("regret_seconds"),
    "pinned_block_seconds": lambda stats: [
        *_sums("used_block_seconds", "used")(stats),
        *_sums("wasted_block_seconds", "wasted")(stats),
    ],
    "tier_bytes": _tiers("bytes"),
    "tier_capacity_bytes": _tiers("capacity_bytes"),
    "tier_stored_blocks": _tiers("stored_blocks"),
    "tier_loaded_blocks": _tiers("loaded_blocks"),
    "tier_missed_blocks": _tiers("missed_blocks"),
    "tier_skipped_blocks": _tiers("skipped_blocks"),
    "tier_damaged_blocks": _tiers("damaged_blocks"),
    "tier_errors": _tiers("errors"),
}
