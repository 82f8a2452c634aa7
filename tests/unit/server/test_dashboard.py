"""The dashboard and the page of metrics follow the server's table, and name nothing that /metrics does not have."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from segue.kv.tiers import Courier, DiskTier
from segue.policies import Sums
from segue.server.generation import Usage
from segue.server.metrics import TABLE, Metrics

DEPLOY = Path(__file__).parents[3] / "deploy"


def script(name):
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_courier(folder):
    courier = Courier(DiskTier(folder, 1 << 20))
    courier.close(1.0)
    return courier


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Of a server that has answered a request."""
    metrics = Metrics(vllm_names=True)
    metrics.first_token(0.1)
    metrics.inter_token(0.01, 2)
    metrics.request_ended("tenant", "finished", 1.0, Usage(3, 2, 1))
    stats = {entry.source: 1 for entry in TABLE if entry.source is not None} | {"held_tokens": 1, "reused_tokens": 1}
    stats["decisions"] = {"pytest": asdict(Sums(num_decisions=1))}
    stats["tiers"] = [a_courier(tmp_path_factory.mktemp("tier")).info()]
    text = metrics.render(stats).decode()
    return {re.match(r"[\w:]+", line)[0] for line in text.splitlines() if not line.startswith("#")}


def expressions(dashboard):
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found + [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]


def test_the_dashboard_is_what_the_script_makes():
    made = script("make_dashboard")
    assert made.FILE.read_text(encoding="utf-8") == made.text(), "run: python deploy/make_dashboard.py"


def test_the_page_of_metrics_is_what_the_script_makes():
    made = script("make_metrics_doc")
    assert made.FILE.read_text(encoding="utf-8") == made.page(), "run: python deploy/make_metrics_doc.py"


def test_the_dashboard_asks_for_what_there_is(dashboard, series):
    for expression in expressions(dashboard):
        names = re.findall(r"segue:\w+", expression)
        assert names and set(names) <= series, expression
        assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_metric(dashboard):
    shown = " ".join(expressions(dashboard))
    for entry in TABLE:
        assert re.search(rf"segue:{entry.name}(_total|_bucket)?\b", shown), entry.name


def test_every_panel_is_of_the_chosen_source_and_instances(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["expr"].count("segue:") == target["expr"].count('{instance=~"$instance"}')


def test_panels_do_not_overlap(dashboard):
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_the_page_names_what_there_is(series):
    page = script("make_metrics_doc").page()
    for name in re.findall(r"`((?:segue|vllm):\w+)`", page):
        assert name in series or f"{name}_bucket" in series, name


def test_nothing_says_when_a_metric_was_made(series):
    assert not [name for name in series if name.endswith("_created")]


def test_without_an_engine_the_servers_own_metrics_are_there():
    text = Metrics().render({"restarts": 2}).decode()
    assert "segue:engine_restarts_total 2.0" in text and "segue:prefix_hit_tokens" not in text
