"""Numbers that are not finite, batches without a target, ragged ends: named, counted, and never silently learned from.

Mutations tried, each red: updating although the norm is not finite; `state.updates` counting skipped steps; the step without
targets updating (weight decay and moments move).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.cli import main
from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant
from tests.ranks.pool import RankError


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return e2e.tensors(folder / "checkpoints" / f"step-{step:08d}")


def test_a_nan_ends_the_run_at_its_step_and_the_saved_weights_are_whole(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", checkpoint={"every": 3})
    nan = Plant("poison", "before step", nth=8, value=math.nan)
    said = e2e.train(config, tmp_path / "run", plants=[nan]).wait(1)
    assert "step 8: loss nan, gradient norm nan, first in the gradient of " in said.err and "Traceback" not in said.err
    assert "set train.on_nonfinite: skip" in said.err
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 8 and last["loss"] is None and last["grad_norm"] is None
    assert {"loss", "grad_norm"} <= set(last["nonfinite"])
    assert e2e.newest(tmp_path / "run").name == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in e2e.tensors(e2e.newest(tmp_path / "run")).values())


@pytest.mark.parametrize("rank", [0, 1])
def test_policy_stop_on_whichever_rank_it_appears_keeps_all_weights(ranks, tmp_path, rank):
    config = e2e.settings(tmp_path / "config.yaml", checkpoint={"every": 3})
    with pytest.raises(RankError, match=r"step 5: loss inf, gradient norm (nan|inf)"):
        e2e.train_in(
            ranks(2), config, tmp_path / "run", plants=[Plant("scale", "before loss", nth=5, rank=rank, value=math.inf)]
        )
    assert e2e.column(tmp_path / "run", "loss")[4] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_policy_skip_leaves_the_weights_counts_and_goes_on(ranks, tmp_path, rank):
    config = e2e.settings(
        tmp_path / "config.yaml", train={"on_nonfinite": "skip", "steps": 10}, checkpoint={"every": 1, "keep": 10}
    )
    nan = Plant("scale", "before loss", nth=8, rank=rank, value=math.nan)
    said = e2e.train_in(ranks(2), config, tmp_path / "run", plants=[nan])
    assert "1 of 10 steps updated nothing" in said
    records = e2e.records(tmp_path / "run")
    assert [r["skipped"] for r in records] == [0] * 7 + [1] * 3 and [r["updates"] for r in records][6:9] == [7, 7, 8]
    assert records[7]["loss"] is None and "loss" in records[7]["nonfinite"] and records[8]["loss"] > 0
    assert records[8]["lr"] == records[7]["lr"] != records[6]["lr"], "the schedule does not move with a skipped step"
    before, after, later = (weights(tmp_path / "run", step) for step in (7, 8, 9))
    assert all(torch.equal(before[name], after[name]) for name in before), "weights and moments, bit for bit"
    assert any(not torch.equal(after[name], later[name]) for name in before)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_fp16_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale(ranks, tmp_path, rank):
    config = e2e.settings(
        tmp_path / "config.yaml", precision="fp16", train={"steps": 10, "sync_check": 1}, loss_scale={"initial": 4096}
    )
    overflow = Plant("scale", "before loss", nth=4, rank=rank, value=1e30)
    e2e.train_in(ranks(2), config, tmp_path / "run", plants=[overflow])
    records = e2e.records(tmp_path / "run")
    assert [r["loss_scale"] for r in records] == [4096.0] * 4 + [2048.0] * 6
    assert [r["updates"] for r in records] == [1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert records[4]["lr"] == records[3]["lr"] != records[2]["lr"]
    assert all(r["loss"] is not None and math.isfinite(r["loss"]) for r in records[4:])


def test_an_fp16_run_that_can_only_overflow_ends_with_the_reason(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", precision="fp16", loss_scale={"initial": 4, "floor": 1})
    with pytest.raises(RankError, match=r"step 3: loss .*first in the gradient of "):
        e2e.train_in(ranks(2), config, tmp_path / "run", plants=[Plant("scale", "before loss", value=1e38)])
    assert e2e.column(tmp_path / "run", "loss_scale") == [4.0, 2.0, 1.0]


# ---- batches without a target ---------------------------------------------------------------------------------------------


def response_only(folder: Path, rows: list[tuple[str, str]], **train: object) -> Path:
    """A config of prompts and responses; only the tokens of a response are targets, and a long prompt fills rows without."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in rows))
    data = {
        "packing": "none",
        "valid_fraction": 0,
        "workers": 1,
        "seq_len": 16,
        "tokenizer": {"path": str(e2e.corpus() / "tokenizer")},
    }
    values = {"micro_batch": 1, "schedule": {"warmup": 0}, **train}
    return e2e.settings(
        folder / "config.yaml", source, data=data, objective={"response_only": True}, train=values, run={"seed": 1}
    )


SHORT = ("mesh ring", "shard tensor")
LONG = ("mesh " * 200, "ring")
"""Rows of prompt alone, and a last one with the response."""


def test_a_step_without_any_target_is_skipped_and_counted(ranks, tmp_path):
    config = response_only(tmp_path, [LONG], batch=2, epochs=1, steps=None)
    for nproc in (1, 2):
        folder = tmp_path / f"on-{nproc}"
        said = e2e.train_in(ranks(nproc), config, folder, "--checkpoint.every=1", "--checkpoint.keep=99")
        targets = e2e.column(folder, "targets")
        full = [step for step, count in enumerate(targets, start=1) if count]
        assert len(full) == 1 and full[0] >= 2 and len(targets) > 5, "the seed puts the response into a later step"
        assert f"{len(targets) - 1} of {len(targets)} steps updated nothing (no target in the whole batch" in said
        for record in e2e.records(folder):
            assert (record["loss"] is None) == (record["targets"] == 0) and "nonfinite" not in record
        for step in range(2, len(targets) + 1):
            before, after = weights(folder, step - 1), weights(folder, step)
            assert all(torch.equal(before[name], after[name]) for name in before) == (step != full[0])
        lr = e2e.column(folder, "lr")
        assert len(set(lr[: full[0]])) == 1 and len(set(lr[full[0] :])) == 1 and lr[0] != lr[-1]
    losses = [[r["loss"] for r in e2e.records(tmp_path / f"on-{n}") if r["loss"] is not None] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_run_without_any_target_fails_and_says_why(tmp_path):
    config = response_only(tmp_path, [LONG], batch=2, steps=1)
    said = e2e.train(config, tmp_path / "run", nproc=1).wait(1)
    assert "no step of 1 updated the weights: no target in the whole batch" in said.err
    assert "Traceback" not in said.err


# ---- ragged ends ----------------------------------------------------------------------------------------------------------


def test_ten_rows_in_batches_of_eight_are_steps_of_eight_and_two(ranks, tmp_path, capsys):
    config = response_only(tmp_path, [SHORT] * 10, batch=8, epochs=2, steps=None)
    for nproc in (1, 2, 4):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}", "--precision=fp64")
        assert e2e.column(tmp_path / f"on-{nproc}", "batch") == [8, 2, 8, 2]
        assert e2e.column(tmp_path / f"on-{nproc}", "samples") == [8, 10, 18, 20]
    for nproc in (2, 4):
        assert e2e.column(tmp_path / f"on-{nproc}", "loss") == pytest.approx(e2e.column(tmp_path / "on-1", "loss"), abs=1e-12)
        assert e2e.largest_difference(tmp_path / f"on-{nproc}", tmp_path / "on-1") <= 1e-12
    said = e2e.train_in(ranks(2), config, tmp_path / "dropped", "--train.tail=drop")
    assert e2e.column(tmp_path / "dropped", "batch") == [8, 8]
    assert "4 rows left out at the end of an epoch (train.tail: drop)" in said  # red when the last epoch's are not counted
    capsys.readouterr()
    assert main(["train", str(config), f"--run.dir={tmp_path / 'dry'}", "--train.tail=drop", "--dry-run"]) == 0
    assert "data: 2 rows left out at the end of each epoch (train.tail: drop)" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 9])
def test_any_number_of_rows_ends_on_two_ranks(ranks, tmp_path, rows):
    config = response_only(tmp_path, [SHORT] * rows, batch=min(rows, 4), epochs=1, steps=None)
    e2e.train_in(ranks(2), config, tmp_path / "run", timeout=30)
    assert sum(e2e.column(tmp_path / "run", "batch")) == rows
