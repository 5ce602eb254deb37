"""Training on accelerators: one device against two, precisions, compiled blocks, documents. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.observe.metrics import read_metrics
from tests.e2e.helpers import settings

DEVICES = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not DEVICES:
    pytest.skip("no accelerator", allow_module_level=True)

MODEL = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "max_len": 64, "dropout": 0.1}


def train(*arguments: str) -> None:
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "meshwright", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path, ranks: int, **changed) -> list[float]:
    """Losses of a real run on this many devices."""
    sections = {"run": {"dir": str(folder / "run"), "device": "auto"}, "model": MODEL, "train": {"steps": 20}, **changed}
    config = settings(folder / "config.yaml", **sections)
    train(str(config), "--nproc", str(ranks))
    return [record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")]


def far(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("compile_mode", ["off", "inductor"])
def test_two_devices_compute_what_one_does(tmp_path, compile_mode):
    # ten rows on two devices and in micro-batches of four: ragged on both; measured on two H200: about 1e-6
    if DEVICES < 2:
        pytest.skip("one device")
    one = losses(tmp_path / "1", 1, compile=compile_mode)
    two = losses(tmp_path / "2", 2, compile=compile_mode)
    assert far(one, two) < 1e-4
    assert one[-1] < one[0]


def test_fp64_on_two_devices_is_exact(tmp_path):
    if DEVICES < 2:
        pytest.skip("one device")
    changed = {"precision": "fp64", "compile": "off"}
    assert far(losses(tmp_path / "1", 1, **changed), losses(tmp_path / "2", 2, **changed)) < 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(tmp_path, precision):
    full = losses(tmp_path / "full", 1, compile="off")
    low = losses(tmp_path / "low", DEVICES, precision=precision)
    assert far(full, low) < 0.05
    assert low[-1] < low[0]


def test_documents_on_the_variable_length_path(tmp_path):
    # bf16 with a document mask takes varlen attention; fp32 the block mask, which is the oracle
    model = {**MODEL, "dropout": 0.0, "sliding_window": 16}
    full = losses(tmp_path / "full", 1, model=model, compile="off")
    low = losses(tmp_path / "low", 1, model=model, precision="bf16")
    assert far(full, low) < 0.05


def test_a_resumed_run_goes_on(tmp_path):
    whole = losses(tmp_path / "whole", 1, train={"steps": 12, "schedule": {"total": 20}})
    part = {"train": {"steps": 6, "schedule": {"total": 20}}}
    losses(tmp_path / "part", 1, **part)
    run = tmp_path / "part" / "run"
    train("--resume", str(run), "--nproc", "1", "--train.steps=12")
    assert far([record["loss"] for record in read_metrics(run / "metrics.jsonl")], whole) < 1e-5
