"""A run that was stopped and resumed is the run that was not stopped: bitwise on the same ranks, rounding on others.

Mutations tried, each red: moments zeroed; `state.updates`, the patience, the noise scale or the loss scale not restored; the
loader begun at `state.step * batch` instead of `state.consumed` (the ramp finds it); EMA restarted from the weights;
`MetricsWriter` dropping the line of the checkpoint's own step; the refusal only after the folder is written.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant

STORY: dict[str, Any] = {
    "train": {"steps": 30, "micro_batch": 2, "ema": 0.9, "ramp": {"start": 6, "increment": 2, "samples": 60}},
    "evaluate": {"every": 6},
    "checkpoint": {"every": 4},
}
"""Everything that a resume must carry: accumulation, averages, a growing batch, evaluations between checkpoints, dropout."""


@pytest.fixture(scope="module")
def story(ranks, tmp_path_factory) -> Path:
    """The folder of STORY on two ranks, never stopped; beside it the config."""
    folder = tmp_path_factory.mktemp("story")
    config = e2e.settings(folder / "config.yaml", **STORY)
    e2e.train_in(ranks(2), config, folder / "run")
    return folder


def test_stopped_by_ctrl_c_and_again_by_sigterm_it_is_the_run_that_was_not_stopped(story, tmp_path):
    run = tmp_path / "run"
    slow = Plant("sleep", "before step", value=0.05)  # so that a signal finds it in the middle
    first = e2e.train(story / "config.yaml", run, "--resume", "latest", plants=[slow])  # as a job script would start it
    first.until(lambda: e2e.steps_done(run) >= 5)
    first.interrupt()
    first.wait(130)
    assert f"{run}: there is no run to resume; this one begins at step 1" in first.out
    done = e2e.steps_done(run)
    assert 5 <= done < 25 and e2e.newest(run).name == f"step-{done:08d}", "it saved where it stopped"
    assert "stopped by SIGINT" in first.err and "Traceback" not in first.err + first.out

    second = e2e.train(story / "config.yaml", run, "--resume", "latest", plants=[slow])
    second.until(lambda: e2e.steps_done(run) >= done + 3)
    second.process.send_signal(signal.SIGTERM)
    second.wait(143)
    assert "there is no run to resume" not in second.out
    assert f"resumed from {run / 'checkpoints'}/step-{done:08d} at step {done}" in second.out
    assert done + 3 <= e2e.steps_done(run) < 30 and "stopped by SIGTERM" in second.err

    third = e2e.Command("train", "--resume", run, "--nproc", 2).wait()
    assert "30 steps done" in third.out
    e2e.assert_same(run, story / "run")
    assert {r["process"] for r in e2e.records(run)} == {1, 2, 3}


def parts(pool, config: Path, run: Path, *flags: str, first: int = 13, total: int = 30) -> str:
    """The run in two parts; what the second one says."""
    laid_out = f"--train.schedule.total={total}"
    e2e.train_in(pool, config, run, f"--train.steps={first}", laid_out, *flags)
    return e2e.train_in(pool, config, run, f"--train.steps={total}", laid_out, *flags, resume=True)


def test_stopped_by_its_number_of_steps_it_goes_on_and_says_what_changed(ranks, story, tmp_path):
    said = parts(ranks(2), story / "config.yaml", tmp_path / "run")
    assert "changed: train.steps 13 -> 30" in said and "changed: total steps 13 -> 30" in said
    assert "changed: learning rate" not in said
    mine, theirs = e2e.records(tmp_path / "run"), e2e.records(story / "run")
    assert [r["loss"] for r in mine] == [r["loss"] for r in theirs]
    assert e2e.largest_difference(tmp_path / "run", story / "run") == 0.0


@pytest.mark.parametrize("nproc", [1, 4])
def test_resumed_on_other_ranks_it_goes_on_to_rounding(ranks, story, tmp_path, nproc):
    e2e.train_in(ranks(2), story / "config.yaml", tmp_path / "half", "--train.steps=14", "--train.schedule.total=30")
    flags = ("--train.steps=30", "--train.schedule.total=30")
    e2e.train_in(ranks(nproc), story / "config.yaml", tmp_path / "half", *flags, resume=True)
    mine, theirs = e2e.records(tmp_path / "half"), e2e.records(story / "run")
    assert [r["step"] for r in mine] == list(range(1, 31))
    assert [r["loss"] for r in mine[:14]] == [r["loss"] for r in theirs[:14]]
    assert abs(mine[14]["loss"] - theirs[14]["loss"]) <= 1e-6
    assert abs(mine[14]["grad_norm"] - theirs[14]["grad_norm"]) <= 1e-5
    for key in ("lr", "samples", "batch", "targets", "tokens"):
        assert [r[key] for r in mine] == [r[key] for r in theirs], key
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(mine, theirs, strict=True)) <= 1e-4


def test_a_changed_length_is_announced_with_both_learning_rates(ranks, tmp_path):
    # By hand, cosine to a tenth of 3e-3 after a warm-up of 5, update 8: t = 3/7 of 12 steps, 3/35 of 40;
    # 3e-3 (0.1 + 0.45 (1 + cos(pi 3/7))) = 0.0019504, 3e-3 (0.1 + 0.45 (1 + cos(pi 3/35))) = 0.00295135.
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 12})
    e2e.train_in(ranks(2), config, tmp_path / "run", "--checkpoint.every=8")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    said = e2e.train_in(ranks(2), config, tmp_path / "run", "--train.steps=40", resume=True)
    assert "changed: total steps 12 -> 40" in said
    assert "changed: learning rate of step 9 0.0019504 -> 0.00295135" in said, said
    assert e2e.column(tmp_path / "run", "step") == list(range(1, 41))
    assert e2e.column(tmp_path / "run", "lr")[8] == pytest.approx(0.00295135, abs=1e-8)


def test_the_loss_scale_and_its_counters_go_on(ranks, tmp_path):
    scale = {"initial": 1024, "interval": 4, "hysteresis": 2}
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 20}, precision="fp16", loss_scale=scale)
    overflow = [Plant("scale", "before loss", nth=n, rank=1, value=1e30) for n in (3, 9)]
    e2e.train_in(ranks(2), config, tmp_path / "whole", plants=overflow)
    scales = e2e.column(tmp_path / "whole", "loss_scale")
    assert len(set(scales)) >= 3 and e2e.column(tmp_path / "whole", "skipped")[-1] == 2
    flags = ("--train.steps=6", "--train.schedule.total=20")  # two good steps into the count of four
    e2e.train_in(ranks(2), config, tmp_path / "parts", *flags, plants=overflow[:1])
    later = [Plant("scale", "before loss", nth=3, rank=1, value=1e30)]
    flags = ("--train.steps=20", "--train.schedule.total=20")
    e2e.train_in(ranks(2), config, tmp_path / "parts", *flags, resume=True, plants=later)
    for key in ("loss", "loss_scale", "lr", "updates", "skipped"):
        assert e2e.column(tmp_path / "parts", key) == e2e.column(tmp_path / "whole", key), key
    assert e2e.largest_difference(tmp_path / "parts", tmp_path / "whole") == 0.0


def test_the_best_loss_and_the_patience_go_on(ranks, tmp_path):
    # A learning rate that changes nothing: the first evaluation is the best one, and the fourth ends the run.
    config = e2e.settings(
        tmp_path / "config.yaml",
        train={"steps": 40, "lr": 1e-30},
        evaluate={"every": 2, "patience": 3},
        checkpoint={"every": 5},
    )
    said = e2e.train_in(ranks(2), config, tmp_path / "whole")
    assert "no better held-out loss in 3 evaluations" in said and e2e.steps_done(tmp_path / "whole") == 8
    e2e.train_in(ranks(2), config, tmp_path / "parts", "--train.steps=5", "--train.schedule.total=40")
    saved = e2e.state(e2e.newest(tmp_path / "parts"))
    assert (saved["best_step"], saved["bad_evaluations"]) == (2, 2)
    said = e2e.train_in(ranks(2), config, tmp_path / "parts", "--train.schedule.total=40", resume=True)
    assert "no better held-out loss in 3 evaluations" in said and e2e.steps_done(tmp_path / "parts") == 6


@pytest.mark.parametrize(
    ("flag", "key", "now", "then"),
    [
        ("--run.seed=7", "run.seed", "7", "0"),
        ("--model.width=32", "model.width", "32", "64"),
        ("--data.seq_len=16", "data.seq_len", "16", "32"),
        ("--train.optimizer.kind=sgd", "optimizer", "'sgd'", "'adamw'"),
    ],
)
def test_another_run_is_refused_with_both_values_and_nothing_is_touched(story, capfd, flag, key, now, then):
    before = {path: path.stat().st_mtime_ns for path in (story / "run").rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(story / "run"), "--nproc", "2", flag]) == 2
    said = capfd.readouterr().err
    assert f"{key}: is {now}, but " in said and f"was made with {then}" in said and "Traceback" not in said
    after = {path: path.stat().st_mtime_ns for path in (story / "run").rglob("*") if path.is_file()}
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {"corpus.json", ".lock"}, "where the data lies, and who looks, are no settings of the run"


def test_a_run_without_a_checkpoint_begins_again_and_says_so(ranks, story, tmp_path):
    e2e.train_in(
        ranks(2),
        story / "config.yaml",
        tmp_path / "run",
        "--checkpoint.final=false",
        "--checkpoint.every=0",
        "--evaluate.best=false",
        "--train.steps=7",
    )
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")) and e2e.steps_done(tmp_path / "run") == 7
    said = e2e.train_in(ranks(2), story / "config.yaml", tmp_path / "run", resume=True)
    assert "no whole checkpoint" in said and "from the beginning" in said
    e2e.assert_same(tmp_path / "run", story / "run")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(ranks, story, tmp_path):
    shutil.copytree(story / "run", tmp_path / "run")
    newest = e2e.newest(tmp_path / "run")
    shard = sorted(newest.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    said = e2e.train_in(ranks(2), story / "config.yaml", tmp_path / "run", resume=True)
    assert f"{newest}: skipped" in said and shard.name in said and "at step 28" in said
    e2e.assert_same(tmp_path / "run", story / "run")


def test_a_finished_run_that_is_resumed_stays_as_it_is(ranks, story, tmp_path):
    shutil.copytree(story / "run", tmp_path / "run")
    said = e2e.train_in(ranks(2), story / "config.yaml", tmp_path / "run", resume=True)
    assert "ended: 30 steps done" in said
    for name in ("metrics.jsonl", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (story / "run" / name).read_bytes()
    e2e.assert_same(tmp_path / "run", story / "run")


def test_a_resume_takes_the_prepared_corpus_as_it_is(ranks, tmp_path):
    # Mutation tried: `prepare(overwrite=True)` making a corpus anew that is there already.
    data = {"workers": 1, "tokenizer": {"vocab": 320}}
    config = e2e.settings(tmp_path / "config.yaml", e2e.raw(), data=data)
    e2e.train_in(ranks(2), config, tmp_path / "run", "--train.steps=6", "--train.schedule.total=9")
    kept = [path for path in (tmp_path / "run" / "data").rglob("*") if path.is_file() and path.name != "corpus.json"]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}
    e2e.train_in(ranks(2), config, tmp_path / "run", "--train.steps=9", "--train.schedule.total=9", resume=True)
    assert before and before == {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}
    assert e2e.column(tmp_path / "run", "step") == list(range(1, 10))
