"""vLLM itself, on the CPU, with the plugin and without: the same answers, and states over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm")
if os.environ.get("SEGUE_VLLM_SERVED") != "1":
    pytest.skip("takes minutes: `make vllm-test`", allow_module_level=True)

import httpx

from segue.base.config import Environment
from segue.cli import main
from segue.model.loading import open_model
from segue.model.tiny import save_hf_folder
from tests.vllm.harness import CONFIG

TEXT = "The tests of this project fail. Find out why, and repair it. Begin by listing the files. "
PROMPTS = [TEXT * 4, "Once upon a time", "def load(path):\n    rows = ", "The capital of France is", TEXT * 9]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """SmolLM2 as vLLM reads it."""
    path, model = tmp_path_factory.mktemp("smollm2"), open_model("smollm2", Environment.read().cache_dir)
    save_hf_folder(model.spec, model.weights, path)
    model.tokenizer.save(path / "tokenizer.json")
    template = model.chat_template
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": template.eos, "bos_token": template.bos}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template.source}))
    return path


@contextmanager
def served(command, *flags, threads="0-1"):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": threads, "HF_HUB_OFFLINE": "1"}
    usual = f"--port {port} --block-size 32 --dtype float32 --enforce-eager --max-model-len 1024".split()
    process = subprocess.Popen(
        [*command, *usual, *flags], env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            for _ in range(600):
                with suppress(httpx.TransportError):  # nothing listens yet
                    if http.get("/health").status_code == 200:
                        break
                assert process.poll() is None, "".join(said[-40:])
                time.sleep(0.5)
            else:
                raise AssertionError("the server does not come up: " + "".join(said[-40:]))
            yield http
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ours(folder):
    return [str(Path(sys.executable).with_name("segue")), "vllm", "serve", str(folder)]


@pytest.fixture(scope="session")
def plain_answers(folder):
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--host",
        "127.0.0.1",
    ]
    with served(command, "--served-model-name", "m") as http:
        return [complete(http, text) for text in PROMPTS]


@pytest.fixture(scope="session")
def server(folder):
    with served(ours(folder), "--served-model-name", "m", "--num-gpu-blocks-override", "40") as http:
        yield http


def complete(http, text, max_tokens=16, **fields):
    response = ask(http, prompt=text, max_tokens=max_tokens, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def ask(http, path="/v1/completions", **fields):
    return http.post(path, json={"model": "m", "temperature": 0, **fields})


def metric(http, name):
    line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(f"segue:{name} "))
    return float(line.split()[1])


def evict(http):
    for at in range(4):
        complete(http, f"{at} {at * 7919} " * 70, max_tokens=2)


def test_answers_are_those_of_vllm_alone(server, plain_answers):
    assert [complete(server, text) for text in PROMPTS] == plain_answers
    assert [
        complete(server, text, job_id=f"j{at}", is_last_step=True) for at, text in enumerate(PROMPTS)
    ] == plain_answers


def test_a_continuation_computes_one_token_and_its_suffix_though_all_else_was_evicted(server):
    first = ask(server, prompt=TEXT * 8, max_tokens=9, hold_seconds=120).json()
    evict(server)
    longer = ask(server, prompt=" And then", max_tokens=8, continuation_of=first["id"]).json()
    assert longer["segue"] == {
        "inherited_tokens": first["choices"][0]["state"]["held_tokens"],
        "recomputed_tokens": 0,
        "new_tokens": 3,
    }
    whole = complete(server, TEXT * 8 + first["choices"][0]["text"] + " And then", max_tokens=8)
    assert longer["choices"][0]["text"] == whole
    assert server.delete(f"/v1/states/{first['id']}").status_code == 200
    assert server.delete(f"/v1/states/{first['id']}").status_code == 404


def test_fields_arrive_by_vllm_xargs_as_well(server):
    first = ask(server, prompt=TEXT * 3, max_tokens=4, vllm_xargs={"hold_seconds": 30, "state_id": "named"}).json()
    longer = ask(
        server, prompt=" So", max_tokens=4, vllm_xargs={"continuation_of": "named"}, add_special_tokens=False
    ).json()
    assert longer["segue"]["inherited_tokens"] == first["choices"][0]["state"]["num_tokens"] - 1
    assert server.delete("/v1/states/named").status_code == 200


def test_a_chat_that_continues_inherits_if_its_template_writes_the_same(server):
    messages = [{"role": "user", "content": "Name three rivers of Europe, please."}]
    first = ask(server, "/v1/chat/completions", messages=messages, max_tokens=10, hold_seconds=30).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And of Asia?"}]
    longer = ask(server, "/v1/chat/completions", messages=messages, max_tokens=6, continuation_of=first["id"]).json()
    told = longer["segue"]
    held = first["choices"][0]["state"]["held_tokens"]
    assert "fallback" in told or told["inherited_tokens"] == held
    assert longer["choices"][0]["message"]["content"] == _chat(server, messages)
    server.delete(f"/v1/states/{first['id']}")


def _chat(server, messages):
    return ask(server, "/v1/chat/completions", messages=messages, max_tokens=6).json()["choices"][0]["message"][
        "content"
    ]


def events(http, **fields):
    with http.stream(
        "POST", "/v1/completions", json={"model": "m", "temperature": 0, "stream": True, **fields}
    ) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        return response.status_code, [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_tells_its_state_and_is_continued(server):
    status, said = events(server, prompt=TEXT * 4, max_tokens=6, hold_seconds=30)
    assert status == 200
    assert "".join(each["choices"][0]["text"] for each in said) == complete(server, TEXT * 4, max_tokens=6)
    state = said[-1]["choices"][0]["state"]
    status, more = events(server, prompt=" And", max_tokens=4, continuation_of=state["id"])
    assert more[-1]["segue"] == {"inherited_tokens": state["held_tokens"], "recomputed_tokens": 0, "new_tokens": 2}
    assert events(server, prompt=" And", max_tokens=4, continuation_of="nobody")[0] == 404
    assert server.delete(f"/v1/states/{state['id']}").status_code == 200


def test_each_of_several_answers_has_a_state(server):
    said = ask(server, prompt=TEXT * 2, max_tokens=4, n=2, temperature=0.9, seed=3, hold_seconds=30).json()
    names = [choice["state"]["id"] for choice in said["choices"]]
    assert len(set(names)) == 2
    for choice, name in zip(said["choices"], names, strict=True):
        longer = ask(server, prompt=" So", max_tokens=4, continuation_of=name).json()
        whole = complete(server, TEXT * 2 + choice["text"] + " So", max_tokens=4)
        assert longer["choices"][0]["text"] == whole and longer["segue"]["recomputed_tokens"] == 0
        assert server.delete(f"/v1/states/{name}").status_code == 200


def test_a_beam_search_is_a_continuation(server):
    """Its lines are those of vLLM's own search over the whole text."""
    search = {"use_beam_search": True, "n": 4, "max_tokens": 3}
    first = ask(server, prompt=TEXT * 8, max_tokens=5, hold_seconds=60, job_id="searches").json()
    evict(server)
    found = ask(server, prompt=" So the", continuation_of=first["id"], job_id="searches", **search).json()
    whole = ask(server, prompt=TEXT * 8 + first["choices"][0]["text"] + " So the", **search).json()
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in whole["choices"]]
    held = first["choices"][0]["state"]["held_tokens"]
    assert found["segue"] == {"inherited_tokens": held, "recomputed_tokens": 0, "new_tokens": 3}
    assert ask(server, prompt=" x", continuation_of="nobody", **search).status_code == 404
    assert ask(server, prompt=" x", hold_seconds=5, **search).status_code == 400
    complete(server, "done", max_tokens=1, job_id="searches", is_last_step=True)


def test_what_cannot_be_done_is_refused_with_a_status_and_a_reason(server):
    for status, part, fields in (
        (404, "nobody", {"continuation_of": "nobody"}),
        (400, "hold_seconds", {"hold_seconds": "long"}),
        (400, "is_last_step", {"is_last_step": "perhaps", "job_id": "j"}),
    ):
        response = ask(server, prompt=" x", max_tokens=2, **fields)
        assert response.status_code == status and part in response.json()["error"]["message"]
    assert complete(server, PROMPTS[3], max_tokens=4)


@pytest.mark.parametrize("flags", [[], ["--hold"]])
def test_pins_hold_through_a_jobs_tool_calls(server, flags, capsys):
    assert metric(server, "leased_blocks") == 0
    assert main(["verify-pins", "--url", str(server.base_url), "--gap", "0.5", *flags]) == 0, capsys.readouterr().out
    capsys.readouterr()
    assert main(["decisions", str(server.base_url), "--json", "--limit", "50"]) == 0
    decisions = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(each["outcome"] == "returned" for each in decisions) or flags


def test_many_with_long_holds_all_end_and_all_blocks_come_free(server):
    answers = {}

    def run(at):
        fields = {"job_id": f"many{at % 4}", "hold_seconds": 3600} if at % 3 else {"hold_seconds": 2}
        answers[at] = complete(server, TEXT * (1 + at % 6), max_tokens=8, **fields)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    assert len(answers) == 24
    assert all(answers[at] == answers[at % 6] for at in range(24))
    assert metric(server, "leased_blocks") > 0
    for at in range(4):
        complete(server, "done", max_tokens=1, job_id=f"many{at}", is_last_step=True)
    time.sleep(2)
    complete(server, "done", max_tokens=1)
    assert metric(server, "leased_blocks") == 0 and metric(server, "kv_cache_usage_perc") == 0


def test_with_two_engines_what_continues_goes_to_the_one_that_has_it(folder):
    flags = ["--served-model-name", "m", "--num-gpu-blocks-override", "40", "--data-parallel-size", "2"]
    with served(ours(folder), *flags, threads="0|1") as http:
        firsts = [ask(http, prompt=f"{at} {TEXT * 4}", max_tokens=4, hold_seconds=60).json() for at in range(4)]
        engines = [
            line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:request_success_total")
        ]
        answered = [line for line in engines if 'reason="length"' in line and not line.endswith(" 0.0")]
        assert len(answered) == 2, "one engine had nothing to do"
        for first in firsts:
            state, search = first["choices"][0]["state"], {"use_beam_search": True, "n": 2}
            for fields in ({}, search):
                longer = ask(http, prompt=" So", max_tokens=2, continuation_of=first["id"], **fields).json()
                assert longer["segue"]["inherited_tokens"] == state["held_tokens"]
            assert http.delete(f"/v1/states/{first['id']}").status_code == 200
        assert metric(http, "leased_blocks") == 0


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
folder, scheduler = sys.argv[1:]
options = {"scheduler_cls": scheduler} if scheduler else {}
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=1024,
          block_size=32, num_gpu_blocks_override=48, seed=0, **options)
def say(prompts, count, **fields):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, extra_args=fields or None)
    found = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [(list(one.outputs[0].token_ids), one.kv_transfer_params) for one in found]
prompts = [[(at * 37 + seed * 91) % 500 + 5 for at in range(30 + 50 * seed)] for seed in range(6)]
tokens = [said for said, _ in say(prompts, 20)]
print("RESULT", json.dumps(tokens))
if scheduler:
    (first, told), = say(prompts[3:4], 9, hold_seconds=60, state_id="a")
    say([[(at * 11 + seed) % 500 + 5 for at in range(400)] for seed in range(6)], 4)
    (more, report), = say([[7, 8, 9]], 6, continuation_of="a")
    (whole, _), = say([prompts[3] + first + [7, 8, 9]], 6)
    print("STATE", json.dumps([more == whole, report["segue"]["new_tokens"], told["segue"]["held_tokens"]]))
    (_, refused), = say([[7]], 4, continuation_of="nobody")
    print("REFUSED", json.dumps(refused["segue"]["status"]))
"""


def test_a_tiny_random_model_says_the_same_offline_with_and_without(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = {}
    for scheduler in ("", "segue.vllm.Scheduler"):
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE, str(tmp_path), scheduler], env=os.environ | settings, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = dict(
            line.split(" ", 1)
            for line in done.stdout.splitlines()
            if line.split(" ", 1)[0] in ("RESULT", "STATE", "REFUSED")
        )
        found[scheduler] = lines
    assert found[""]["RESULT"] == found["segue.vllm.Scheduler"]["RESULT"]
    assert json.loads(found["segue.vllm.Scheduler"]["STATE"]) == [True, 4, 180 + 9 - 1]
    assert json.loads(found["segue.vllm.Scheduler"]["REFUSED"]) == 404
