"""Tiers of a live server: what they had is not computed again, not after kill -9 either, and nobody finds what is another's."""

import signal
import subprocess
import sys

import pytest

from tests.servers import running

PROMPT = [(7 * token * token + token) % 256 for token in range(400)]
KEYS = '[[tenant]]\nname = "a"\nkey = "key-of-a"\n\n[[tenant]]\nname = "b"\nkey = "key-of-b"\n'


def answer(server, prompt=PROMPT, key=None):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    status, _, found = server.post("/v1/completions", body, key=key)
    assert status == 200, found
    choice = found["choices"][0]
    return (choice["text"], choice["logprobs"]), found["usage"]["prompt_tokens_details"]["cached_tokens"]


def tier(server, name, key=None):
    rows = {row["tier"]: row for row in server.get("/v1/tiers", key=key)[2]["data"]}
    return rows[name]


def flood(server, key=None):
    """Other prompts take every block of the device."""
    for number in range(3):
        answer(server, [number + 1] * 400, key)


def segue(*arguments):
    return subprocess.run([sys.executable, "-m", "segue", *arguments], capture_output=True, text=True, check=False)


def test_the_host_has_what_the_device_gave_up():
    with running("tiny", "--tier", "host=64MiB", "--num-blocks", "60") as server:
        first, _ = answer(server)
        flood(server)
        again, cached = answer(server)
        assert again == first and cached == 399 // 16 * 16
        assert tier(server, "host")["loaded_blocks"] > 0
        assert server.metric("tier_loaded_blocks_total", tier="host") == tier(server, "host")["loaded_blocks"]
        assert server.metric("prefix_hit_tokens_total", source="tier") > 0
        shown = segue("tiers", server.url)
        assert shown.returncode == 0 and "host" in shown.stdout
        assert segue("tiers", server.url, "--reset").returncode == 0
        again, cached = answer(server)
        assert again == first and cached == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_prefix_outlives_the_server(tmp_path, how):
    options = ["tiny", "--tier", f"disk={tmp_path / 'kv'},64MiB", "--num-blocks", "60"]
    with running(*options) as server:
        first, _ = answer(server)
        server.wait_until(lambda: tier(server, "disk")["blocks"] >= 25)
        engine = server.engine_pid()
        server.stop(how)
        subprocess.run(
            ["tail", f"--pid={engine}", "-f", "/dev/null"], timeout=30, check=True
        )  # it ends with its server
    with running(*options) as server:
        again, cached = answer(server)
        assert again == first and cached == 399 // 16 * 16
        assert tier(server, "disk")["loaded_blocks"] == 24
    checked = segue("tiers", "--verify", str(tmp_path / "kv"))
    assert checked.returncode == 0 and "0 were damaged" in checked.stdout
    path = next((tmp_path / "kv").glob("*/*/*.kv"))
    path.write_bytes(path.read_bytes()[:-5])
    checked = segue("tiers", "--verify", str(tmp_path / "kv"))
    assert checked.returncode == 1 and "1 were damaged" in checked.stdout and not path.exists()


def test_a_tenant_finds_and_resets_its_own_alone(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    options = ["--keys", str(tmp_path / "keys.toml"), "--tier", "host=64MiB", "--tier", f"disk={tmp_path / 'kv'},64MiB"]
    with running("tiny", *options, "--num-blocks", "60") as server:
        first, _ = answer(server, key="key-of-a")
        flood(server, "key-of-a")
        theirs, cached = answer(server, key="key-of-b")
        assert theirs == first and cached == 0
        assert server.get("/v1/tiers")[0] == 401
        assert server.post("/v1/tiers/reset", key="key-of-b")[0] == 200
        flood(server, "key-of-a")
        again, cached = answer(server, key="key-of-a")
        assert again == first and cached > 0
        assert answer(server, key="key-of-b")[1] == 0


def test_what_is_no_tier_is_refused_by_name():
    refused = segue("serve", "tiny", "--tier", "floppy=1")
    assert refused.returncode == 2 and "tier" in refused.stderr and "Traceback" not in refused.stderr
