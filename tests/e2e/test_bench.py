"""Benchmarks from the command line, with real engines in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_nothing_that_could_run() -> None:
    done = bench("engines", "--workloads", "smoke", "--peers", "torchtitan", "--order", "peer,ours", "--devices", "99")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| smoke ")]
    assert ["needs 99 devices" in row for row in rows] == [True, True]


def test_a_wrong_name_is_the_users_mistake() -> None:
    done = bench("engines", "--workloads", "smoke", "--peers", "deepspeedy")
    assert done.returncode == 2
    assert "'deepspeedy' is unknown" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.alone
@pytest.mark.slow
def test_smoke_suite(tmp_path: Path) -> None:
    shape = ("--workloads", "smoke-encoder", "--steps", "12", "--warm", "4", "--devices", "1,2")
    done = bench("engines", *shape, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "results.json").read_text())
    found = {(r["engine"], r["gpus"]): r["figures"] for r in kept["results"]}
    assert set(found) == {(engine, gpus) for engine in ("ddp", "meshwright") for gpus in (1, 2)}
    keys = {"engine", "seconds", "spread", "tokens_per_s", "samples_per_s", "peak_gib", "reserved_gib", "first_loss", "loss"}
    for (engine, gpus), figures in found.items():
        assert figures is not None, (tmp_path / "log.txt").read_text()
        assert keys <= set(figures)
        # 4 rows of 64 tokens a rank
        assert figures["tokens_per_s"] == pytest.approx(256 * gpus / figures["seconds"])
        assert 6.0 < figures["first_loss"] < 6.7, engine  # about log 512: random tokens, all positions predicted
    assert [record["what"] for record in kept["ceilings"]] == ["matmul", "matmul", "copy", "limit"]
    table = (tmp_path / "results.md").read_text()
    assert table in done.stdout
    assert sum(line.startswith("| smoke-encoder") for line in table.splitlines()) == 4
