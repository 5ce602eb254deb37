"""`meshwright verify` on a user's own architecture: data parallelism and ZeRO, and what mixes rows is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.e2e import helpers as e2e
from tests.e2e.test_verify import verified

MODULE = Path(__file__).with_name("foreign_arch.py")
PLANS = [{"layout": {"dp_replicate": 2}}, {"layout": {"dp_shard": 2, "zero": 3}, "recompute": "full"}]


# Mutation, red: registered models are not probed.
@pytest.mark.parametrize(
    ("arch", "says"),
    [("straight", []), ("sideways", ["encoder.layers.0", "batch_first=False"]), ("normed", ["scale (BatchNorm1d)"])],
)
def test_a_registered_model_is_verified_and_explained(ranks, tmp_path, arch, says):
    config = e2e.settings(tmp_path / "config.yaml", run={"dir": str(tmp_path / "run"), "modules": [str(MODULE)]})
    (tmp_path / "plans.json").write_text(json.dumps(PLANS))
    flags = (f"--model.arch={arch}", "--model.width=8", "--data.document_mask=false")
    found = verified(ranks, config, tmp_path / "folder", 2, *flags, layouts=str(tmp_path / "plans.json"), steps=2)
    said = [note for note in found["notes"] if "rows" in note]
    assert len(said) == bool(says) and all(words in said[0] for words in says), found["notes"]
    assert found["verdict"] == ("differs" if says else "same"), found["rows"]


def test_tensor_and_pipeline_parallelism_are_refused_by_name(tmp_path, capfd):
    config = e2e.settings(tmp_path / "config.yaml", run={"dir": str(tmp_path / "run"), "modules": [str(MODULE)]})
    (tmp_path / "plans.json").write_text(json.dumps([{"layout": {"tp": 2}}, {"layout": {"pp": 2}}]))
    flags = ["--nproc", "2", "--layouts", str(tmp_path / "plans.json"), "--model.arch=straight", "--model.width=8"]
    assert main(["verify", str(config), *flags]) == 2
    said = capfd.readouterr().err
    assert said.count("nothing says how the parameters and positions of 'straight' are split") == 2
