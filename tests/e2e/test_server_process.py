"""The server as processes: crashes, restarts and its end."""

import json
import socket
import subprocess
import time

import openai
import pytest

from tests.servers import running


def test_a_killed_engine_is_reported_and_replaced():
    with running("tiny") as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = iter(client.completions.create(model="tiny", prompt="long", max_tokens=3000, stream=True,
                                                extra_body={"ignore_eos": True}))  # fmt: skip
        next(stream)
        pid = server.engine_pid()
        subprocess.run(["kill", "-9", str(pid)], check=True)
        with pytest.raises(openai.APIError, match="signal 9"):
            for _ in stream:
                pass
        server.wait_until(lambda: server.get("/health")[0] == 503 or server.engine_pid() != pid)
        server.wait_until(lambda: server.get("/health")[0] == 200, 60)
        assert server.get("/health")[2]["restarts"] == 1
        assert server.metric("engine_restarts_total") == 1
        again = client.completions.create(model="tiny", prompt="again", max_tokens=3, extra_body={"ignore_eos": True})
        assert again.usage.completion_tokens == 3


def test_saved_states_come_back_after_a_crash(tmp_path):
    with running("tiny", "--state-dir", str(tmp_path)) as server:
        fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        _, _, first = server.post("/v1/completions", fields | {"prompt": "to be kept", "hold_seconds": 60})
        _, _, expected = server.post("/v1/completions", fields | {"continuation_of": first["id"]})
        assert server.post(f"/v1/states/save/{first['id']}")[0] == 200
        _, _, unsaved = server.post("/v1/completions", fields | {"prompt": "to be lost", "hold_seconds": 60})
        subprocess.run(["kill", "-9", str(server.engine_pid())], check=True)
        server.wait_until(lambda: server.get("/health")[2]["restarts"] == 1)
        server.wait_until(lambda: server.get("/health")[0] == 200, 60)
        status, _, again = server.post("/v1/completions", fields | {"continuation_of": first["id"]})
        assert status == 200 and again["choices"][0]["text"] == expected["choices"][0]["text"]
        assert again["choices"][0]["state"]["inherited_tokens"] == expected["choices"][0]["state"]["inherited_tokens"]
        assert server.post("/v1/completions", fields | {"continuation_of": unsaved["id"]})[0] == 404


def test_sigterm_lets_what_runs_finish():
    with running("tiny") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = iter(client.completions.create(model="tiny", prompt="long", max_tokens=400, stream=True,
                                                    extra_body={"ignore_eos": True}))  # fmt: skip
            next(stream)
            pid = server.engine_pid()
            server.process.terminate()
            time.sleep(0.1)
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.stop() in (0, -15)
        assert subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode != 0


def test_what_comes_while_it_drains_is_told_to_come_back():
    """Its head was there before the signal, its body came after."""
    body = json.dumps({"prompt": "late", "max_tokens": 3}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with running("tiny") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as late:
            late.sendall(head.encode() + body[:5])
            server.get("/health")  # by now the first one has been read
            server.process.terminate()
            server.wait_until(lambda: not _listens(host, int(port)))
            late.sendall(body[5:])
            answer = b"".join(iter(lambda: late.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 5\r\n" in answer.lower()
        assert server.stop() in (0, -15)


def _listens(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True
