"""What one runs before every commit: the whole way once, at toy size, in under 20 seconds on two quiet cores.

pytest tests/test_smoke.py
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.cli import main
from meshwright.config.load import load_config

pytestmark = pytest.mark.alone

TEXT = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "pack my box with five dozen liquor jugs " * 3,
    "ein zwei drei " * 9,
]

CONFIG = """
run: {{dir: {dir}, device: cpu}}
model: {{recipe: debug, dropout: 0.1}}
data: {{train: [{{path: {text}}}], valid_fraction: 0.1, seq_len: 16, tokenizer: {{vocab: 300}}, workers: 1}}
train: {{steps: 4, batch: 4, micro_batch: 2, lr: 1e-2, schedule: {{warmup: 1}}}}
evaluate: {{every: 2, rows: 4, best: false}}
checkpoint: {{every: 2, keep: 2}}
log: {{report: false}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of 4 steps, made in this process on one rank; its checkpoints are those of steps 2 and 4."""
    return train_here(tmp_path_factory.mktemp("smoke"))


def config_in(folder: Path) -> Path:
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each * (1 + i % 3)}) + "\n" for i, each in enumerate(TEXT * 6)))
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(dir=folder / "run", text=text))
    return path


def train_here(folder: Path, resume: bool = False) -> Path:
    from meshwright.distributed.environment import World
    from meshwright.runtime.folder import RunFolder
    from meshwright.runtime.setup import Target, set_up
    from meshwright.runtime.worker import Job, start

    path = folder / "config.yaml" if resume else config_in(folder)
    made = RunFolder(folder / "run")
    set_up(load_config(path), Target(1, "cpu", None), made, plan=None, resume=resume, write=True, say=lambda text: None)
    outcome = start(World(), Job(made, resume), "cpu")
    assert outcome.finished and outcome.reason == "4 steps done"
    return made.path


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    return [line["loss"] for line in lines]


def shard(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08}" / "shard-00000-of-00001.safetensors").read_bytes()


def test_every_module_imports():
    names = {module.name for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")}
    # peers need the tools they are named after, the kernels an accelerator's compiler, and one file runs inside of Triton
    elsewhere = ("__main__", ".triton_kernels", "_triton", ".triton_encoder")
    outside = {name for name in names if ".bench.peers." in name or name.endswith(elsewhere)}
    assert len(names - outside) > 100
    for name in sorted(names - outside):
        importlib.import_module(name)


def test_training_writes_metrics_and_checkpoints(run: Path):
    assert losses(run)[3] < losses(run)[0]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_resumed_run_is_the_uninterrupted_one(run: Path, tmp_path: Path):
    """Mutation tried: a resume that leaves the optimizer's moments at zero changes loss 4 and the last shard."""
    again = tmp_path / "run"
    shutil.copytree(run, again)
    shutil.copy(run.parent / "config.yaml", tmp_path)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    text = (tmp_path / "config.yaml").read_text().replace(str(run), str(again))
    (tmp_path / "config.yaml").write_text(text)
    train_here(tmp_path, resume=True)
    assert losses(again) == losses(run)
    assert shard(again, 4) == shard(run, 4)


def test_weights_go_to_hugging_face_and_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(run), str(tmp_path / "theirs"), "--compare", "weights"]) == 0
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--compare", "weights"]) == 0
    from meshwright.models.files import load_model, model_tensors
    from meshwright.runtime.trained import load_trained

    trained = dict(model_tensors(load_trained(run).model))
    returned = dict(model_tensors(load_model(tmp_path / "ours", "cpu", None)[0]))
    assert trained.keys() == returned.keys() and len(trained) > 10
    assert all(torch.equal(trained[name], returned[name]) for name in trained)


def test_the_command_trains_on_two_ranks(tmp_path: Path):
    command = [sys.executable, "-m", "meshwright", "train", str(config_in(tmp_path)), "--nproc", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "ended: 4 steps done" in done.stdout
    assert all(0 < loss < 10 for loss in losses(tmp_path / "run"))
