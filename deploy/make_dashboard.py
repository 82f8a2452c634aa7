"""Writes grafana.json, beside this file: `python deploy/make_dashboard.py`. Names come from the server's table of metrics."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.server.metrics import TABLE, Entry

FILE = Path(__file__).with_name("grafana.json")
_SCHEMA_VERSION = 42
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HERE = '{instance=~"$instance"}'
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
_SUFFIXES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
_WIDTH, _HEIGHT = 24, 8  # of the grid, and of a panel

Json = dict[str, Any]


def entry(name: str) -> Entry:
    [found] = [entry for entry in TABLE if entry.name == name]
    return found


def series(name: str) -> str:
    """As Prometheus stores it."""
    return f"segue:{name}{_SUFFIXES[entry(name).kind]}"


def value(name: str) -> str:
    return f"{series(name)}{_HERE}"


def rate(name: str, *labels: str) -> str:
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({series(name)}{_HERE}[$__rate_interval]))"


def increase(name: str) -> str:
    return f"sum by (instance) (increase({series(name)}{_HERE}[$__rate_interval]))"


def quantile(name: str, share: float) -> str:
    return f"histogram_quantile({share}, {rate(name, 'le')})"


RECOMPUTE_RATIO = f"{rate('prefilled_tokens')} / {rate('prompt_tokens')}"


def panel(title: str, about: str, targets: Sequence[tuple[str, str]], unit: str, **options: Any) -> Json:
    """`targets`: what a line is called, and its expression."""
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}} | options,
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(targets)
        ],
    }


def gauges(title: str, lines: dict[str, str], unit: str = "short", **options: Any) -> Json:
    """One line for each instance; `lines`: what it is called, and the metric."""
    targets = [(f"{legend} {{{{instance}}}}".strip(), value(name)) for legend, name in lines.items()]
    return panel(title, _about(*lines.values()), targets, unit, **options)


def latency(title: str, name: str) -> Json:
    return panel(title, _about(name), [(label, quantile(name, share)) for label, share in _QUANTILES], "s")


def events(title: str, name: str) -> Json:
    return panel(title, _about(name), [("{{instance}}", increase(name))], "short", decimals=0)


def by_labels(title: str, name: str, unit: str) -> Json:
    labels = entry(name).labels
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return panel(title, _about(name), [(legend, rate(name, *labels))], unit)


def _about(*names: str) -> str:
    return " ".join(entry(name).help for name in names)


def others(rows: Sequence[tuple[str, list[Json]]]) -> list[Json]:
    """What the rows leave out of the table, plainly."""
    shown = {target["expr"] for _, inside in rows for made in inside for target in made["targets"]}
    left = [entry for entry in TABLE if not any(f"{series(entry.name)}{{" in expression for expression in shown)]
    plain = {
        "gauge": lambda title, name: gauges(title, {"": name}),
        "counter": lambda title, name: by_labels(title, name, "cps"),
        "histogram": latency,
    }
    return [plain[entry.kind](entry.name.replace("_", " ").capitalize(), entry.name) for entry in left]


def rows() -> list[tuple[str, list[Json]]]:
    tokens = "prompt_tokens", "prefilled_tokens", "recomputed_tokens"
    return [
        (
            "Memory and work",
            [
                gauges("KV usage", {"": "kv_cache_usage_perc"}, "percentunit", max=1),
                gauges("Running and waiting", {"running": "num_requests_running", "waiting": "num_requests_waiting"}),
                gauges("Leased blocks", {"leased": "leased_blocks", "of": "kv_blocks"}),
                gauges("Known states", {"": "known_states"}),
            ],
        ),
        (
            "Tokens",
            [
                panel(
                    "Prompt tokens: needed, prefilled, recomputed",
                    _about(*tokens),
                    [
                        (label, rate(name))
                        for label, name in zip(("needed", "prefilled", "recomputed"), tokens, strict=True)
                    ],
                    "cps",
                ),
                panel(
                    "Recompute ratio",
                    "Prefilled tokens / prompt tokens. 0: all was found in memory. 1: nothing was.",
                    [("ratio", RECOMPUTE_RATIO)],
                    "percentunit",
                    max=1,
                ),
                by_labels("Hits by source", "prefix_hit_tokens", "cps"),
                panel(
                    "Generated tokens and steps",
                    _about("generated_tokens", "steps"),
                    [("tokens", rate("generated_tokens")), ("steps", rate("steps"))],
                    "cps",
                ),
            ],
        ),
        (
            "Latency",
            [
                latency("Time to first token", "time_to_first_token_seconds"),
                latency("Between tokens", "inter_token_latency_seconds"),
                latency("End to end", "e2e_request_latency_seconds"),
            ],
        ),
        (
            "Pressure and trouble",
            [
                events("Preemptions", "preemptions"),
                events("Revoked blocks", "revoked_blocks"),
                events("Engine restarts", "engine_restarts"),
            ],
        ),
        (
            "Jobs: KV kept between their turns",
            [
                panel(
                    "Pins and what came of them",
                    _about("pin_decisions", "pins", "pin_hits", "pin_late_returns"),
                    [
                        ("decisions", rate("pin_decisions")),
                        ("pins", rate("pins")),
                        ("hits", rate("pin_hits")),
                        ("late", rate("pin_late_returns")),
                    ],
                    "cps",
                ),
                by_labels("Pinned blocks", "pinned_block_seconds", "short"),
                by_labels("Regret against an oracle", "pin_regret_seconds", "s"),
            ],
        ),
        (
            "Tiers: KV besides the device",
            [
                by_labels("Blocks that came back", "tier_loaded_blocks", "cps"),
                by_labels("Blocks copied out", "tier_stored_blocks", "cps"),
                by_labels("Stores and loads that failed", "tier_errors", "cps"),
            ],
        ),
        (
            "Tenants",
            [
                by_labels("Requests by tenant and outcome", "requests", "reqps"),
                by_labels("Tokens by tenant and kind", "tenant_tokens", "cps"),
            ],
        ),
    ]


def panels() -> list[Json]:
    """Rows below each other, and the panels of a row side by side."""
    placed: list[Json] = []
    numbers = itertools.count(1)
    top = 0
    known = rows()
    for title, inside in [*known, ("Others", others(known))]:
        if not inside:
            continue
        grid = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        placed.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": grid, "id": next(numbers)}
        )
        width = _WIDTH // len(inside)
        for column, made in enumerate(inside):
            grid = {"x": column * width, "y": top + 1, "w": width, "h": _HEIGHT}
            placed.append(made | {"gridPos": grid, "id": next(numbers)})
        top += 1 + _HEIGHT
    return placed


def variables() -> list[Json]:
    instances = f"label_values({series('engine_restarts')}, instance)"  # there even while no engine runs
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "instance",
            "label": "Instance",
            "type": "query",
            "datasource": _SOURCE,
            "definition": instances,
            "query": {"query": instances, "refId": "instances"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def dashboard() -> Json:
    return {
        "uid": "segue",
        "title": "Segue",
        "description": "Made by deploy/make_dashboard.py.",
        "tags": ["segue", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
