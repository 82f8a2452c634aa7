"""Tenants: what one has, the others cannot see, continue, time or push out."""

import json

import pytest

from tests.servers import running

A, B = "key-of-the-first", "key-of-the-second"
KEYS = f"""
[[tenant]]
name = "first"
key = "{A}"
lease_quota = 4

[[tenant]]
name = "second"
key = "{B}"
max_concurrent = 2

[[tenant]]
name = "slow"
key = "key-of-the-slow-one"
requests_per_minute = 6

[[tenant]]
name = "{"x" * 127}1"
key = "key-of-a-long-name"

[[tenant]]
name = "{"é" * 127}2"
key = "key-of-a-longer-name"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.toml").write_text(KEYS)
    options = ["--keys", str(folder / "keys.toml"), "--state-dir", str(folder / "states")]
    with running("tiny", *options, env={"SEGUE_API_KEYS": "key-from-outside"}) as started:
        yield started


def complete(server, key, prompt="The same prompt for everybody, long enough.", **fields):
    return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, **fields}, key=key)


@pytest.mark.parametrize("key", [None, "wrong", A[:-1], A + "x", "é"])
def test_without_a_key_there_is_no_entry(server, key):
    quoted = key.encode().decode("latin-1") if key else None
    status, headers, body = server.get("/v1/models", key=quoted)
    assert status == 401 and headers["www-authenticate"] == "Bearer"
    assert "API key" in body["error"]["message"]
    assert complete(server, quoted)[0] == 401


def test_keys_from_the_file_and_from_the_environment_open(server):
    for key in (A, B, "key-from-outside"):
        assert server.get("/v1/models", key=key)[0] == 200


def test_the_same_prompt_of_another_tenant_is_no_hit(server):
    complete(server, A)
    hit = complete(server, A)[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit > 30
    assert complete(server, B)[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    salted = complete(server, A, cache_salt="mine")[2]
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_another_tenants_state_is_as_unknown_as_one_that_never_was(server):
    state = complete(server, A, hold_seconds=30)[2]["id"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    dialogue = server.post("/v1/chat/completions", chat | {"hold_seconds": 30}, key=A)[2]["id"]
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2}, key=A)[2]["id"]

    def everything(key, known):
        asked = {
            "continue": server.post("/v1/completions", {"continuation_of": known, "max_tokens": 2}, key=key),
            "chat": server.post("/v1/chat/completions", chat | {"continuation_of": known}, key=key),
            "respond": server.post("/v1/responses", {"input": "x", "previous_response_id": known}, key=key),
            "response": server.get(f"/v1/responses/{known}", key=key),
            "show": server.get(f"/v1/states/{known}", key=key),
            **{
                verb: server.post(f"/v1/states/{verb}/{known}", {}, key=key)
                for verb in ("fork", "hold", "release", "save")
            },
        }
        return {verb: (status, json.dumps(body).replace(known, "ID")) for verb, (status, _, body) in asked.items()}

    unknown = everything(B, "cmpl-000000000000000000000000")
    assert {status for status, _ in unknown.values()} == {404}
    for known in (state, dialogue, response):
        assert everything(B, known) == unknown
    listed = {known["id"] for known in server.get("/v1/states", key=B)[2]["data"]}
    assert not listed & {state, dialogue, response}
    assert server.get(f"/v1/states/{state}", key=A)[0] == 200
    assert server.post("/v1/completions", {"continuation_of": state, "max_tokens": 2}, key=A)[0] == 200
    assert server.get(f"/v1/states/{state}?cache_salt=other", key=A)[0] == 404


def test_a_tenant_with_a_long_name_saves_states_too(server):
    for key in ("key-of-a-long-name", "key-of-a-longer-name"):
        state = complete(server, key)[2]["id"]
        assert server.post(f"/v1/states/save/{state}", {"name": key}, key=key)[0] == 200
        assert [entry["name"] for entry in server.get("/v1/states/saved", key=key)[2]["data"]] == [key]


def test_saved_states_are_the_tenants_own(server):
    state = complete(server, A, hold_seconds=30)[2]["id"]
    assert server.post(f"/v1/states/save/{state}", {"name": "s"}, key=A)[0] == 200
    assert server.get("/v1/states/saved", key=B)[2]["data"] == []
    assert server.post("/v1/states/load", {"name": "s"}, key=B)[0] == 404
    assert server.post("/v1/states/load", {"name": "s"}, key=A)[0] == 200


def test_a_quota_is_the_tenants_alone(server):
    for known in server.get("/v1/states", key=A)[2]["data"]:
        server.post(f"/v1/states/release/{known['id']}", key=A)
    for number in range(5):
        salt = "" if number % 2 else "one of its own"  # another scope, and the same tenant
        complete(server, A, f"number {number}: a prompt of some length for a quota", hold_seconds=30, cache_salt=salt)
        complete(server, B, f"number {number}: a prompt of some length for a quota", hold_seconds=30)
    paths = {A: ["/v1/states", "/v1/states?cache_salt=one%20of%20its%20own"], B: ["/v1/states"]}
    held = {
        key: [state for path in paths[key] for state in server.get(path, key=key)[2]["data"] if state["num_held"]]
        for key in paths
    }
    assert 0 < sum(-(-state["num_held"] // 16) for state in held[A]) <= 4
    assert len(held[B]) >= 5


def test_a_tenants_states_outlive_a_flood_of_anothers_work(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    options = ["--keys", str(tmp_path / "keys.toml"), "--num-blocks", "81", "--max-model-len", "512"]
    with running("tiny", *options, env={"SEGUE_API_KEYS": "key-from-outside"}) as small:  # shares of 12 blocks of 80
        mine = complete(small, "key-from-outside", "x" * 150, hold_seconds=600)[2]["id"]
        before = small.get(f"/v1/states/{mine}", key="key-from-outside")[2]["num_held"]
        for number in range(12):
            assert complete(small, B, chr(97 + number) * 400, hold_seconds=600)[0] == 200
        assert small.metric("revoked_blocks_total") > 50
        after = small.get(f"/v1/states/{mine}", key="key-from-outside")[2]
        assert after["num_held"] == before > 140


def test_a_tenant_over_its_limits_is_told_when_to_come_back(server):
    statuses = [complete(server, "key-of-the-slow-one", "x")[:2] for _ in range(3)]
    assert [status for status, _ in statuses] == [200, 429, 429]
    assert 1 <= int(statuses[1][1]["retry-after"]) <= 10
    assert complete(server, B, "x")[0] == 200
    status, _, body = complete(server, B, ["one", "two", "three"])
    assert status == 400 and "at most 2" in body["error"]["message"] and body["error"]["param"] == "prompt"
    assert complete(server, B, ["one", "two"])[0] == 200


def test_counts_are_by_tenant_and_keys_are_never_written(server):
    assert server.metric("requests_total", tenant="first", outcome="finished") > 0
    assert server.metric("tenant_tokens_total", tenant="second", kind="generated") > 0
    log, metrics = server.log(), server.get("/metrics")[2]
    assert '"tenant": "first"' in log
    for key in (A, B, "key-from-outside", "key-of-the-slow-one"):
        assert key not in log and key not in metrics


def test_beyond_this_machine_only_with_keys(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-m", "segue", "serve", "tiny", "--port", "0", "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "--keys" in refused.stderr
