"""Ranks that somebody started with different settings, code or data end with 2 and a word on which, before they train."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

import meshwright
from meshwright.config.load import load_config
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.setup import Target, set_up
from tests.e2e import helpers as e2e
from tests.e2e.test_train_signals import free_port, slurm
from tests.ranks.pool import RankError, joined


def test_another_learning_rate_and_another_line_of_code_are_named(tmp_path):
    """One run for both: they are found in the same exchange."""
    package = Path(meshwright.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "meshwright" / "train" / "step.py").open("a") as file:
        file.write("# an older copy\n")
    config, run, port = e2e.settings(tmp_path / "config.yaml"), tmp_path / "run", free_port()

    def task(rank: int, source: Path, lr: float) -> e2e.Command:
        env = {**slurm(rank, port), "PYTHONPATH": str(source)}
        args = ("train", config, f"--run.dir={run}", f"--train.lr={lr}")
        return e2e.Command(*args, env=env, start=("-P", "-m", "meshwright"))

    both = [task(0, package.parent, 0.001), task(1, tmp_path / "other", 0.002)]
    for command in both:
        command.wait(2)
        assert "other settings than rank 0: train.lr (0.002, not 0.001)" in command.err
        assert f"other code than rank 0: {os.path.join('meshwright', 'train', 'step.py')} (" in command.err
        assert "rank 1 on " in command.err and "Traceback" not in command.err
    assert not run.exists(), "nothing was prepared"


def train_from(folders: list[str]) -> None:
    """Each rank with a run folder of its own."""
    from meshwright.runtime.worker import Job, run_job

    run_job(Job(RunFolder(folders[dist.get_rank()])), joined())


@pytest.mark.parametrize("what", ["data", "modules", "plan"])
def test_run_folders_that_are_not_the_same_are_named(ranks, tmp_path, what):
    # Each red without its part of the exchange: training then goes on, on rows of two corpora.
    module = tmp_path / "mine.py"
    module.write_text("x = 1\n")
    config = e2e.settings(tmp_path / "config.yaml", run={"modules": [str(module)]})
    first, second = tmp_path / "run", tmp_path / "other"
    resolved = load_config(config, [f"--run.dir={first}"])
    ready = set_up(
        resolved, Target(2, "cpu", None), RunFolder(first), plan=None, resume=False, write=True, say=lambda text: None
    )
    shutil.copytree(first, second)
    if what == "data":
        store = tmp_path / "store"
        shutil.copytree(ready.corpus.train[0], store)
        manifest = json.loads((store / "manifest.json").read_text())
        (store / "manifest.json").write_text(json.dumps(manifest))  # as if prepared anew: other bytes
        note = json.loads((second / "data" / "corpus.json").read_text())
        (second / "data" / "corpus.json").write_text(json.dumps({**note, "train": [str(store)]}))
        said = r"rank 1 on .*: other data than rank 0: data\.train\.0 \("
    elif what == "plan":
        plan = json.loads((second / "plan.json").read_text())
        (second / "plan.json").write_text(json.dumps({**plan, "bucket_mib": 7}))
        said = r"rank 1 on .*: other settings than rank 0: plan\.bucket_mib \(7, not 32\)"
    else:
        other = tmp_path / "theirs.py"
        other.write_text("x = 2\n")
        text = (second / "config.yaml").read_text()
        (second / "config.yaml").write_text(text.replace(str(module), str(other)))
        said = r"other run\.modules than rank 0"
    with pytest.raises(RankError, match=said):
        ranks(2).run(train_from, [str(first), str(second)])
    assert not list((first / "checkpoints").iterdir())
