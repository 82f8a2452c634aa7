"""Options of `segue serve` from a file, metrics under vLLM's names, and who runs first."""

import argparse
from pathlib import Path

import pytest

from segue import EngineConfig, EngineCore, Request, SamplingParams
from segue.base.errors import InvalidRequest
from segue.cli import serve
from segue.server.metrics import TABLE, Metrics
from tests.fakes import FakeExecutor


def options(tmp_path, text, *flags):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    words = [*flags, "--config", str(path)]
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve._with_file(parser.parse_args(words, argparse.Namespace(words=words)))


def test_a_file_gives_options_and_a_flag_goes_before_it(tmp_path):
    chosen = options(tmp_path, 'model = "tiny"\nport = 9000\nstate-dir = "kept"\nquiet = true\n', "--port", "9001")
    assert (chosen.model, chosen.port, str(chosen.state_dir), chosen.quiet) == ("tiny", 9001, "kept", True)


def test_a_flag_that_says_what_is_the_default_goes_before_the_file_too(tmp_path):
    text = 'model = "tiny"\nport = 9000\nhost = "127.0.0.2"\nexact = true\nprefix-caching = false\ntier = ["host=1GiB"]'
    chosen = options(tmp_path, text)
    assert (chosen.port, chosen.exact, chosen.prefix_caching, chosen.tiers) == (9000, True, False, ["host=1GiB"])
    flags = ["smollm2", "--por", "8000", "--host", "127.0.0.1", "--no-exact", "--prefix-caching", "--tier", "host=2GiB"]
    chosen = options(tmp_path, text, *flags)
    assert (chosen.model, chosen.port, chosen.host) == ("smollm2", 8000, "127.0.0.1")
    assert (chosen.exact, chosen.prefix_caching, chosen.tiers) == (False, True, ["host=2GiB"])


def test_an_entry_is_read_as_its_flag_is(tmp_path):
    text = 'max-requests = 5\nhead-seconds = 5\ncatalogue = ["a=b"]\nkeys = "k"\nquiet = false\ndtype = "bf16"'
    chosen = options(tmp_path, text)
    assert (chosen.max_requests, chosen.catalogues, chosen.keys) == (5, ["a=b"], Path("k"))
    assert (type(chosen.head_seconds), chosen.quiet, chosen.dtype) == (float, False, "bf16")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("no_such = 1", "no_such"),
        ('port = "x"', "port"),
        ("port = true", "port"),
        ("port = [1, 2]", "port"),
        ("por = 1", "por"),
        ("config = 'a'", "config"),
        ("port =", "TOML|read"),
        ('max-requests = "many"', "max-requests"),
        ('dtype = "fp99"', "dtype"),
        ('quiet = "yes"', "quiet"),
        ("tiers = []", "tiers"),
        ("[host]\na = 1", "host"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, what):
    with pytest.raises(InvalidRequest, match=what):
        options(tmp_path, text)


def test_vllms_names_are_there_when_asked_for():
    stats = {entry.source: 1 for entry in TABLE if entry.source} | {"held_tokens": 1, "reused_tokens": 2}
    plain, both = (Metrics(vllm_names=wanted).render(stats).decode() for wanted in (False, True))
    assert "vllm:" not in plain
    for entry in TABLE:
        assert (f"vllm:{entry.alias}" in both) if entry.alias else (f"vllm:{entry.name}" not in both)


def test_the_smallest_priority_runs_first():
    engine = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, 64, 1), vocab_size=50)
    params = SamplingParams(max_tokens=2, temperature=0)
    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        engine.submit(Request([1, 2, 3], params, request_id=name, priority=priority))
    ended = []
    while engine.has_work:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    assert ended == ["early", "middle", "late"]
