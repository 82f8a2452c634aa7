"""The five-turn job with tool calls between, over HTTP, and the verbs from the command line."""

import json
import re
import subprocess
import sys

import pytest

from tests.servers import running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running("tiny", "--state-dir", str(tmp_path_factory.mktemp("states"))) as started:
        yield started


def segue(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "segue", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def continuum(tmp_path_factory):
    learned = tmp_path_factory.mktemp("learned") / "continuum.json"
    with running("tiny", "--policy", "continuum", "--policy-state", str(learned)) as started:
        yield started
    assert json.loads(learned.read_text())["policy"] == "continuum"


@pytest.mark.parametrize(("policy", "options"), [("adaptive", []), ("adaptive", ["--hold"]), ("continuum", [])])
def test_kv_stays_through_the_gaps_and_goes_at_the_end(request, policy, options):
    server = request.getfixturevalue("continuum" if policy == "continuum" else "server")
    shown = segue("verify-pins", server.url, "--gap", "0.7", *options)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    rows = [[int(number) for number in re.findall(r"\d+", line)] for line in shown.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]
    assert all(line.endswith("yes") for line in shown.stdout.splitlines()[1:])
    prompts = [row[1] for row in rows]
    assert prompts == sorted(prompts) and all(row[2] > 0 for row in rows[1:])
    assert [row[-2] == row[-1] for row in rows] == [True] * 5
    assert rows[-1][-1] == 0 and all(row[-1] > 0 for row in rows[:-1])
    assert server.usage() == 0.0


def test_decisions_can_be_seen(continuum):
    command = "```bash\npytest -q\n```"
    chat = [{"role": "user", "content": f"Say exactly this:\n{command}"}]
    for turn in range(3):
        body = {"messages": chat, "max_tokens": 20, "job_id": "seen", "is_last_step": turn == 2, "ignore_eos": True}
        answer = continuum.post("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
        chat = [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    found = continuum.get("/v1/decisions?job_id=seen")[2]["data"]
    assert [entry["outcome"] for entry in found] == ["returned", "returned"]
    assert all(entry["keep_seconds"] == 2 and entry["pinned_time"] == entry["gap_seconds"] for entry in found)
    assert all(entry["hit_length"] > 50 for entry in found)  # the answer's text may be other tokens when it comes back
    assert [entry["unpinned_time"] for entry in found] == [0, 0]
    shown = segue("decisions", continuum.url, "--job", "seen")
    assert shown.returncode == 0 and shown.stdout.count("returned") == 2, shown.stdout
    lines = segue("decisions", continuum.url, "--job", "seen", "--json").stdout.splitlines()
    assert [json.loads(line)["job_id"] for line in lines] == ["seen", "seen"]
    assert continuum.metric("pins_total", tool="none") >= continuum.metric("pin_hits_total", tool="none") >= 2
    assert continuum.metric("pinned_block_seconds_total", tool="none", kind="used") > 0
    assert continuum.get("/v1/decisions?limit=0")[0] == 400


def test_it_says_so_when_kv_is_not_held(server):
    """Something else that holds memory is seen: the table is not made of what it expects."""
    held = server.post("/v1/completions", {"prompt": "x" * 100, "max_tokens": 2, "hold_seconds": 60})[2]["id"]
    shown = segue("verify-pins", server.url, "--gap", "0.1")
    server.post(f"/v1/states/release/{held}")
    assert shown.returncode == 1 and "NO" in shown.stdout


def test_turns_beside_each_other_keep_what_they_hold(server):
    """Only what a job held when a turn came is given back at the turn's end."""

    def turn(**fields):
        body = {"max_tokens": 4, "job_id": "side by side", "hold_seconds": 60, **fields}
        return server.post("/v1/completions", body)[2]["id"]

    def held():
        return {state["id"] for state in server.get("/v1/states")[2]["data"] if state["num_held"]}

    first = turn(prompt="the first turn of a job")
    body = {"prompt": "slow", "max_tokens": 900, "ignore_eos": True, "job_id": "side by side", "hold_seconds": 60}
    command = [
        "curl",
        "-s",
        f"{server.url}/v1/completions",
        "-H",
        "content-type: application/json",
        "-d",
        json.dumps(body),
    ]
    slow = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server.wait_until(lambda: server.metric("num_requests_running") == 1)
    quick = turn(prompt="a quick one beside it")
    assert held() == {quick}
    assert first not in held()
    answer = slow.communicate(timeout=60)[0]
    slow_id = json.loads(answer)["id"]
    assert held() == {quick, slow_id}
    server.post("/v1/completions", {"prompt": "end", "max_tokens": 2, "job_id": "side by side", "is_last_step": True})
    assert held() == set()


def test_the_verbs_from_the_command_line(server):
    state = server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 4, "hold_seconds": 60})[2]["id"]
    remote = ("remote", "--url", server.url)
    assert state in segue(*remote, "list").stdout
    forked = segue(*remote, "fork", state, "--at", "20").stdout
    assert "20 tokens, 20 held until released" in forked
    assert (
        "9 s" in segue(*remote, "hold", state, "--seconds", "9").stdout
        or "held 9" in segue(*remote, "show", state).stdout
    )
    assert "bytes" in segue(*remote, "save", state, "--name", "one").stdout
    assert segue(*remote, "saved").stdout == "one\n"
    assert "none held" in segue(*remote, "release", state).stdout
    loaded = segue(*remote, "load", "one").stdout
    assert " held until released" in loaded
    missing = segue(*remote, "show", "none")
    assert missing.returncode == 2 and "none" in missing.stderr
    nobody = segue("remote", "--url", "http://127.0.0.1:9", "list")
    assert nobody.returncode == 1 and "does not answer" in nobody.stderr
