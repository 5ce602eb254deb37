"""Training with slow links through the product's own loop: what it says, saves, resumes, evaluates and hands out.

Mutation tried: evaluation with a replica's own weights, red in the first test.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli import main
from meshwright.data.loader import Loader
from meshwright.runtime.corpus import Corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.trained import load_trained
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.evaluate import sum_batches
from meshwright.train.objectives import make_objective
from tests.e2e import helpers as e2e
from tests.e2e.test_verify import verified

LATE: dict[str, Any] = {
    "train": {
        "steps": 12,
        "micro_batch": 2,
        "sync": {"method": "diloco", "every": 4, "overlap": True, "compress": "bf16"},
        "noise_scale": True,
        "sync_check": 3,
    },
    "evaluate": {"every": 5},
    "checkpoint": {"every": 5},
}
PLAN = Plan(Layout(dp_replicate=2, dp_shard=2, zero=2), micro_batch=2)


@pytest.fixture(scope="module")
def late(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    config = e2e.settings(folder / "config.yaml", **LATE)
    said = e2e.train_in(ranks(4), config, folder / "run", plan=PLAN)
    return folder, said


def test_a_run_with_a_late_outer_step_goes_on_and_its_figures_are_of_the_common_weights(ranks, late, tmp_path):
    folder, said = late
    assert "replicas exchange" in said and "(diloco, bf16, one round late)" in said
    assert e2e.column(folder / "run", "loss")[-1] < e2e.column(folder / "run", "loss")[0]
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    again = e2e.train_in(ranks(4), folder / "config.yaml", tmp_path / "run", plan=PLAN, resume=True)
    assert "at step 10" in again, "in the middle of a round"
    e2e.assert_same(tmp_path / "run", folder / "run")
    assert e2e.largest_difference(tmp_path / "run", folder / "run") == 0.0
    stored = e2e.tensors(e2e.newest(folder / "run"))
    model = load_trained(folder / "run").model
    assert all(torch.equal(value, stored[f"model/{name}"]) for name, value in model.state_dict().items())
    own = stored["replica/model/embedding.weight"]
    assert own.shape[0] == 2 and not torch.equal(own[0], own[1])
    held_out = next(record for record in reversed(e2e.records(folder / "run")) if "val_loss" in record)
    assert held_out["step"] == 12 and held_out["val_loss"] == pytest.approx(evaluated(folder / "run", model), abs=1e-6)


def evaluated(run: Path, model: torch.nn.Module) -> float:
    """Held-out loss of a model on the rows of a run."""
    folder = RunFolder(run)
    config, corpus = folder.read_config().config, Corpus.load(folder.data)
    _, rows = corpus.datasets(config, corpus.tokenizer(), "lm")
    objective = make_objective(config.objective, 0)
    sums = sum_batches(model, objective, Loader(rows, micro_batch=4), rows=0, device=torch.device("cpu"))
    return objective.figures(sums)["val_loss"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--nproc", "3", "--plan", '{"layout": {"dp_replicate": 3}}'],
            "plan.layout.dp_replicate: is 3, but .* has the weights and moments of 2 replicas, each its own",
        ),
        (["--nproc", "1"], r"train.sync.method: diloco, but with dp_replicate: 1 there is one replica"),
        (["--nproc", "4", "--train.sync.overlap=false"], "sync.overlap: is False, but .* was made with True"),
        (["--nproc", "4", "--train.sync.method=local_sgd"], "outer|overlap"),
    ],
)
def test_what_cannot_go_on_is_refused_in_words(late, capfd, flags, words):
    folder, _ = late
    assert main(["train", "--resume", str(folder / "run"), *flags]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(words, said), said


def test_verify_says_that_it_leaves_the_method_out(late, ranks, tmp_path):
    folder, _ = late
    (tmp_path / "plans.json").write_text(json.dumps([{"layout": {"dp_replicate": 2}}]))
    found = verified(ranks, folder / "config.yaml", tmp_path / "run", 2, layouts=str(tmp_path / "plans.json"), steps=2)
    assert found["verdict"] == "same"
    assert [note for note in found["notes"] if note.startswith("train.sync is left out and not verified")]
