"""`precision: fp8` from a config: said, evaluated and saved as in bf16, resumed in either; refused before a device is taken."""

from __future__ import annotations

import pytest
import torch

from meshwright.cli import main
from meshwright.distributed import device as devices
from meshwright.errors import ConfigError, Finding, LayoutError
from meshwright.runtime import setup
from meshwright.runtime.user_plan import resolve_plan
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.e2e import helpers as e2e


def test_a_run_goes_on_in_bf16_and_back(ranks, tmp_path):
    """What is saved is fp32 masters under the names of bf16, whichever precision trained them."""
    config = e2e.settings(tmp_path / "config.yaml", precision="fp8", train={"steps": 4}, evaluate={"every": 4})
    run, schedule = tmp_path / "run", "--train.schedule.total=8"
    said = e2e.train_in(ranks(2), config, run, schedule)
    assert "8 linear layers multiply in fp8 (e4m3, dynamic scales by row" in said and "emulated on this device" in said
    first = e2e.tensors(e2e.newest(run))
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    e2e.train_in(ranks(2), config, run, schedule, "--train.steps=6", "--precision=bf16", resume=True)
    said = e2e.train_in(ranks(2), config, run, schedule, "--train.steps=8", resume=True)
    assert "changed: precision bf16 -> fp8" in said and "multiply in fp8" in said
    last = e2e.tensors(e2e.newest(run))
    assert first.keys() == last.keys() and not any(torch.equal(first[name], last[name]) for name in first if "weight" in name)
    plain = tmp_path / "plain"
    e2e.train_in(ranks(2), config, plain, schedule, "--train.steps=8", "--precision=bf16")
    ours, theirs = e2e.column(run, "loss"), e2e.column(plain, "loss")
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3) and ours[0] != theirs[0]
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.02)


def test_a_gpu_without_such_products_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "name", lambda device: f"Tesla V100 {device.index}")
    monkeypatch.setattr(devices, "count", lambda kind: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    config = e2e.load_config(e2e.settings(tmp_path / "config.yaml", precision="fp8"), [f"--run.dir={tmp_path / 'run'}"])
    target = setup.Target(1, "cuda", 2**34)
    with pytest.raises(ConfigError, match="precision: fp8, but Tesla V100 0 does not multiply in 8 bits"):
        setup.set_up(config, target, e2e.RunFolder(tmp_path / "run"), plan=None, resume=False, write=True, say=print)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert devices.fp8_findings(torch.device("cuda", 0)) == []


def test_a_model_without_a_layer_for_it_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    """By the launcher, and where it can be built at all. Mutations tried: only the device is asked; sizes looked at after
    `folder.create`, `sized` is not asked."""
    monkeypatch.setattr("meshwright.distributed.launch.launch", lambda *rest, **more: pytest.fail("ranks were started"))
    shape = {"layers": 2, "width": 24, "heads": 2, "ffn": 40}
    config = e2e.settings(tmp_path / "config.yaml", precision="fp8", model=shape)
    run = [f"--run.dir={tmp_path / 'run'}", f"--data.cache={tmp_path / 'cache'}"]
    assert main(["train", str(config), "--nproc", "1", *run]) == 2
    said = capsys.readouterr().err
    assert "precision: fp8, but no linear layer of the blocks has sizes that are multiples of 16: " in said
    assert (
        "mlp.up (80 x 24), mlp.down (24 x 40)" in said
        and "Use bf16, or other sizes in the model" in said
        and "plan." not in said
    ), said
    monkeypatch.setattr(setup, "missing_sinks", lambda log: [Finding("log.wandb", "is not installed")])
    for more, sized in ([], True), (["--model.heads=5"], False):  # such a model cannot be built, which is said instead
        assert main(["train", str(config), "--nproc", "1", *more, *run]) == 2
        said = capsys.readouterr().err
        assert "log.wandb" in said and ("multiples of 16" in said) == sized and ("model.heads" in said) != sized, said
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_what_splits_a_scale_is_refused(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", precision="fp8")
    with pytest.raises(LayoutError, match=r"plan\.precision: fp8, but the scales of fp8 are those of whole rows"):
        e2e.train_in(ranks(2), config, tmp_path / "run", plan=Plan(Layout(tp=2), precision="fp8"))


def test_a_loop_of_ones_own_and_verify_refuse_it(capsys):
    # Red without either finding: the one would multiply fp32 in 8 bits, the other takes rounding for a difference.
    settings = {"parameters": 1000, "world": 1, "device_bytes": None, "weights": "bf16", "micro_batch": None}
    with pytest.raises(LayoutError, match="runs of `meshwright train` have"):
        resolve_plan({"precision": "fp8"}, precision=None, **settings)
    assert main(["verify", "examples/quickstart.yaml", "--precision", "fp8"]) == 2
    assert "which tells a mistake from rounding best" in " ".join(capsys.readouterr().err.split())
