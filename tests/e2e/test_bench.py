"""Benchmarks from the command line, with real engines in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def bench(*arguments: str, limit: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit)


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


def test_options_of_another_suite_are_refused() -> None:
    done = bench("strategies", "--rows", "llama-1b:1:1:1", "--tp", "2")
    assert done.returncode == 2 and "--rows" in done.stderr and "--tp" in done.stderr
    done = bench("serving", "--micro", "ddp=4", "--rows", "llama-1b:1")
    assert done.returncode == 2 and "--micro: has no effect on bench serving" in done.stderr


def test_history_of_what_is_kept(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "performance"
    done = bench("history", str(folder), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert "| llama-1b " in done.stdout and "Plotly.newPlot(" in (tmp_path / "page.html").read_text()
    assert bench("history").returncode == 2


@pytest.mark.alone
@pytest.mark.slow
def test_serving_beside_another_engine_and_over_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    done = bench("serving", "--smoke", "--repeat", "1", "--tp", "2", "--pp", "2", "--dp", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "results.json").read_text())
    found = {r["engine"]: r["figures"] for r in kept["results"]}
    assert list(found) == ["meshwright", "hf", "meshwright tp 2", "meshwright pp 2", "meshwright dp 2"]
    for engine, figures in found.items():
        assert figures is not None, (engine, (tmp_path / "log.txt").read_text())
        assert figures["tokens"] == 4 * 12, engine
        assert figures["tokens_per_s"] == pytest.approx(48 / figures["seconds"])
    assert len({figures["weight_bytes"] for engine, figures in found.items() if engine != "hf"}) == 1, "of the whole model"
    assert (tmp_path / "results.md").read_text() in done.stdout and (tmp_path / "results.html").is_file()


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_strategy_on_two_ranks_to_a_loss(tmp_path: Path) -> None:
    text = "".join(file.read_text() for file in sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md")))
    np.save(tmp_path / "text.npy", np.frombuffer(text.encode(), np.uint8).astype(np.int32))
    shape = ("--workloads", "smoke-encoder", "--devices", "2", "--steps", "40", "--warm", "4", "--peers", "ddp")
    out = tmp_path / "out"
    done = bench("strategies", *shape, "--tokens", str(tmp_path / "text.npy"), "--until", "6.2", "--out", str(out), limit=570)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (out / "results.md").read_text().splitlines()]
    table = {row[0]: row for row in rows if len(row) == 15}
    head, ours = table.pop("strategy"), ["ddp (chosen)", "zero-1", "zero-2", "zero-3", "pipeline", "tensor"]
    assert head[-1] == "to loss 6.2"
    assert {name for name in table if set(name) != {"-"}} == {"one device, fp32", "one device", *ours, "peer ddp"}
    for name in ("one device, fp32", "one device", *ours):
        steps, seconds = table[name][-1].removesuffix(" s").split(" steps, ")
        assert 10 <= int(steps) <= 40 and float(seconds) > 0, name
        mean, peak = map(float, table[name][9].split(" / "))
        assert 0 < mean <= peak, name
    assert (out / "results.html").is_file()
