"""`meshwright verify`: the command, its table, its exit codes, and that it tells a wrong layout from a right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.config.load import load_config
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.setup import Target
from meshwright.runtime.verification import VerifyCommand, verify_on
from tests.e2e import helpers as e2e
from tests.ranks.pool import joined

PLANS = [
    {"layout": {"dp_replicate": 2}},
    {"layout": {"dp_shard": 2, "zero": 2}, "micro_batch": 2},
]

FAULTY = """
import torch.distributed as dist

real = dist.all_reduce
class Done:
    def wait(self): pass
dist.all_reduce = lambda tensor, *args, **options: Done() if options.get("async_op") else real(tensor, *args, **options)
"""
"""A user's module that drops the reduction of gradients."""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "plans.json").write_text(json.dumps(PLANS))
    (tmp_path / "faulty.py").write_text(FAULTY)
    return e2e.settings(tmp_path / "config.yaml", run={"dir": str(tmp_path / "run")}), tmp_path


def test_the_command_prints_a_table_and_leaves_nothing(files):
    config, folder = files
    found = e2e.Command("verify", config, "--nproc", 2, "--layouts", folder / "plans.json", "--steps", 2).wait()
    lines = found.out.splitlines()
    assert lines[0].split() == ["layout", "how", "difference", "where", "verdict"]
    assert lines[1].startswith("dp_replicate 2 ") and lines[2].startswith("zero2 dp_shard 2 ")
    assert all(line.endswith("same") for line in lines[1:3]) and "2 of 2 as one device: 2 steps of 7 rows, fp64" in found.out
    assert "1 of 2: dp_replicate 2" in found.err and not (folder / "run").exists()


def test_a_wrong_layout_is_named_and_ends_with_1(files):
    # The data-parallel layout has lost its reduction; ZeRO reduces otherwise and is right.
    config, folder = files
    flags = ("--layouts", folder / "plans.json", "--steps", 1, "--json", f"--run.modules=[{folder / 'faulty.py'}]")
    found = json.loads(e2e.Command("verify", config, "--nproc", 2, *flags).wait(code=1).out)
    assert found["verdict"] == "differs" and [row["verdict"] for row in found["rows"]] == ["differs", "same"]
    worst = found["rows"][0]["worst"]
    assert worst["gradient"]["difference"] > 0.01 and "step 1" in worst["gradient"]["where"]
    assert worst["loss"]["difference"] < 1e-12, "the first loss is before any gradient"


def verified(ranks, config: Path, folder: Path, world: int, *overrides: str, **options) -> dict:
    """The command's own preparation, and its ranks in the warm pool."""
    command = VerifyCommand(str(config), list(overrides), quiet=True, **options)
    resolved = load_config(config, [*overrides, f"--precision={command.precision}"])
    command._prepare(resolved, RunFolder(folder), Target(world, "cpu", None))
    answers = ranks(world).run(verify_in_rank, str(folder), timeout=280.0)
    assert all(answer == answers[0] for answer in answers), "every rank knows what was found"
    return answers[0]


def verify_in_rank(folder: str) -> dict:
    found = verify_on(joined(), RunFolder(folder))
    for row in found["rows"]:
        row["seconds"] = 0  # each rank's own
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_is_right_by_itself(ranks, files, world):
    # The meta model, filled by the run's own generator, as in training.
    config, folder = files
    found = verified(ranks, config, folder / "every", world, "--model.attention_dropout=0.1")
    assert found["verdict"] == "same" and len(found["rows"]) >= 7 * world // 2
    assert any("attention dropout is off" in note for note in found["notes"])
    kinds = {kind for row in found["rows"] for kind in row["worst"]}
    assert kinds == {"loss", "norm", "gradient", "weight"}


@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-11), ("fp32", 3e-6), ("bf16", 3e-2), ("fp16", 4e-3)])
def test_each_precision_stays_well_inside_its_tolerance(ranks, files, precision, limit):
    # With biases of keys, whose gradient is rounding alone: red in fp64 with AdamW's usual eps, and in fp32 under AdamW.
    config, folder = files
    options = {"precision": precision, "steps": 2, "layouts": str(folder / "plans.json")}
    found = verified(ranks, config, folder / precision, 2, "--model.qkv_bias=true", **options)
    assert found["verdict"] == "same"
    worst = max(kind["difference"] for row in found["rows"] for kind in row["worst"].values())
    assert worst <= limit < found["tolerance"]
    assert ("SGD" in " ".join(found["notes"])) == (precision != "fp64")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--layouts", "nowhere.json"], ["nowhere.json: cannot be read"]),
        (["--precision", "fp8"], ["--precision", "fp8"]),
        (["--model.widht=3"], ["model.widht", "width"]),
        (["--steps", "0"], ["--steps"]),
    ],
)
def test_a_users_mistake_ends_with_2_and_says_what_it_is(files, capfd, flags, says):
    config, folder = files
    assert main(["verify", str(config), "--nproc", "2", *flags]) == 2
    said = capfd.readouterr().err
    assert all(words in said for words in says) and "Traceback" not in said, said
    assert not (folder / "run").exists()


def test_a_plan_for_other_ranks_is_refused_before_any_is_started(files, capfd):
    config, folder = files
    assert main(["verify", str(config), "--nproc", "4", "--layouts", str(folder / "plans.json")]) == 2
    said = capfd.readouterr().err
    assert "plan 1: is for 2 ranks, but 4 are started" in said and "plan 2: is for 2 ranks" in said
