"""What a run says of itself: what is held out, what it cannot keep, where its files are, when it is finished; and moving it."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from meshwright.cli import main
from meshwright.config.load import load_config
from meshwright.runtime.evaluation import evaluate_run
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.setup import Ready, Target, set_up
from meshwright.runtime.trained import load_trained
from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant
from tests.e2e.test_train_numerics import SHORT as PAIR
from tests.e2e.test_train_numerics import response_only

SHORT = {"steps": 4, "schedule": {"warmup": 0}}


def prepared(config, folder, *flags: str, resume: bool = False) -> tuple[Ready, list[str]]:
    said: list[str] = []
    resolved = load_config(config, [f"--run.dir={folder}", *flags])
    target = Target(2, "cpu", None)
    return set_up(resolved, target, RunFolder(folder), plan=None, resume=resume, write=False, say=said.append), said


def test_a_drift_on_one_rank_ends_the_run_with_the_first_parameter(tmp_path):
    # Red without the call in the loop: the run then ends well, with two models.
    drift = Plant("poison", "before step", nth=3, rank=1, value=0.25)
    config = e2e.settings(tmp_path / "config.yaml", train={**SHORT, "steps": 8, "sync_check": 2})
    said = e2e.train(config, tmp_path / "run", plants=[drift]).wait(1)
    assert "step 4: layers.0.attention.qkv.weight differs between replicas" in said.err and "step 2" not in said.err
    assert e2e.column(tmp_path / "run", "step") == [1, 2, 3]


def test_a_profile_a_best_loss_and_a_finished_run_are_told(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={**SHORT, "steps": 6}, evaluate={"every": 2})
    run = tmp_path / "run"
    said = e2e.train(config, run, "--profile", "2:3").wait()
    assert f"profile: {run / 'profile'}\n" in said.out
    held_out = {record["step"]: record["val_loss"] for record in e2e.records(run) if "val_loss" in record}
    best = min(held_out, key=lambda step: held_out[step])
    assert re.search(rf"^best held-out loss +{held_out[best]:.4f} at step {best}$", said.out, re.M)
    assert re.search(r"^data: \d+ rows of 32 tokens an epoch, held out: \d+ rows? \([\d,]+ tokens\); 6 steps$", said.out, re.M)
    finished = "this run is finished: 6 steps of 6 done. To go on, raise train.steps"
    assert finished in prepared(config, run, resume=True)[1]
    assert finished not in prepared(config, run, "--train.steps=7", resume=True)[1]
    before = (run / "summary.json").read_text()  # mutation tried: the devices of the process that took no step
    e2e.train_in(ranks(1), config, run, resume=True)
    assert json.loads(before)["devices"] == 2 and (run / "summary.json").read_text() == before
    e2e.train_in(ranks(1), config, run, "--train.steps=7", resume=True)
    assert e2e.column(run, "step") == list(range(1, 8))


def test_what_is_held_out_is_counted(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml")
    ready, said = prepared(config, tmp_path / "run")
    assert ready.held_out > 0 and not said
    assert prepared(config, tmp_path / "run", "--data.valid_fraction=0")[0].held_out == 0


@pytest.mark.parametrize(
    ("flags", "nothing"),
    [((), True), (("--checkpoint.every=2",), False), (("--evaluate.every=2",), False), (("--evaluate.best=false",), True)],
)
def test_a_run_that_saves_nothing_is_told_so(tmp_path, flags, nothing):
    _, said = prepared(e2e.settings(tmp_path / "config.yaml"), tmp_path / "run", "--checkpoint.final=false", *flags)
    assert ("nothing of this run will be saved: checkpoint.final is false and checkpoint.every 0" in said) == nothing


def test_a_corpus_of_another_objective_is_named_or_refused(tmp_path, capsys):
    for made, wanted, model in (("masked_lm", "causal_lm", "decoder"), ("classify", "causal_lm", "decoder")):
        config = e2e.settings(tmp_path / "config.yaml", e2e.corpus(made), model={"arch": model})
        _, said = prepared(config, tmp_path / "run")
        assert [line.split(" was ")[1] for line in said] == [
            f"prepared for {made}, this run is {wanted}: its documents are used as they were framed then"
        ]
    classify = e2e.settings(tmp_path / "config.yaml", model={"arch": "encoder"}, objective={"kind": "classify"})
    assert main(["train", str(classify), f"--run.dir={tmp_path / 'run'}", "--model.classes=3"]) == 2
    said = capsys.readouterr().err
    assert said.count("has no labels, which classify needs") == 1 and "--objective classify --label-key KEY" in said


def test_a_finding_about_one_file_is_said_once(ranks, tmp_path, capsys):
    config = e2e.settings(
        tmp_path / "config.yaml",
        e2e.corpus("classify"),
        model={"arch": "encoder"},
        objective={"kind": "classify"},
        train=SHORT,
    )
    e2e.train_in(ranks(1), config, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), str(e2e.corpus())]) == 2
    assert capsys.readouterr().err.count("has no labels") == 1


def test_a_moved_run_folder_goes_on(ranks, tmp_path):
    # Red with absolute paths in corpus.json.
    data = {"train": [{"path": str(e2e.raw())}], "tokenizer": {"vocab": 320}, "workers": 1}
    config = e2e.settings(tmp_path / "config.yaml", e2e.raw(), data=data, train=SHORT)
    e2e.train_in(ranks(2), config, tmp_path / "run")
    note = json.loads((tmp_path / "run" / "data" / "corpus.json").read_text())
    assert note == {"train": ["train-0"], "valid": [], "tokenizer": "tokenizer"}
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    assert load_trained(moved).tokenizer.vocab_size > 0
    assert evaluate_run(moved, [str(e2e.raw())])[0]["val_loss"] > 0
    assert main(["generate", str(moved), "--prompt", "mesh", "--max-tokens", "1"]) == 0
    e2e.train_in(ranks(2), moved / "config.yaml", moved, "--train.steps=6", resume=True)
    assert e2e.column(moved, "step") == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run").exists()


def test_damaged_metrics_are_refused_before_a_resume_writes(ranks, tmp_path, capsys):
    config = e2e.settings(tmp_path / "config.yaml", train=SHORT)
    e2e.train_in(ranks(1), config, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("garbage\n")
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.steps=9"]) == 2
    assert "metrics.jsonl:1: is not JSON" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("batch", [2, 16])
def test_any_number_of_rows_under_any_batch_ends(ranks, tmp_path, rows, batch):
    config = response_only(tmp_path, [PAIR] * rows, batch=batch, epochs=2, steps=None, micro_batch=1)
    e2e.train_in(ranks(2), config, tmp_path / "run", timeout=30)
    sizes = [batch] * (rows // batch) + ([rows % batch] if rows % batch else [])
    assert e2e.column(tmp_path / "run", "batch") == sizes * 2
