"""The number of ranks, the split into micro-batches and overlap change nothing but rounding.

Mutations tried, each red: `train_step` dividing by the rank's own targets; `position_keys` keyed by the row's place in the
micro-batch instead of its sample; the clip on rank 0 only; `Loader._share` dealing floor(rows / ranks) rows; padded rows with
real labels; a bucket launched before its last gradient has arrived.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.e2e import helpers as e2e


def furthest(a: Path, b: Path, key: str) -> float:
    first, second = e2e.column(a, key), e2e.column(b, key)
    assert len(first) == len(second) > 0
    return max(abs(x - y) for x, y in zip(first, second, strict=True))


def assert_close(folder: Path, reference: Path, tolerance: float) -> None:
    """Loss, norm and held-out loss of every step, and at the end weights, moments and averages."""
    for key in ("step", "lr", "samples", "tokens", "targets", "batch"):
        assert e2e.column(folder, key) == e2e.column(reference, key), key
    assert furthest(folder, reference, "loss") <= tolerance
    assert furthest(folder, reference, "grad_norm") <= 10 * tolerance
    held_out = [(r["step"], r["val_loss"]) for r in e2e.records(folder) if "val_loss" in r]
    expected = [(r["step"], r["val_loss"]) for r in e2e.records(reference) if "val_loss" in r]
    assert held_out and [s for s, _ in held_out] == [s for s, _ in expected]
    assert max(abs(a - b) for (_, a), (_, b) in zip(held_out, expected, strict=True)) <= tolerance
    assert e2e.largest_difference(folder, reference) <= tolerance


def test_the_command_gives_the_losses_and_weights_of_1_and_of_4_ranks(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 100, "micro_batch": 2}, precision="fp64")
    plan = Plan(Layout(dp_replicate=2), micro_batch=3, precision="fp64", overlap=False, reason="by hand")
    plan.save(tmp_path / "plan.json")
    said = e2e.train(config, tmp_path / "on-2", "--plan", tmp_path / "plan.json", nproc=2).wait().out
    assert "2 data-parallel ranks x 2 micro-steps x 3 rows" in said and "(by hand)" in said
    for nproc, rows in ((1, 5), (4, 3)):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}", f"--train.micro_batch={rows}")
    assert Plan.load(tmp_path / "on-2" / "plan.json") == plan
    losses = e2e.column(tmp_path / "on-1", "loss")
    assert losses[0] > 5.5 and losses[-1] < 3.2, "it learns"
    assert e2e.column(tmp_path / "on-1", "grad_norm")[0] > 0.5, "the clip is felt"
    for nproc in (2, 4):
        assert_close(tmp_path / f"on-{nproc}", tmp_path / "on-1", 1e-9)


def test_in_fp32_the_first_20_losses_agree_to_1e_5(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml")
    for nproc in (1, 2, 4):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}")
    for nproc in (2, 4):
        assert furthest(tmp_path / f"on-{nproc}", tmp_path / "on-1", "loss") <= 1e-5


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_micro_batches_of_1_2_and_5_rows_are_one_and_the_same(ranks, tmp_path, nproc):
    config = e2e.settings(tmp_path / "config.yaml", train={"ema": 0.9}, evaluate={"every": 10}, precision="fp64")
    for micro in (10, 5, 2, 1):
        e2e.train_in(ranks(nproc), config, tmp_path / f"of-{micro}", f"--train.micro_batch={micro}")
    for micro in (5, 2, 1):
        assert_close(tmp_path / f"of-{micro}", tmp_path / "of-10", 1e-9)


def test_an_epoch_with_a_ragged_end_and_a_batch_that_grows_are_the_same_on_any_ranks(ranks, tmp_path):
    ramp = {"start": 3, "increment": 2, "samples": 100}
    config = e2e.settings(
        tmp_path / "config.yaml",
        data={"seq_len": 64},
        train={"steps": None, "epochs": 2, "batch": 11, "ramp": ramp},
        precision="fp64",
    )
    for nproc in (1, 2, 4):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}")
    sizes = e2e.column(tmp_path / "on-1", "batch")
    assert sizes[0] == 3 and max(sizes) == 11 and sizes.count(11) > 20
    rows = e2e.column(tmp_path / "on-1", "samples")[-1] // 2
    assert rows % 11 and e2e.column(tmp_path / "on-1", "samples")[-1] == 2 * rows, "two epochs, every row in each"
    assert rows in e2e.column(tmp_path / "on-1", "samples"), "an epoch ends with a smaller step"
    for nproc in (2, 4):
        assert_close(tmp_path / f"on-{nproc}", tmp_path / "on-1", 1e-9)


ENCODER = {"arch": "encoder", "kv_heads": None, "positions": "learned", "norm": "layer", "activation": "gelu"}


def test_a_masked_language_model_is_the_same_on_any_ranks(ranks, tmp_path):
    config = e2e.settings(
        tmp_path / "config.yaml",
        e2e.corpus("masked_lm"),
        model=ENCODER,
        objective={"kind": "masked_lm"},
        precision="fp64",
    )
    for nproc in (1, 2, 4):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}")
    for nproc in (2, 4):
        assert_close(tmp_path / f"on-{nproc}", tmp_path / "on-1", 1e-9)
        assert (
            e2e.records(tmp_path / f"on-{nproc}")[-1]["val_masked_accuracy"]
            == e2e.records(tmp_path / "on-1")[-1]["val_masked_accuracy"]
        )


def test_a_classifier_is_the_same_on_any_ranks(ranks, tmp_path):
    config = e2e.settings(
        tmp_path / "config.yaml",
        e2e.corpus("classify"),
        model=ENCODER,
        objective={"kind": "classify"},
        train={"steps": 30},
        evaluate={"every": 10},
        precision="fp64",
    )
    for nproc in (1, 2, 4):
        e2e.train_in(ranks(nproc), config, tmp_path / f"on-{nproc}")
    last = e2e.records(tmp_path / "on-1")[-1]
    assert last["val_accuracy"] > 0.5, "it learns"
    for nproc in (2, 4):
        assert_close(tmp_path / f"on-{nproc}", tmp_path / "on-1", 1e-9)
        other = e2e.records(tmp_path / f"on-{nproc}")[-1]
        assert (other["val_accuracy"], other["val_f1"]) == (last["val_accuracy"], last["val_f1"])


def test_overlap_is_bitwise_the_same_as_none(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", model={"vocab": 8192}, train={"steps": 10})
    plan = Plan(Layout(dp_replicate=2), micro_batch=3, overlap=True, bucket_mib=1)
    for name, chosen in (("on", plan), ("off", replace(plan, overlap=False))):
        e2e.train_in(ranks(2), config, tmp_path / name, plan=chosen)
        assert Plan.load(tmp_path / name / "plan.json").overlap is (name == "on")
    e2e.assert_same(tmp_path / "off", tmp_path / "on")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("precision", "steps", "tolerance"), [("fp32", 20, 1e-5), ("fp64", 100, 1e-9)])
def test_the_quickstart_itself_on_1_2_and_4_ranks(tmp_path, precision, steps, tolerance):
    config = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    given = (
        f"--precision={precision}",
        f"--train.steps={steps}",
        "--train.schedule.total=300",
        "--run.device=cpu",
        "--log.sample=",
    )
    shared = f"--data.cache={tmp_path / 'cache'}"
    for nproc in (1, 2, 4):
        e2e.train(config, tmp_path / f"on-{nproc}", shared, *given, nproc=nproc).wait(timeout=1700)
    for nproc in (2, 4):
        folder, reference = tmp_path / f"on-{nproc}", tmp_path / "on-1"
        assert len(e2e.column(folder, "loss")) == steps
        assert furthest(folder, reference, "loss") <= tolerance
        if precision == "fp64":
            assert e2e.largest_difference(folder, reference) <= tolerance
