"""What HTTP costs: the server beside the engine in one process, and beside vLLM's server.

    python benchmarks/server.py [--only throughput|latency|chat] [--vllm-python PATH]

Throughput and latency use `tiny`, whose steps cost almost nothing, so that the server's own work shows. `--vllm-python`
is the Python of an environment with vLLM for the CPU; its server runs the same chat, tuned as docs/log.md says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STREAMS, TOKENS = 64, 200
REST = 3.0  # seconds between chats
PROMPT = "Tell a story about number {}."


class Running:
    """A server process, ended with the block."""

    def __init__(self, command: list[str], url: str | None = None, env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        out = subprocess.PIPE if url is None else self._log
        self.process = subprocess.Popen(command, stdout=out, stderr=self._log, text=True, env=env)
        if url is None:
            found = re.match(r"Serving at (http://\S+?)\. Try", self.process.stdout.readline())
            url = found[1]
        self.url = url

    def __enter__(self) -> Running:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.5)
        self._log.seek(0)
        raise SystemExit(self._log.read()[-4000:])

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def serve(*arguments: str) -> Running:
    return Running([sys.executable, "-m", "segue", "serve", *arguments, "--port", "0", "--quiet"])


def post(url: str, path: str, body: dict) -> bytes:
    host = url.removeprefix("http://")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def stream_once(url: str, body: dict) -> tuple[float, int]:
    """Seconds to the first event, and how many events came."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.perf_counter()
    writer.write(post(url, "/v1/completions", body))
    first, count = None, 0
    while True:
        data = await reader.read(1 << 16)
        if first is None and b"data: " in data:
            first = time.perf_counter() - began
        count += data.count(b"data: {")
        if not data or b"[DONE]" in data:
            writer.close()
            return first, count


def throughput(rounds: int) -> None:
    from segue import Engine, SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    inside, outside = [], []
    with Engine("tiny") as engine, serve("tiny") as server:
        for number in range(rounds + 1):
            prompts = [PROMPT.format(1000 * number + index) for index in range(STREAMS)]
            began = time.perf_counter()
            engine.generate(prompts, params)
            inside.append(STREAMS * TOKENS / (time.perf_counter() - began))
            outside.append(asyncio.run(_all_streams(server.url, prompts)))
    inside, outside = inside[1:], outside[1:]
    ratio = statistics.median(a / b for a, b in zip(outside, inside, strict=True))
    print(
        f"{STREAMS} streams of {TOKENS} tokens, tiny: in one process {statistics.median(inside):.0f} tokens/s, ", end=""
    )
    print(f"over HTTP {statistics.median(outside):.0f}, {ratio:.0%}")


async def _all_streams(url: str, prompts: list[str]) -> float:
    fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    counts = await asyncio.gather(*(stream_once(url, fields | {"prompt": prompt}) for prompt in prompts))
    seconds = time.perf_counter() - began
    assert min(count for _, count in counts) >= 1
    return STREAMS * TOKENS / seconds


def latency(rounds: int) -> None:
    with serve("tiny") as server:
        seconds = one_token(server.url, "tiny", rounds)
    print(f"a one-token request, tiny: median {seconds * 1e3:.2f} ms end to end")


def one_token(url: str, model: str, rounds: int) -> float:
    """Over one connection, which stays open."""
    host, port = url.removeprefix("http://").split(":")
    taken = []
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(rounds * 20 + 20):
            body = {"model": model, "prompt": f"hello {number}", "max_tokens": 1, "temperature": 0}
            began = time.perf_counter()
            sock.sendall(post(url, "/v1/completions", body))
            data = b""
            while b"\r\n\r\n" not in data or not _complete(data):
                data += sock.recv(1 << 16)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[20:])


def _complete(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
    return len(body) >= length


def chat(rounds: int, vllm: str | None) -> None:
    """Five turns, about 120 tokens more each; the time to the first token of turns 2 to 5."""
    results: dict[str, list[list[float]]] = {}
    with serve("smollm2") as ours:
        servers = {"plain history": (ours.url, "smollm2", False), "continuation": (ours.url, "smollm2", True)}
        if vllm is not None:
            with _vllm(vllm) as theirs:
                servers["vLLM, plain history"] = (theirs.url, "smollm2", False)
                _play(servers, rounds, results)
        else:
            _play(servers, rounds, results)
    print("a chat of five turns, SmolLM2 fp32, ms to the first token of each turn:")
    medians = {name: [statistics.median(turn) for turn in zip(*runs, strict=True)] for name, runs in results.items()}
    for name, turns in medians.items():
        print(f"  {name:22}" + "".join(f"{seconds * 1e3:8.0f}" for seconds in turns))
    if (theirs := medians.get("vLLM, plain history")) is not None:
        for name in ("plain history", "continuation"):
            ratios = [mine / other for mine, other in zip(medians[name][1:], theirs[1:], strict=True)]
            print(f"  {name} over vLLM, turns 2 to 5, of these: " + " ".join(f"{ratio:.3f}" for ratio in ratios))
            ratios = [_median_ratio(results[name], results["vLLM, plain history"], turn) for turn in range(1, 5)]
            print(f"  {name} over vLLM, median of the rounds:   " + " ".join(f"{ratio:.3f}" for ratio in ratios))
    ratios = [_median_ratio(results["continuation"], results["plain history"], turn) for turn in range(1, 5)]
    print("  continuation over plain, median of the rounds: " + " ".join(f"{ratio:.3f}" for ratio in ratios))


def _median_ratio(ours: list[list[float]], theirs: list[list[float]], turn: int) -> float:
    return statistics.median(a[turn] / b[turn] for a, b in zip(ours, theirs, strict=True))


def _play(servers: dict, rounds: int, results: dict) -> None:
    """Every chat starts on a machine at rest: vLLM's threads stay busy for a second after its last token."""
    for number in range(rounds + 1):
        for name, (url, model, continued) in sorted(servers.items(), reverse=bool(number % 2)):
            time.sleep(REST)
            seconds = _five_turns(url, model, f"Chat {number}", continued, salt=name)
            if number:  # the first round warms up
                results.setdefault(name, []).append(seconds)


def _five_turns(url: str, model: str, topic: str, continued: bool, salt: str) -> list[float]:
    """The same words for each server; the salt keeps one way of asking from finding what another has computed."""
    words = "the quick brown fox jumps over a lazy dog near the river while seven wise owls watch from an old oak tree "
    messages = [{"role": "user", "content": f"{topic}: {words * 4}"}]
    parent, seconds, text = None, [], ""
    for turn in range(5):
        sent = messages[-1:] if continued and parent is not None else messages
        body = {
            "model": model,
            "messages": sent,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        if continued:
            body |= {"hold_seconds": 60} | ({"continuation_of": parent} if parent is not None else {})
        first, text, parent = _timed_chat(url, body)
        seconds.append(first)
        messages = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Turn {turn}: {words * 4}"},
        ]
    return seconds


def _timed_chat(url: str, body: dict) -> tuple[float, str, str]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, texts, answer_id = time.perf_counter(), None, [], ""
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            answer_id = event["id"]
            if event["choices"] and (text := event["choices"][0]["delta"].get("content")):
                first = first or time.perf_counter() - began
                texts.append(text)
    return first, "".join(texts), answer_id


@contextmanager
def _vllm(command: str) -> Iterator[Running]:
    """The same weights and tokenizer, written as a Hugging Face folder; two cores, blocks of 32."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "PATH": _path_of(command)}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        arguments = [
            command, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
            "--served-model-name", "smollm2", "--dtype", "float32", "--block-size", "32",
            "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        with Running(arguments, f"http://127.0.0.1:{port}", env) as server:
            yield server


def _path_of(command: str) -> str:
    """vLLM compiles with tools that lie beside its command."""
    return f"{Path(command).parent}:{os.environ['PATH']}"


def _write_model(folder: Path) -> None:
    from segue.base.config import Environment
    from segue.model.loading import open_model
    from segue.model.tiny import save_hf_folder

    model = open_model("smollm2", Environment.read().cache_dir)
    save_hf_folder(model.spec, model.weights, folder)
    model.tokenizer.save(folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": model.chat_template.source,
        "bos_token": model.chat_template.bos,
        "eos_token": model.chat_template.eos,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["throughput", "latency", "chat"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM for the CPU")
    chosen = parser.parse_args()
    if chosen.only in (None, "throughput"):
        throughput(chosen.rounds)
    if chosen.only in (None, "latency"):
        latency(chosen.rounds)
    if chosen.only in (None, "chat"):
        chat(max(chosen.rounds // 2, 2), chosen.vllm_python)
