"""Evidence from the command line: sweeps, pictures, boards and fits, and the same workload on a real engine and a real server."""

import json

import pytest

from segue.cli import main
from tests.servers import running


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


SHORT = ["--prompt-tokens", "20,60,110", "--output-tokens", "4,3,5", "--gap-scale", "0.2"]


def test_a_sweep_its_files_and_its_pictures(tmp_path, capsys):
    runs, trace = tmp_path / "runs.jsonl", tmp_path / "trace.jsonl"
    command = ["bench", "agents", "--jps", "4,12", "--seconds", "6", "--policy", "fcfs,adaptive,adaptive+tiers"]
    command += ["--gpu", "rtx6000,rtx5090", "--tier", "host=8GiB", "--out", str(runs), "--trace-out", str(trace)]
    assert main([*command, "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "adaptive + host=8GiB" in said
    assert "mean s" in said
    records = lines(runs)
    assert len(records) == 12
    assert {"commit", "versions", "seed", "coefficients"} <= records[0].keys()
    assert {record["kind"] for record in lines(trace)} == {"turn", "blocks"}
    again = tmp_path / "again.jsonl"
    assert main([*command[:-4], "--out", str(again)]) == 0
    assert again.read_bytes() == runs.read_bytes()  # the same seed, the same bytes, whoever computes them
    pictures = tmp_path / "pictures"
    assert main(["plot", "all", str(runs), str(trace), "--out", str(pictures)]) == 0
    made = {path.name for path in pictures.iterdir()}
    assert {"load-rtx6000.png", "load-rtx5090.png", "panels.png", "gain.png"} <= made


def test_the_board_has_an_oracle_and_fixed_times(capsys):
    command = [
        "leaderboard",
        "--gpu",
        "rtx6000",
        "--seconds",
        "4",
        "--jps",
        "6",
        "--policy",
        "fcfs,fixed-2s,adaptive,oracle",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert {line.split()[0] for line in said.splitlines()[1:5]} == {"fcfs", "fixed-2s", "adaptive", "oracle"}
    assert main([*command, "--json"]) == 0
    assert all(each["low"] <= each["share"] <= each["high"] for each in json.loads(capsys.readouterr().out))


def test_a_trace_is_replayed(tmp_path, capsys):
    path = tmp_path / "requests.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
    )
    assert main(["bench", "replay", str(path), "--gpu", "h100", "--policy", "fcfs", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["jobs"] == 2
    assert record["per_turn_avg_prompt_tokens"] == {"1": 385.0}


def test_an_engine_of_this_process_is_calibrated_and_simulated(tmp_path, capsys):
    found = tmp_path / "found.json"
    assert (
        main(["sim", "calibrate", "--model", "tiny", "--num-blocks", "600", "--rounds", "1", "--out", str(found)]) == 0
    )
    assert json.loads(capsys.readouterr().out) == json.loads(found.read_text())
    load = [
        "bench",
        "agents",
        *SHORT,
        "--jps",
        "20",
        "--seconds",
        "1",
        "--policy",
        "adaptive",
        "--blocks",
        "600",
        "--json",
    ]
    assert main([*load, "--engine", "tiny"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert main([*load, "--calibration", str(found)]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert measured["jobs"] == simulated["jobs"] == 20
    assert measured["per_turn_avg_prompt_tokens"] == simulated["per_turn_avg_prompt_tokens"]
    assert simulated["avg_duration_s"] > 0.02


@pytest.mark.parametrize("ours", [True, False])
def test_the_same_workload_on_a_server(ours, capsys):
    with running("tiny", "--max-model-len", "4096") as server:
        load = ["bench", "agents", *SHORT, "--jps", "10", "--seconds", "1", "--json", "--url", server.url]
        assert main([*load, *([] if ours else ["--other"])]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["jobs"] == 10
        assert record["failed_jobs"] == 0
        assert record["ttft_avg_s"] > 0
        assert record["recompute_ratio"] == 1.0  # what a turn left is found by the next
        assert main(["bench", "stages", "--jps", "2", "--seconds", "1", "--json", "--url", server.url]) == 0
        capsys.readouterr()
        assert main(["bench", "shared-prefix", "--jps", "3", "--seconds", "1", "--json", "--url", server.url]) == 2
        assert "no job of shared-prefix ended: /v1/completions answered 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["bench", "agents", "--policy", "nobody"], "policy"),
        (["bench", "agents", "--gpu", "abacus"], "gpu"),
        (["bench", "agents", "--jps", "many"], "jps"),
        (["bench", "agents", "--jps", "0"], "rate"),
        (["bench", "agents", "--policy", "fcfs+tiers"], "tier"),
        (["bench", "agents", "--engine", "tiny", "--url", "http://localhost:1"], "engine"),
        (["bench", "agents", "--url", "http://127.0.0.1:9"], "url"),
        (["bench", "agents", "--out", "/nowhere/at/all.jsonl"], "out"),
        (["bench", "agents", "--blocks", "5"], "workload"),
        (["bench", "replay", "/nowhere.jsonl"], "trace"),
        (["leaderboard", "/nowhere.jsonl"], "trace"),
        (["plot", "load", "/nowhere.jsonl", "--out", "/tmp"], "results"),
        (["sim", "calibrate", "--rounds", "0"], "rounds"),
        (["sim", "fleet", "--engines", "0"], "engines"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(command, names, capsys):
    assert main(command) == 2
    assert names in capsys.readouterr().err
