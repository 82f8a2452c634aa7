"""`segue state` and `segue demo handoff`, as a user meets them."""

import os
import socket
import subprocess
import sys

import pytest

from segue.base.config import Environment
from segue.model.tokenizer import ByteTokenizer

TINY = ("--model", "tiny", "--num-blocks", "400")
MAIN = "import sys; from segue.cli import main; sys.exit(main())"


@pytest.fixture
def segue(tmp_path):
    """Runs the command, with states in a folder of their own and the kernels that are built already."""
    kernels = Environment.read().cache_dir / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels)

    def run(*words, code=MAIN):
        environment = {**os.environ, "SEGUE_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    return run


def done(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result, *complaints):
    """One sentence, and nothing else."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    for complaint in complaints:
        assert complaint in result.stderr


def text_of(ids):
    stream = ByteTokenizer().answer_stream()
    return stream.push(ids) + stream.flush() + "\n"


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "5")], ids=["greedy", "sampled"])
def test_what_is_loaded_goes_on_as_if_it_had_never_stopped(segue, sampling):
    done(segue("state", "save", "whole", "hello there", *TINY, "--max-tokens", "16", *sampling))
    half = segue("state", "save", "half", "hello there", *TINY, "--max-tokens", "8", *sampling)
    done(half)
    assert "half: 20 tokens, 14." in half.stderr and "KiB" in half.stderr
    whole = [int(token) for token in done(segue("state", "show", "whole", "--tokens")).split()]
    assert done(segue("state", "show", "half", "--tokens")).split() == [str(token) for token in whole[:-8]]
    rest = segue("state", "load", "half", *TINY, "--max-tokens", "8", *sampling)
    assert done(rest) == text_of(whole[-8:])
    assert "19 tokens inherited, 0 recomputed, 1 new" in rest.stderr and "ms to the first token" in rest.stderr


def test_a_suffix_comes_first(segue, tmp_path):
    path = tmp_path / "here.segue"
    done(segue("state", "save", path, "hello there", "--chat", *TINY))
    assert path.exists() and not (tmp_path / "states").exists()
    loaded = segue("state", "load", path, " and then", *TINY)
    assert done(loaded) and " 0 recomputed, 10 new" in loaded.stderr


def test_an_unfinished_answer_is_resumed(segue, tmp_path):
    from segue import Engine, SamplingParams

    with Engine("tiny", num_blocks=400) as engine:
        params = SamplingParams(max_tokens=12, seed=3)
        whole = engine.generate("hello there", params)[0].token_ids
        stream = engine.stream("hello there", params)
        for _ in range(5):
            next(stream)
        engine.save(stream.result.request_id, tmp_path / "part.segue", note={"why": 1, "\x1b[31m": 2})
    shown = done(segue("state", "show", tmp_path / "part.segue"))
    assert "no: 5 of 12 tokens" in shown and "why, ?[31m" in shown
    assert done(segue("state", "load", tmp_path / "part.segue", *TINY)) == text_of(whole[5:])
    refused(segue("state", "load", tmp_path / "part.segue", *TINY, "--top-k", "3"), "top_k: the saved answer")


def test_states_are_listed_shown_and_removed(segue, tmp_path):
    assert "name" in done(segue("state", "ls"))
    done(segue("state", "save", "one", "hello there", *TINY))
    (tmp_path / "states" / "two.segue").write_bytes((tmp_path / "states" / "one.segue").read_bytes()[:-1])
    (tmp_path / "states" / "notes.txt").write_text("nothing to do with it")
    rows = [line.split() for line in done(segue("state", "ls")).splitlines() if "KiB" in line]
    assert [[row[1], row[3]] for row in rows] == [["one", "tiny"], ["two", "damaged"]]
    assert rows[0][5] == "28"
    shown = done(segue("state", "show", "one"))
    for part in (
        "one.segue, 20.",
        "tiny, ",
        "28: 256 104 101",
        "of 27 tokens, float32 x (3, 2, 2, 16)",
        "yes",
        "model",
    ):
        assert part in shown
    done(segue("state", "rm", "one", tmp_path / "states" / "two.segue"))
    assert os.listdir(tmp_path / "states") == ["notes.txt"]


def test_looking_at_states_does_not_load_torch(segue):
    done(segue("state", "save", "one", "hello", *TINY))
    watch = "import sys; from segue.cli import main; main(); sys.exit('torch' in sys.modules)"
    for words in (("ls",), ("show", "one"), ("rm", "one")):
        done(segue("state", *words, code=watch))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("show", "nothing"), "nothing.segue cannot be read"),
        (("load", "nothing", *TINY), "nothing.segue cannot be read"),
        (("rm", "nothing"), "nothing.segue cannot be removed"),
        (("save", "..", "x", *TINY), "name: must be"),
        (("save", "a b", "x", *TINY), "name: must be"),
        (("show", ""), "name: must be"),
        (("show", "no/such/path"), "no/such/path cannot be read"),
        (("rm", "/etc/passwd"), "does not end in .segue"),
        (("show", "/"), "cannot be read"),
        (("save", "x", "x", *TINY, "--top-p", "7"), "top_p"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, tuple) else "",
)
def test_bad_names_are_refused_with_one_sentence(segue, words, complaint):
    refused(segue("state", *words), complaint)


def test_damage_and_another_model_are_refused(segue, tmp_path):
    path = tmp_path / "one.segue"
    done(segue("state", "save", path, "hello there", *TINY))
    other = segue("state", "load", path, *TINY, "--dtype", "bf16")
    assert other.returncode == 2 and "belongs to model" in other.stderr
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    damaged = segue("state", "load", path, *TINY)
    assert damaged.returncode == 2 and "chunk 0 does not match its digest" in damaged.stderr
    path.write_bytes(data[:-1])
    refused(segue("state", "load", path, *TINY), "bytes and should have")
    refused(segue("state", "show", path), "bytes and should have")


# The demonstration


@pytest.mark.parametrize("processes", [1, 2])
def test_a_handoff_is_demonstrated(segue, processes):
    shown = done(segue("demo", "handoff", "--model", "tiny", "--max-tokens", "9", "--processes", processes))
    assert shown.count("identical") == shown.count("⇢ engine B ⇢") == 2 and "DIFFERENT" not in shown
    shipped = [float(part.split()[0]) for part in shown.replace("\n", " ").split(": ") if "MiB shipped" in part]
    assert shipped[1] < shipped[0] / 2, "what both have in common was there already"


CHILD = f"""#!{sys.executable}
import socket, sys
host, _, port = sys.argv[sys.argv.index("--join") + 1].rpartition(":")
with socket.create_connection((host, int(port))) as sock:
    sock.recv(10)
"""


@pytest.mark.parametrize("child", ["exit 3", CHILD], ids=["does not come", "dies in the middle"])
def test_without_the_other_engine_the_request_finishes_at_home(segue, tmp_path, child):
    program = tmp_path / "child"
    program.write_text(child if child.startswith("#!") else f"#!/bin/sh\n{child}\n")
    program.chmod(0o700)
    code = f"import sys; sys.executable = {str(program)!r}; from segue.cli import main; sys.exit(main())"
    home = segue("demo", "handoff", *TINY, "--max-tokens", "6", code=code)
    assert home.returncode == 1, home.stderr
    assert home.stdout.count("so it goes on at A") == home.stdout.count("identical") == 2


@pytest.mark.parametrize("words", [("--max-tokens", "1"), ("--processes", "3")])
def test_a_demonstration_that_cannot_be_is_refused(segue, words):
    refusal = segue("demo", "handoff", "--model", "tiny", *words)
    assert refusal.returncode == 2 and "Traceback" not in refusal.stderr
    refused(segue("demo", "--model", "tiny", "--processes", "1"), "processes")


def test_the_other_engine_ends_with_its_connection(segue):
    command = [sys.executable, "-m", "segue", "demo", "handoff", *TINY, "--join"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(100)
        port = listener.getsockname()[1]
        with subprocess.Popen([*command, f"127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as child:
            listener.accept()[0].close()
            assert child.wait(20) == 0
    alone = segue("demo", "handoff", *TINY, "--join", f"127.0.0.1:{port}")
    assert alone.returncode == 2 and "engine A cannot be reached" in alone.stderr
