"""Recorded traces as workloads: hand-made lines of each kind, what is refused, and the real files where they are."""

import gzip
import json
import os
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.bench.play import Player
from segue.bench.traces import describe, read_trace
from segue.bench.workload import Run, Texts
from segue.sim import SimulatedEngine, StepCosts, find_hardware, find_shape

DATA = Path(os.environ.get("SEGUE_TEST_DATA", "/nowhere")) / "agents"


def written(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def request(t, prompt, keep, add, *, out=10, think=1.0, **more):
    timed = {
        "t": t,
        "type": "n",
        "in": prompt,
        "out": out,
        "api_time": 1.0,
        "think_time": think,
        "keep": keep,
        "add": add,
    }
    return {name: value for name, value in (timed | more).items() if value is not None}


def session(*requests, name="s", **more):
    return {"id": name, "block_size": 64, "requests": list(requests)} | more


def prompts(job):
    """The tokens of each prompt, as a player lays them down; an answer is like nothing else."""
    texts, said, found = Texts(32_000), array("i"), []
    for at, turn in enumerate(job.turns):
        if turn.keep is not None:
            del said[turn.keep :]
        texts.append(said, turn.added)
        found.append(list(said))
        texts.append(said, [Run(2**40 + at, 0, turn.num_output)])
    return found


def shared(one, other):
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Sessions

CODING = (
    request(0.0, 300, 0, [[1, 4]], think=0.0, stop="tool_use"),
    {
        "t": 32.0,
        "type": "subagent",
        "agent_id": "a1",
        "duration_ms": 30_000,
        "requests": [request(0.0, 130, 0, [[1, 1], [50, 1]]), request(9.0, 200, 2, [[52, 1]], think=2.5)],
    },
    {
        "t": 35.0,
        "type": "subagent",
        "agent_id": "a2",
        "duration_ms": None,
        "requests": [request(0.0, 70, 0, [[50, 1]])],
    },
    request(40.0, 520, 4, [[5, 4]], think=38.0, type="s", stop="end_turn"),
    request(90.0, 600, 3, [[20, 2], [7, 4]], think=48.0, out=0),
)


def test_a_session_has_the_prompts_that_were_recorded_and_keeps_what_they_kept(tmp_path):
    workload = read_trace(written(tmp_path / "coding.jsonl", session(*CODING)))
    assert workload.name == "replay coding" and [job.id for job in workload.jobs] == ["s", "s/a1", "s/a2"]
    main, first, second = workload.jobs
    assert [job.prompt_lengths() for job in workload.jobs] == [[300, 520, 600], [130, 200], [70]]
    assert [len(prompt) for prompt in prompts(main)] == [300, 520, 600]
    assert [shared(*pair) for pair in pairwise(prompts(main))] == [4 * 64, 3 * 64]
    assert shared(*prompts(first)) == 2 * 64
    assert [turn.gap_seconds for turn in main.turns] == [38.0, 48.0, 0.0] and first.turns[0].gap_seconds == 2.5
    assert [turn.num_output for turn in main.turns] == [10, 10, 1]
    assert [turn.tool for turn in main.turns] == ["tool", "", ""]
    assert (main.at, first.at, second.at) == (0.0, 2.0, 35.0)


def test_the_same_block_is_the_same_text_in_a_session_and_in_no_other(tmp_path):
    workload = read_trace(written(tmp_path / "t", session(*CODING), session(*CODING, name="other")))
    said = {job.id: prompts(job) for job in workload.jobs}
    assert shared(said["s"][0], said["s/a1"][0]) == 64  # block 1
    assert said["s/a1"][0][64:128] == said["s/a2"][0][:64]  # block 50
    assert said["s"][1][6 * 64 : 8 * 64] == said["s"][2][5 * 64 : 7 * 64]  # blocks 7 and 8
    assert [shared(said[name][0], said[f"other{name[1:]}"][0]) for name in ("s", "s/a1", "s/a2")] == [0, 0, 0]


def test_consecutive_blocks_are_one_run_and_what_has_no_block_is_its_own(tmp_path):
    [job] = read_trace(written(tmp_path / "t", session(request(0.0, 64_010, 0, [[1, 1000]])))).jobs
    blocks, rest = job.turns[0].added
    assert blocks[1:] == (64, 64_000) and rest.length == 10 and rest.text != blocks.text
    assert max(blocks.text, rest.text) < 2**63


@pytest.mark.parametrize(
    ("prompt", "keep", "add", "kept"),
    [
        (100, 0, [[9, 5]], 0),
        (700, 2, [[9, 1]], 128),
        (200, 4, [], 200),
        (310, 4, [[9, 0]], 256),
        (900, 5, [[9, 9]], 300),
    ],
)
def test_blocks_are_cut_or_made_up_to_the_length_that_was_recorded(tmp_path, prompt, keep, add, kept):
    first = request(0.0, 300, 0, [[1, 5]])
    [job] = read_trace(written(tmp_path / "t", session(first, request(9.0, prompt, keep, add)))).jobs
    assert job.prompt_lengths() == [300, prompt] and shared(*prompts(job)) == kept


@pytest.mark.parametrize(
    ("api_time", "think", "gap"),
    [(1.0, 7.0, 7.0), (None, 7.0, 7.0), (None, 90.0, 20.0), (4.0, None, 16.0), (30.0, None, 0.0)],
)
def test_a_gap_is_what_was_recorded_but_not_longer_than_it_can_have_been(tmp_path, api_time, think, gap):
    requests = request(5.0, 100, 0, [[1, 1]], api_time=api_time), request(25.0, 100, 1, [], think=think)
    [job] = read_trace(written(tmp_path / "t", session(*requests))).jobs
    assert job.turns[0].gap_seconds == gap


# Programs


def tool(name, dur, *, cmd="", t=None, chars=40):
    return {"name": name, "cmd": cmd, "input_chars": chars, "t": t, "dur": dur}


def turn(in_total, *tools, out=2, chars=0, **more):
    return {
        "side": False,
        "in_total": in_total,
        "cache_read": None,
        "out": out,
        "text_chars": chars,
        "tools": list(tools),
    } | more


def program(*turns, name="r"):
    return {"run": name, "turns": list(turns)}


def test_a_program_grows_by_its_answers_and_its_tools(tmp_path):
    run = program(
        turn(100, tool("Bash", 1.5, cmd="cd x && pytest"), chars=60),  # (60 + 40) / 4 are more than 2
        turn(500, tool("Bash", 9.0), side=True),
        turn(180, tool("Read", 0.5), out=30),
        turn(200, tool("mcp__git__log", None), out=3, chars=4),  # 30 tokens, of which 20 came back
        turn(260, tool("Grep", 2.0)),
        turn(0, chars=200),
    )
    [job] = read_trace(written(tmp_path / "t", run)).jobs
    assert job.id == "r" and job.prompt_lengths() == [100, 180, 200, 260]
    assert [each.num_output for each in job.turns] == [25, 30, 11, 10]
    assert [each.keep for each in job.turns] == [None, None, 180, None]
    assert [shared(*pair) for pair in pairwise(prompts(job))] == [100, 180, 200]
    assert [each.gap_seconds for each in job.turns] == [1.5, 0.5, 0.0, 0.0]
    used = [(each.tool, each.command) for each in job.turns]
    assert used == [("bash", "cd x && pytest"), ("Read", ""), ("mcp__git__log", ""), ("", "")]


@pytest.mark.parametrize(
    ("cached", "in_total", "kept"),
    [(None, 400, 100), (80, 400, 80), (0, 400, 0), (None, 60, 60), (900, 400, 400), (None, 1000, 1000)],
)
def test_of_a_context_that_was_compacted_what_was_cached_is_kept_or_the_first_prompt(tmp_path, cached, in_total, kept):
    run = program(turn(100), turn(1000), turn(in_total, cache_read=cached))
    [job] = read_trace(written(tmp_path / "t", run)).jobs
    assert job.turns[2].keep == kept and job.prompt_lengths()[2] == in_total


@pytest.mark.parametrize(
    ("tools", "seconds", "name"),
    [
        ([tool("A", 5.0, t="2030-01-02T10:20:10Z"), tool("B", 3.0, t="2030-01-02T10:20:11.5Z")], 5.0, "A"),
        ([tool("A", 5.0, t="2030-01-02T10:20:10Z"), tool("B", 5.5, t="2030-01-02T10:20:14Z")], 9.5, "B"),
        ([tool("A", 5.0, t="2030-01-02T10:20:10Z"), tool("B", 3.0)], 5.0, "A"),
        ([tool("A", None), tool("B", 3.0)], 3.0, "B"),
        ([], 0.0, ""),
    ],
)
def test_a_program_is_away_from_its_first_tools_start_to_its_last_ones_end(tmp_path, tools, seconds, name):
    [job] = read_trace(written(tmp_path / "t", program(turn(100, *tools), turn(1000)))).jobs
    assert job.turns[0].gap_seconds == seconds and job.turns[0].tool == name


# Single requests

MOONCAKE = (
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1300, "output_length": 0, "hash_ids": [0, 1, 7]},
    {"timestamp": 9000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 9]},
)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2030-01-02 23:59:58.2500000,300,40
2030-01-03 00:00:02.2500000,20,100"""


def test_requests_of_mooncake_share_the_blocks_that_they_shared(tmp_path):
    jobs = read_trace(written(tmp_path / "t", *MOONCAKE)).jobs
    assert [job.at for job in jobs] == [0.0, 0.0, 6.0]
    assert [job.prompt_lengths() for job in jobs] == [[1100], [1300], [1030]]
    assert [job.turns[0].num_output for job in jobs] == [5, 1, 7]
    first, second, third = (prompts(job)[0] for job in jobs)
    assert (shared(first, second), shared(first, third)) == (1024, 512)
    assert len(jobs[0].turns[0].added) == 1 and jobs[2].turns[0].added[-1].length == 6


def test_requests_of_azure_share_nothing(tmp_path):
    path = tmp_path / "azure.conv.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    workload = read_trace(path)
    first, second = workload.jobs
    assert workload.name == "replay azure.conv"
    assert (first.at, first.prompt_lengths(), first.turns[0].num_output) == (0.0, [300], 40)
    assert (second.at, second.prompt_lengths(), second.turns[0].num_output) == (pytest.approx(4.0), [20], 100)
    assert shared(prompts(first)[0], prompts(second)[0]) == 0


# Options


def test_jobs_that_are_too_long_are_left_out_and_the_first_others_taken(tmp_path):
    path = written(tmp_path / "t", *MOONCAKE)
    workload = read_trace(path, max_tokens=1105)
    assert [job.prompt_lengths() for job in workload.jobs] == [[1100], [1030]] and workload.settings["left_out"] == 1
    assert [job.prompt_lengths() for job in read_trace(path, max_tokens=1104, limit=1).jobs] == [[1030]]
    assert len(read_trace(path, limit=2).jobs) == 2
    with pytest.raises(InvalidRequest, match=r"max_tokens.* 3 jobs of t"):
        read_trace(path, max_tokens=100)


def test_recorded_times_are_stretched_to_a_rate(tmp_path):
    path = written(tmp_path / "t", *MOONCAKE)
    assert [job.at for job in read_trace(path, rate=0.5, time_scale=3.0).jobs] == [0.0, 0.0, 4.0]
    assert [job.at for job in read_trace(path, limit=1, rate=0.5).jobs] == [0.0]
    with pytest.raises(InvalidRequest, match=r"rate.* 2 jobs"):
        read_trace(path, limit=2, rate=0.5)


def test_others_come_at_random_at_a_rate_and_a_subagent_after_its_session(tmp_path):
    sessions = [session(*CODING, name=f"s{number:03}") for number in range(200)]
    path = written(tmp_path / "t", *sessions)
    once, again, other = (read_trace(path, rate=4.0, seed=seed) for seed in (1, 1, 2))
    assert once == again and once.jobs != other.jobs
    at = {job.id: job.at for job in once.jobs}
    assert min(at.values()) == 0.0
    assert max(at[f"s{number:03}"] for number in range(200)) == pytest.approx(50.0, rel=0.1)
    assert all(at[f"s{number:03}/a1"] == pytest.approx(at[f"s{number:03}"] + 2.0) for number in range(200))


def test_a_time_scale_multiplies_gaps_and_when_subagents_come(tmp_path):
    jobs = read_trace(written(tmp_path / "t", session(*CODING)), time_scale=0.5).jobs
    assert [each.gap_seconds for each in jobs[0].turns] == [19.0, 24.0, 0.0] and jobs[1].at == 1.0


def test_a_description_counts(tmp_path):
    told = describe(read_trace(written(tmp_path / "t", session(*CODING)), max_tokens=500))
    assert (told["jobs"], told["turns"], told["left_out"], told["format"]) == (2, 3, 1, "sessions")
    assert told["prompt_tokens"] == {"count": 3, "mean": 400 / 3, "p50": 130, "max": 200}
    assert told["output_tokens"]["mean"] == 10 and told["gap_seconds"] == {
        "count": 1,
        "mean": 2.5,
        "p50": 2.5,
        "max": 2.5,
    }


@pytest.mark.parametrize(
    "option", [{"limit": 0}, {"max_tokens": 0}, {"rate": 0.0}, {"rate": float("nan")}, {"time_scale": -1.0}]
)
def test_options_that_make_no_sense_are_named(tmp_path, option):
    with pytest.raises(InvalidRequest, match=next(iter(option))):
        read_trace(written(tmp_path / "t", *MOONCAKE), **option)


# Bad files


def broken(entry, **changed):
    return {name: value for name, value in (entry | changed).items() if value is not ...}


FINE = request(0.0, 100, 0, [[1, 1]])
BAD = {
    "requests is missing": session(requests=...),
    "requests must be a list, got 5": session(requests=5),
    r"requests\[0\] must be an object, got 5": session(5),
    "block_size must be a whole number": session(FINE, block_size=0),
    "id is missing": session(FINE, name=None),
    "the id 's' was there before": session(FINE),
    r"requests\[1\].in must be .* got -5": session(FINE, broken(FINE, **{"in": -5})),
    r"requests\[0\].in is missing": session(broken(FINE, **{"in": ...})),
    r"requests\[0\].out must be .* got 1.5": session(broken(FINE, out=1.5)),
    r"requests\[0\].out must be .* got True": session(broken(FINE, out=True)),
    r"requests\[0\].keep must be at most the 0 blocks": session(broken(FINE, keep=1)),
    r"requests\[0\].add is missing": session(broken(FINE, add=...)),
    r"requests\[0\].add\[1\] must be a first id and a count, got \[3\]": session(broken(FINE, add=[[1, 2], [3]])),
    r"requests\[0\].add\[0\] must .* got \[-1, 2\]": session(broken(FINE, add=[[-1, 2]])),
    r"requests\[1\].think_time must .* got -1": session(FINE, broken(FINE, think_time=-1)),
    r"requests\[1\].think_time must .* got nan": session(FINE, broken(FINE, think_time=float("nan"))),
    r"requests\[1\].t is missing": session(FINE, broken(FINE, t=...)),
    r"requests\[0\].requests\[0\].in is missing": session(
        {"t": 1, "type": "subagent", "agent_id": "a", "requests": [broken(FINE, **{"in": ...})]}
    ),
    r"requests\[0\].agent_id is missing": session({"t": 1, "type": "subagent", "requests": [FINE]}),
    "turns is missing": {"run": "r"},
    "run must be some text, got 7": program(turn(5), name=7),
    r"turns\[0\].in_total must .* got -5": program(turn(-5)),
    r"turns\[0\].out is missing": program(turn(5, out=None)),
    r"turns\[0\].side must be true or false, got 3": program(turn(5, side=3)),
    r"turns\[0\].tools\[0\].dur must .* got -2": program(turn(5, tool("A", -2))),
    r"turns\[0\].tools\[0\].t must be a date and time, got 'noon'": program(turn(5, tool("A", 2, t="noon"))),
    r"turns\[0\].tools\[0\].name is missing": program(turn(5, tool(None, 2))),
    "hash_ids is missing": broken(MOONCAKE[0], hash_ids=...),
    r"hash_ids\[1\] must .* got 'x'": broken(MOONCAKE[0], hash_ids=[1, "x"]),
    "input_length must .* got 0": broken(MOONCAKE[0], input_length=0),
    "output_length must .* got -1": broken(MOONCAKE[0], output_length=-1),
    "timestamp must .* got -1": broken(MOONCAKE[0], timestamp=-1),
    "timestamp must .* got '0'": broken(MOONCAKE[0], timestamp="0"),
}


@pytest.mark.parametrize("says", BAD)
def test_a_bad_value_is_named_with_its_line_and_field(tmp_path, says):
    bad = {name: value for name, value in BAD[says].items() if value is not ...}
    first = program(turn(5), name="s") if "run" in bad else MOONCAKE[0] if "timestamp" in bad else session(FINE)
    with pytest.raises(InvalidRequest, match=f"t.jsonl, line 2: {says}"):
        read_trace(written(tmp_path / "t.jsonl", first, bad))
    if "before" not in says:
        with pytest.raises(InvalidRequest, match=f"t.jsonl, line 1: {says}"):
            read_trace(written(tmp_path / "t.jsonl", bad))


ROW = json.dumps(MOONCAKE[0]).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "t has no entries"),
        (b"\n \n", "t has no entries"),
        (gzip.compress(b""), "t has no entries"),
        (ROW + b"\n\n{broken\n", "line 3: is no JSON"),
        (ROW + b"\n" + ROW[:30], "line 2: is no JSON"),
        (b'{"a":' * 100_000, "line 1: is no JSON"),
        (ROW + b"\n[1]\n", "line 2: must be a JSON object"),
        (ROW + b"\n\xff\n", "line 2: is no text"),
        (b"{}\n", "line 1: is of no known kind"),
        (b"a,b\n1,2\n", "line 2: is of no known kind"),
        (b"what is this", "t has no entries"),
        (gzip.compress(ROW * 100)[:-20], "t cannot be read"),
        (gzip.compress(ROW)[:4], "t cannot be read"),
        (gzip.compress(ROW)[:12] + b"\0" * 30, "t cannot be read"),
        (AZURE.encode() + b"\n2030-01-03 00:00:05,-3,4", "line 4: ContextTokens must be .* got '-3'"),
        (AZURE.encode() + b"\n2030-01-03 00:00:05,3", "line 4: GeneratedTokens is missing"),
        (AZURE.encode() + b"\nsoon,3,4", "line 4: TIMESTAMP must be a date and time"),
        (AZURE.encode().replace(b"TIMESTAMP", b"WHEN"), "line 2: TIMESTAMP is missing"),
        (json.dumps(session()).encode(), "t has no requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, data, says):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(InvalidRequest, match=says):
        read_trace(tmp_path / "t")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="gone cannot be read"):
        read_trace(tmp_path / "gone")


# Played


def test_with_memory_to_spare_a_replay_reuses_what_the_trace_kept(tmp_path):
    """The engine's blocks divide the trace's. A subagent finds what its session has said before it, too."""
    workload = read_trace(written(tmp_path / "t", session(*CODING), session(*CODING, name="other")), seed=3)
    costs = StepCosts(find_shape("llama-3.1-8b"), find_hardware("rtx5090"))
    played = Player(workload, SimulatedEngine(costs, EngineConfig(2000, 16, max_model_len=1024))).play()
    assert not played.failed
    reused = {(turn.job, turn.turn): turn.num_reused for turn in played.turns}
    recorded = {("", 0): 0, ("", 1): 4, ("", 2): 3, ("/a1", 0): 1, ("/a1", 1): 2, ("/a2", 0): 0}
    assert reused == {(name + part, at): keep * 64 for name in ("s", "other") for (part, at), keep in recorded.items()}
    assert [turn.num_prompt for turn in played.turns if turn.job == "other"] == [300, 520, 600]


# Real files


def real(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"set SEGUE_TEST_DATA to the folder with agents/{name}")
    return path, [line for line in gzip.decompress(path.read_bytes()).decode().split("\n") if line]


def test_recorded_sessions_are_what_was_recorded():
    path, lines = real("claude_code_traces_delta.jsonl.gz")
    jobs = {job.id: job for job in read_trace(path).jobs}
    agents = {}
    for entry in map(json.loads, lines):
        for each in entry["requests"]:
            name = f"{entry['id']}/{each['agent_id']}" if each["type"] == "subagent" else entry["id"]
            agents.setdefault(name, []).extend(each.get("requests", [each]))
    assert jobs.keys() == agents.keys()
    for name, requests in agents.items():
        turns = jobs[name].turns
        assert jobs[name].prompt_lengths() == [each["in"] for each in requests]
        assert [each.keep for each in turns] == [64 * each["keep"] for each in requests]
        assert [each.num_output for each in turns] == [max(each["out"], 1) for each in requests]
        blocks = [[[run.start // 64, run.length // 64] for run in each.added if run.length >= 64] for each in turns]
        assert blocks == [[span for span in each["add"] if span[1]] for each in requests]


def test_recorded_programs_are_what_was_recorded():
    path, lines = real("program_turns.jsonl.gz")
    jobs = {job.id: job for job in read_trace(path).jobs}
    for entry in map(json.loads, lines):
        lengths = [each["in_total"] for each in entry["turns"] if not each["side"] and each["in_total"]]
        assert jobs[entry["run"]].prompt_lengths() == lengths


def test_recorded_requests_are_what_was_recorded():
    path, lines = real("mooncake_conversation.jsonl.gz")
    jobs, entries = read_trace(path).jobs, [json.loads(line) for line in lines]
    assert [job.prompt_lengths() for job in jobs] == [[entry["input_length"]] for entry in entries]
    assert [job.at * 1000 for job in jobs] == pytest.approx([entry["timestamp"] for entry in entries])
    path, lines = real("azure_conv.csv.gz")
    jobs = read_trace(path, rate=10.0)
    assert [str(job.prompt_lengths()[0]) for job in jobs.jobs] == [line.split(",")[1] for line in lines[1:]]
    assert jobs.rate == pytest.approx(10.0)
