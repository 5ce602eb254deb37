"""Checkpoints of a user's run that are damaged, or of another script: what is said, and by which file."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import CheckpointError
from meshwright.runtime.run import Run
from tests.ranks.pool import joined


def started(groups: tuple[int, ...]) -> Run:
    """Two layers under as many optimizers, each with so many groups, after one step."""
    torch.manual_seed(3)
    run, model = Run(joined()), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    left = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = []
    for place, number in enumerate(groups):
        mine: list[dict[str, Any]] = [{"params": [left.pop()]} for _ in range(number)]
        if place == len(groups) - 1:
            mine[-1]["params"] += left
        optimizers.append(torch.optim.AdamW(mine))
    run.parallelize(model, optimizers)
    run.step(torch.ones(2, 2), lambda model, batch: (model(batch).sum(), len(batch)))
    return run


def saved(folder: str, times: int) -> None:
    run = started((1,))
    for _ in range(times):
        run.save(folder)
        run.step(torch.ones(2, 2), lambda model, batch: (model(batch).sum(), len(batch)))
    run.close()


def loaded(folder: str, groups: tuple[int, ...], tag: str | None = None) -> str:
    run = started(groups)
    try:
        run.load(folder, tag=tag)
    except CheckpointError as error:
        return str(error)
    finally:
        run.close()
    return ""


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((1,), ""),
        ((2,), "optimizers of 1 group; this script has module 1: optimizers of 2 groups"),
        ((1, 1), "of 1 group, 1 group"),
    ],
)
def test_a_checkpoint_of_other_optimizers_or_groups_is_refused_with_both(
    ranks, tmp_path: Path, groups: tuple[int, ...], said: str
):
    """Mutation tried: not looked at before the moments are taken (ValueError of zip)."""
    ranks(1).run(saved, str(tmp_path), 1)
    (found,) = ranks(1).run(loaded, str(tmp_path), groups)
    assert said in found and bool(said) == bool(found)
    assert "with tag 'none'" in ranks(1).run(loaded, str(tmp_path), (1,), "none")[0]


def test_a_damaged_checkpoint_that_is_passed_over_is_told_by_file(ranks, tmp_path: Path):
    """The older one is taken. Mutation tried: the store reports to nobody."""
    ranks(1).run(saved, str(tmp_path), 2)
    older, newer = sorted(tmp_path.glob("step-*"))
    (shard,) = newer.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-10])
    said = ranks(1).run(told, str(tmp_path))[0]
    assert f"warning: {newer}: skipped" in said and shard.name in said and str(older) not in said


def told(folder: str) -> str:
    """What is written to stderr while the newest whole checkpoint is loaded."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert loaded(folder, (1,)) == ""
    return said.getvalue()
