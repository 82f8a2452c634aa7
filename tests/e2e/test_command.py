"""The `segue` command as a user meets it."""

import os
import subprocess
import sys

import pytest


def segue(*words, **options):
    command = [sys.executable, "-c", "import sys; from segue.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_generate_is_repeatable_and_reads_standard_input():
    options = ("--model", "tiny", "--max-tokens", "8", "--temperature", "1", "--seed", "5", "--kv-memory", "1MiB")
    first, second = segue("generate", "hello", *options), segue("generate", *options, input="hello")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout != ""
    assert "KV memory" in first.stderr and "tokens" in first.stderr


def test_several_prompts_and_answers():
    done = segue("generate", "a", "b", "-n", "2", "--model", "tiny", "--max-tokens", "3", "--temperature", "1")
    assert done.returncode == 0, done.stderr
    assert [line.split(" (")[0] for line in done.stdout.splitlines() if line.startswith("---")] == [
        "--- 'a' [0]", "--- 'a' [1]", "--- 'b' [0]", "--- 'b' [1]",
    ]  # fmt: skip


def test_chat_computes_only_what_is_new():
    done = segue(
        "chat", "--model", "tiny", "--max-tokens", "5", "--num-blocks", "200", input="hello there\nand again\n\n"
    )
    assert done.returncode == 0, done.stderr
    computed = [int(line.split(",")[1].split()[0]) for line in done.stderr.splitlines() if "computed]" in line]
    totals = [int(line.split(" of ")[1].split()[0]) for line in done.stderr.splitlines() if "computed]" in line]
    assert computed[0] == totals[0] and computed[1] < totals[1] - totals[0] + 10


def test_models_lists_the_built_ins():
    done = segue("models")
    assert done.returncode == 0 and "smollm2" in done.stdout and "tiny" in done.stdout


def test_demo_on_the_small_model():
    done = segue("demo", "--model", "tiny", "--max-tokens", "6")
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("generate", ""), "prompt"),
        (("generate", "x", "--model", "no-such-model"), "no model"),
        (("generate", "x", "--temperature", "nan"), "temperature"),
        (("generate", "x", "--max-tokens", "-3"), "max_tokens"),
        (("generate", "x", "--max-tokens", "100000"), "8192"),
        (("generate", "x", "--num-blocks", "2"), "KV memory can never hold"),
        (("generate", "x", "--num-blocks", "1"), "num_blocks"),
        (("generate", "x", "--kv-memory", "lots"), "kv_memory"),
        (("generate", "x", "--device", "tpu"), "device"),
        (("generate", "x", "--max-model-len", "1000000"), "max_model_len"),
        (("generate", "x", "--threads", "0"), "threads"),
        (("generate", "x", "--dtype", "fp64"), "invalid choice"),
        (("frobnicate",), "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_line_and_status_2(words, complaint):
    model = () if "--model" in words or words[0] != "generate" else ("--model", "tiny")
    done = segue(*words, *model)
    assert done.returncode == 2
    assert complaint in done.stderr and "Traceback" not in done.stderr


def test_without_a_compiler_plain_torch_serves(tmp_path):
    environment = {**os.environ, "CXX": "/no/such/compiler", "SEGUE_CACHE": str(tmp_path)}
    done = segue("generate", "hello", "--model", "tiny", "--max-tokens", "4", env=environment)
    assert done.returncode == 0, done.stderr
    assert "torch on cpu" in done.stderr and "/no/such/compiler" in done.stderr
