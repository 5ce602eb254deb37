"""Plans of the command: a resumed run keeps its own or takes another one, and pipeline stages are evened out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import CheckpointError
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.rebalance import measured_stages
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.e2e import helpers as e2e

PIPELINE = Plan(Layout(pp=2), micro_batch=5, precision="fp64", split=(1, 3))
TENSOR = Plan(Layout(tp=2), micro_batch=5, precision="fp64")
TOTAL = "--train.schedule.total=8"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_in(tmp_path)


def config_in(folder: Path) -> Path:
    changed = {"model": {"layers": 4}, "train": {"steps": 8}, "checkpoint": {"every": 4}, "precision": "fp64"}
    return e2e.settings(folder / "config.yaml", **changed)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Path:
    """The run on two ranks under a chosen plan, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    e2e.train_in(ranks(2), config_in(folder), folder / "run")
    return folder / "run"


def test_a_pipeline_is_rebalanced_by_command_and_by_option(ranks, whole, config, tmp_path, capsys):
    # Red when stages are not saved with a checkpoint, and when a resume chooses its plan anew.
    run = tmp_path / "run"
    e2e.train_in(ranks(2), config, run, "--train.steps=4", TOTAL, plan=PIPELINE)
    stages = measured_stages(RunFolder(run))
    assert stages.split == (1, 3) and len(stages.seconds) == 2 and min(stages.seconds) > 0 and sum(stages.better) == 4
    assert main(["rebalance", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["split"] == [1, 3] and told["better"] == list(stages.better)
    plan = Plan.load(run / "plan.json")
    assert plan.layout == Layout(pp=2) and plan.split == stages.better
    said = e2e.train(config, run, "--resume", run, "--rebalance", "--train.steps=8", TOTAL).wait().out
    assert "stages: [1, 3] layers -> " in said and "pipeline 2 x 1 (1f1b)" in said
    assert e2e.column(run, "loss") == pytest.approx(e2e.column(whole, "loss"), abs=1e-9)


def test_a_resume_keeps_its_plan_and_takes_another_one(ranks, whole, config, tmp_path):
    # Red when the plan of the folder is not read, and when moments stay behind.
    run = tmp_path / "run"
    e2e.train_in(ranks(2), config, run, "--train.steps=3", TOTAL, plan=TENSOR)
    e2e.train_in(ranks(2), config, run, "--train.steps=5", TOTAL, resume=True)
    assert Plan.load(run / "plan.json").layout == Layout(tp=2)
    other = '{"layout": {"zero": 3}}'
    assert "ZeRO-3 over 2" in e2e.train(config, run, "--resume", run, "--plan", other, "--train.steps=8", TOTAL).wait().out
    assert e2e.column(run, "step") == list(range(1, 9))
    assert e2e.column(run, "loss") == pytest.approx(e2e.column(whole, "loss"), abs=1e-9)
    assert e2e.largest_difference(run, whole) < 1e-9


def test_what_cannot_be_rebalanced_is_refused(ranks, config, tmp_path):
    run = tmp_path / "run"
    e2e.train_in(ranks(1), config, run, "--train.steps=1", "--train.schedule.warmup=0")
    with pytest.raises(CheckpointError, match="was made without a pipeline"):
        measured_stages(RunFolder(run))
    (run / "plan.json").write_text('{"layout": {"pp": 2')
    assert main(["train", "--resume", str(run), "--nproc", "1"]) == 2, "a damaged plan is not passed over"
    assert main(["rebalance", str(tmp_path)]) == 2
    assert main(["train", str(config), f"--run.dir={tmp_path / 'new'}", "--rebalance"]) == 2
