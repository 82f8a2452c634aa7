"""The recommender that comes with the examples, served in every way: what it finds is the same, what that costs is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from segue.bench.measures import hit, ndcg, percentile, recall

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples/recommender/trained"
NUM_SUFFIX = 2  # of "</think>\n<|sid_begin|>", what follows a thought that was stopped


def played(*options):
    command = [sys.executable, "-m", "segue", "bench", "two-stage", str(TASK), "--json", "--users", "120", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["popular"], {report["mode"]: report for report in told["modes"]}


def quality(report):
    return {name: value for name, value in report.items() if "@" in name}


@pytest.mark.parametrize("pressure", [False, True])
def test_every_way_finds_the_same_and_two_compute_almost_nothing(pressure):
    popular, modes = played(*(["--pressure"] if pressure else []))
    assert list(modes) == ["resend", "prefix-cache", "continuation", "fused"]
    for report in modes.values():
        assert quality(report) == quality(modes["resend"])
        assert report["illegal_share"] == 0
    assert modes["fused"]["recall@10"] >= 5 * popular["recall@10"] > 0
    for mode in ("continuation", "fused"):
        assert modes[mode]["search_prefill_min"] == modes[mode]["search_prefill_max"] == 1 + NUM_SUFFIX
    assert modes["resend"]["search_prefill_min"] > 20
    if pressure:
        assert modes["prefix-cache"]["search_prefill_mean"] > 20
    else:
        assert modes["prefix-cache"]["search_prefill_max"] <= 1 + NUM_SUFFIX


def test_many_thoughts_find_more():
    _, one = played("--modes", "fused")
    _, many = played("--modes", "continuation,fused", "--thoughts", "8", "--width", "16")
    assert quality(many["fused"]) == quality(many["continuation"])
    assert many["fused"]["recall@10"] > one["fused"]["recall@10"]


def test_without_the_catalogue_some_lines_are_no_items():
    _, modes = played("--modes", "continuation,fused", "--no-catalogue")
    assert 0 < modes["fused"]["illegal_share"] == modes["continuation"]["illegal_share"]


def test_the_example_trains(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples/recommender/make.py"), str(tmp_path / "task"), "--steps", "2"]
    subprocess.run([*command, "--batch", "4"], check=True, capture_output=True, timeout=200)
    command = [sys.executable, "-m", "segue", "bench", "two-stage", str(tmp_path / "task"), "--users", "3"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "continuation" in told and "search_p99_ms" in told


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["nowhere"], "is no task"),
        ([str(TASK), "--modes", "magic", "--users", "1"], "'magic' is not one of"),
        ([str(TASK), "--users", "0"], "users"),
        ([str(TASK), "--url", "http://127.0.0.1:9", "--other", "--modes", "fused"], "fused needs a Segue server"),
    ],
)
def test_what_cannot_be_is_refused(options, why):
    command = [sys.executable, "-m", "segue", "bench", "two-stage", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_measures():
    ranking = ["a", None, "b", "c"]
    assert recall(ranking, {"b", "z"}, 3) == 0.5 and recall(ranking, {"b"}, 2) == 0
    assert hit(ranking, {"z", "c"}, 4) == 1 and hit(ranking, {"z", "c"}, 3) == 0
    assert ndcg(ranking, {"a"}, 1) == 1 and ndcg(ranking, {"b"}, 10) == pytest.approx(0.5)
    assert ndcg(ranking, {"a", "b"}, 3) == pytest.approx(1.5 / (1 + 1 / 1.5849625007))
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([], 0.5) == 0 and percentile([5, 1], 0.99) == 5
