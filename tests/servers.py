"""A real server in a process of its own, and the things tests ask of one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

START_SECONDS = 120


class RunningServer:
    """`segue serve` on a free port of this machine; `log()` is what it wrote."""

    def __init__(self, *arguments, env=None):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "segue", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **(env or {})}
        )
        line = self.process.stdout.readline()
        found = re.match(r"Serving at (http://\S+?)\. Try it:", line)
        assert found, f"{line!r}\n{self.log()}"
        self.url = found[1]
        self.example = self.process.stdout.readline().strip()

    def log(self):
        self._log.seek(0)
        return self._log.read()

    def engine_pid(self):
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return int(children.stdout.split()[0])

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body=None, **options):
        return self.request("POST", path, body={} if body is None else body, **options)

    def request(self, method, path, body=None, key=None, raw=None, timeout=60):
        """Status, headers and the body, parsed if it is JSON."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.headers, _parsed(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, _parsed(error)

    def metric(self, name, **labels):
        """The value of one metric, as a scraper would read it."""
        text = self.get("/metrics")[2]
        wanted = "".join(f'(?=[^}}]*{key}="{re.escape(value)}")' for key, value in labels.items())
        pattern = rf"^segue:{name}(?:{{{wanted}[^}}]*}})? (\S+)$" if labels else rf"^segue:{name} (\S+)$"
        found = re.search(pattern, text, re.MULTILINE)
        return float(found[1]) if found else None

    def usage(self):
        return self.metric("kv_cache_usage_perc")

    def wait_until(self, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s\n{self.log()}")

    def stop(self, how=signal.SIGTERM):
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self._log.close()


def _parsed(response):
    data = response.read()
    if response.headers.get_content_type() == "application/json":
        return json.loads(data)
    return data.decode() if response.headers.get_content_maintype() == "text" else data


@contextlib.contextmanager
def running(*arguments, **options):
    server = RunningServer(*arguments, **options)
    try:
        yield server
    finally:
        server.stop()
