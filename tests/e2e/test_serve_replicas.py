"""Two processes with a copy of the model each behind one server: streams beside each other, one that leaves, a process that is
killed, a drain; and a file of prompts through both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from meshwright.cli import main
from tests.docs.markdown import ROOT
from tests.e2e.test_serve_command import folder, serve

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def until(true: Callable[[], Any], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@contextmanager
def two(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, dict[int, psutil.Process]]]:
    """(the launcher, a client, the process of each rank)."""
    process, address = serve(folder(tmp_path / "model", max_len=4096), "--dp", "2", *options, blocks=600)
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
    try:
        with httpx.Client(base_url=address, timeout=30, headers={"authorization": "Bearer s3cret"}) as http:
            yield process, http, ranks
    finally:
        for child in ranks.values():
            if child.is_running():
                child.kill()
        process.kill()
        process.communicate()


def running(http: httpx.Client) -> list[float]:
    """Requests under way, of each replica."""
    lines = http.get("/metrics").text.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("meshwright_replica_requests{")]


def read(http: httpx.Client, body: dict[str, Any], said: list[dict[str, Any]]) -> threading.Thread:
    """A stream whose events come into `said`."""

    def run() -> None:
        try:
            with http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        said.append(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:  # the server is gone
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_streams_one_that_leaves_and_a_replica_that_is_killed(tmp_path: Path):
    """Mutation tried: the end of a line is not noticed, and the streams of the dead one wait for the deadline of the drain."""
    with two(tmp_path) as (process, http, ranks):
        assert sorted(ranks) == [0, 1]
        said: list[list[dict[str, Any]]] = [[] for _ in range(4)]
        threads = [read(http, LONG, events) for events in said]
        until(lambda: all(len(events) > 2 for events in said))
        assert running(http) == [2, 2]
        with http.stream("POST", "/v1/completions", json=LONG) as response:
            next(response.iter_lines())
            assert sum(running(http)) == 5
        until(lambda: running(http) == [2, 2])
        ranks[1].kill()
        until(lambda: not ready(http))
        for thread in threads:
            thread.join(15)
        ends = [events[-1].get("error", {}).get("message", "") for events in said]
        assert all("replica 1 is gone" in message or "stopping" in message for message in ends), ends
        _, err = process.communicate(timeout=30)
        assert process.returncode in (1, 137), (process.returncode, err)
        assert "rank 1 failed (exit code 137): ended by SIGKILL" in err or "replica 1 is gone" in err
        assert "Traceback" not in err and not any(child.is_running() for child in ranks.values()), err


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("drain", "code"), [("30", 0), ("0.1", 143)])
def test_both_replicas_are_drained(tmp_path: Path, drain: str, code: int):
    with two(tmp_path, "--drain", drain) as (process, http, ranks):
        said: list[list[dict[str, Any]]] = [[] for _ in range(4)]
        tokens = 300 if code == 0 else 4000
        threads = [read(http, {**LONG, "max_tokens": tokens}, events) for events in said]
        until(lambda: all(len(events) > 2 for events in said))
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        ends = [events[-1] for events in said]
        if code == 0:
            assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 4
        else:
            assert all("stopping" in end["error"]["message"] for end in ends)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code and "Traceback" not in err, err
        assert not any(child.is_running() for child in ranks.values())


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--dp", "2"], ["--pp", "2"], ["--tp", "2", "--dp", "2"]], ids="".join)
def test_a_file_over_several_ranks_is_that_of_one(tmp_path: Path, options: list[str]):
    model = str(folder(tmp_path / "model"))
    (tmp_path / "in.txt").write_text("".join(f"prompt {'x' * n}\n" for n in range(30)))
    common = ["generate", model, "--prompts", str(tmp_path / "in.txt"), "--device", "cpu", "--blocks", "30"]
    common += ["--max-tokens", "12", "--temperature", "0.8", "--seed", "3", "--output"]
    assert main([*common, str(tmp_path / "one")]) == 0
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshwright", *common, str(tmp_path / "many"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert ran.returncode == 0 and "30 prompts" in ran.stderr, ran.stderr
    assert (tmp_path / "many").read_text() == (tmp_path / "one").read_text()


@pytest.mark.slow
def test_an_encoder_has_replicas(tmp_path: Path):
    process, address = serve(folder(tmp_path / "model", "mlm"), "--dp", "2", blocks=None)
    try:
        with httpx.Client(base_url=address, timeout=30, headers={"authorization": "Bearer s3cret"}) as http:
            inputs = [f"some [MASK] {'x' * n}" for n in range(20)]
            many = http.post("/v1/embeddings", json={"input": inputs}).json()["data"]
            for one, text in list(zip(many, inputs, strict=True))[::7]:
                alone = http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]
                assert one["embedding"] == pytest.approx(alone, abs=1e-6)
            body = {"input": inputs[0], "top_k": 3}
            with ThreadPoolExecutor(8) as pool:  # so that both have some
                filled = list(pool.map(lambda _: http.post("/v1/fill-mask", json=body).json()["data"], range(16)))
            assert len(filled[0][0]) == 3 and all(one == filled[0] for one in filled)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in err, err
    finally:
        process.kill()
        process.communicate()
