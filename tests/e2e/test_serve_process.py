"""A real server on the loopback: it streams, notices who leaves, drains, and ends with a code that tells how."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from tests.docs.markdown import ROOT


@dataclass
class Server:
    process: subprocess.Popen[str]
    http: httpx.Client
    port: int
    child: int | None

    def end(self) -> tuple[int, str]:
        """(exit code, what it wrote to stderr), within a few seconds."""
        _, err = self.process.communicate(timeout=15)
        return self.process.returncode, err

    def metric(self, name: str) -> float:
        found = re.search(rf"^meshwright_{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def until(self, true: Any, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.01)


@contextmanager
def server(**options: Any) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.e2e.serve_process", json.dumps(options)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    child = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("child "):
                child = int(line.split()[1])
            if line.startswith("ready: "):
                break
        else:
            raise AssertionError(process.communicate()[1])
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert match is not None, line
        with httpx.Client(base_url=f"http://127.0.0.1:{match[1]}", timeout=10) as http:
            yield Server(process, http, int(match[1]), child)
    finally:
        process.kill()
        process.communicate()


def lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_it_streams_notices_who_leaves_and_drains():
    """Ends by SIGTERM with 0: the stream under way is finished, a new request is refused meanwhile."""
    with server(child=True) as here:
        body = {"prompt": "a", "max_tokens": 10**6, "stream": True}
        with here.http.stream("POST", "/v1/completions", json=body) as response:
            got = lines(response)
            assert next(got)["choices"][0]["text"] == "a" and here.metric("requests_running") == 1
        here.until(lambda: here.metric("requests_running") == 0)
        assert here.metric("requests_aborted_total") == 1
        with socket.create_connection(("127.0.0.1", here.port)) as bare:  # one that waits for a whole answer, and goes
            text = json.dumps({**body, "stream": False})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
            bare.sendall(f"{head}\r\n\r\n{text}".encode())
            here.until(lambda: here.metric("requests_running") == 1)
        here.until(lambda: here.metric("requests_aborted_total") == 2)
        with here.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 60}) as response:
            got = lines(response)
            next(got)
            here.process.send_signal(signal.SIGTERM)
            here.until(lambda: here.http.get("/ready").status_code == 503)
            assert here.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            assert here.http.get("/health").status_code == 200
            assert list(got)[-1]["choices"][0]["finish_reason"] == "length"
        code, err = here.end()
        assert code == 0 and "Traceback" not in err, err
        assert here.child is not None and not psutil.pid_exists(here.child)


def test_a_failing_engine_ends_the_process_with_its_cause():
    with server(fail=20, child=True) as here:
        with here.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1000, "stream": True}) as response:
            last = list(lines(response))[-1]
        assert "worker 1 died" in last["error"]["message"]
        code, err = here.end()
        assert code == 1 and err.strip() == "the engine failed: RuntimeError: worker 1 died"
        assert here.child is not None and not psutil.pid_exists(here.child)


def test_a_drain_that_takes_too_long_cuts_off_and_says_so():
    with server(drain_s=0.2, key="s3cret") as here:
        assert here.http.get("/metrics").status_code == 401
        here.http.headers["authorization"] = "Bearer s3cret"
        with here.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 10**6, "stream": True}) as response:
            got = lines(response)
            next(got)
            here.process.send_signal(signal.SIGTERM)
            assert "stopping" in list(got)[-1]["error"]["message"]
        code, err = here.end()
        assert code == 143 and "1 requests were cut off after 0.2 s" in err and "s3cret" not in err


def test_ctrl_c_ends_with_130():
    with server() as here:
        here.process.send_signal(signal.SIGINT)
        code, err = here.end()
        assert code == 130 and "Traceback" not in err, err


def test_a_large_body_is_answered_before_it_has_come(monkeypatch: pytest.MonkeyPatch):
    """With and without a length; the answer is read by a client that is still sending."""
    with server() as here:
        for body in (b"x" * (8 << 20), (b"x" * 65536 for _ in range(128))):
            answer = here.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 413, answer.text
        assert psutil.Process(here.process.pid).memory_info().rss < 300 << 20
        here.process.send_signal(signal.SIGTERM)
        assert here.end()[0] == 0
