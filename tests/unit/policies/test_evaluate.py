"""The judge: known rules on made-up traces, files of every kind, and the table of the docs where its data is."""

import gzip
import json
import os
import random
import re
from pathlib import Path

import pytest

from segue.base.errors import InvalidRequest
from segue.cli import main
from segue.policies import Call
from segue.policies.evaluate import BENEFITS, Recorded, judge, read_trace, utility

DATA = Path(os.environ.get("SEGUE_TEST_DATA", "/nowhere")) / "agents" / "tool_durations.csv.gz"


def made_up(num_runs=30, calls=40, seed=1):
    """Commands that differ, and runs that differ in one of them."""
    randomly = random.Random(seed)
    for run in range(num_runs):
        slow = randomly.choice([0.3, 20.0])
        for _ in range(calls):
            key, typical = randomly.choice([("ls", 0.02), ("cat", 0.05), ("pytest", slow), ("pip install", 8.0)])
            seconds = typical * randomly.lognormvariate(0, 0.3)
            yield Recorded(str(run), Call("bash", key, str(run)), seconds)


def test_the_utility_is_the_benefit_if_it_was_enough_less_the_time():
    assert utility(1.0, 2.0, 5.0) == 4.0 and utility(3.0, 2.0, 5.0) == -2.0 and utility(3.0, 0.0, 5.0) == 0.0


def test_on_commands_that_differ_adaptive_is_best_at_every_benefit():
    shares = judge(list(made_up()))
    for at in range(len(BENEFITS)):
        best = max(values[at] for name, values in shares.items() if name != "adaptive")
        assert shares["adaptive"][at] >= best - 0.005
    assert sum(shares["adaptive"]) / len(BENEFITS) > 0.93


def test_traces_of_every_kind(tmp_path):
    rows = "session,name,seconds,command\na,Bash,1.5,cd x && pytest\na,Read,,\nb,mcp__git__log,2,\n"
    (tmp_path / "a.csv").write_text(rows)
    expected = [("a", "bash", "pytest", 1.5), ("b", "mcp__git__log", "git.log", 2.0)]
    assert [(r.run, r.call.tool, r.call.key, r.seconds) for r in read_trace(tmp_path / "a.csv")] == expected
    turns = [{"tools": [{"name": "Bash", "cmd": "ls", "dur": 0.5}, {"name": "Read", "dur": None}]}, {}]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"run": "r", "turns": turns}).encode()))
    assert [record.call.key for record in read_trace(tmp_path / "b.jsonl.gz")] == ["ls"]
    inner = [{"stop": "tool_use", "think_time": 0}, {"stop": "end", "think_time": 7}]
    requests = [inner[0], {"requests": inner}, {"stop": "tool_use", "think_time": 3}, {"stop": "x", "think_time": 4}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "s", "requests": requests}) + "\n")
    assert [record.seconds for record in read_trace(tmp_path / "c.jsonl")] == [7.0, 4.0]


@pytest.mark.parametrize(
    "data", [b"", b"a,b\n1,2\n", b"run,tool,dur\nr,t,\n", b"run,tool,dur\nr,t,soon\n", b"{}", b"[1]", b"\xff", b"\x1f\x8b broken"]
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_name(tmp_path, data, capsys):
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match="trace"):
        read_trace(path)
    assert main(["policies", "evaluate", "--trace", str(path)]) == 2
    assert "trace" in capsys.readouterr().err


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    rows = [f"{record.run},bash,{record.seconds},{record.call.key}" for record in made_up(6, 20)]
    (tmp_path / "t.csv").write_text("\n".join(["run,tool,dur,cmd", *rows]))
    assert main(["policies", "evaluate", "--trace", str(tmp_path / "t.csv"), "--benefit", "1,4"]) == 0
    shown = capsys.readouterr().out
    assert "120 calls of 6 runs" in shown and re.search(r"adaptive +\S+ +\S+ +\S+\n", shown) and "oracle" in shown
    assert main(["policies", "evaluate", "--trace", str(tmp_path / "t.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_calls"] == 120
    assert main(["policies", "evaluate", "--trace", str(tmp_path / "t.csv"), "--benefit", "0"]) == 2


@pytest.mark.skipif(not DATA.exists(), reason="set SEGUE_TEST_DATA to the folder with agents/tool_durations.csv.gz")
def test_the_table_in_the_docs_is_what_the_judge_says():
    shares = judge(read_trace(DATA))
    for at in range(len(BENEFITS)):
        assert shares["adaptive"][at] >= max(values[at] for values in shares.values()) - 0.005
    means = {name: sum(values) / len(values) for name, values in shares.items()}
    assert means["adaptive"] == max(means.values()) >= 0.93
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    for name, values in shares.items():
        label = name.replace("tau", "τ")
        [row] = [
            line for line in page.splitlines() if line.replace("*", "").startswith(f"| {label} | ") and "." in line
        ]
        written = [float(cell.strip(" *").replace("−", "-")) for cell in row.split("|")[2:-1]]
        assert written == pytest.approx([*values, means[name]], abs=0.0015), name
