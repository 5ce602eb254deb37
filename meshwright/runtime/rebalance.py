"""A better split of layers over pipeline stages, from the times that a run measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.errors import CheckpointError, Finding
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.identity import saved_meta
from meshwright.spec.plan import Plan
from meshwright.spec.stages import rebalance

__all__ = ["Measured", "measured_stages", "rebalanced"]


@dataclass(frozen=True)
class Measured:
    """checkpoint: whose times these are. seconds: of a micro-batch, forward and backward, in each stage. split: layers of the
    stages then; better: those by which the times would be even."""

    checkpoint: Path
    seconds: tuple[float, ...]
    split: tuple[int, ...]
    better: tuple[int, ...]


def measured_stages(folder: RunFolder) -> Measured:
    """Of the newest checkpoint of a run. Raises CheckpointError where it has none, or had no pipeline."""
    saved = saved_meta(folder.checkpoints)
    if saved is None:
        fix = "Save one with --checkpoint.every"
        raise CheckpointError(findings=[Finding(str(folder.checkpoints), "has no checkpoint with measured stages", fix)])
    path, meta = saved
    stages = meta.get("stages")
    if not stages:
        raise CheckpointError(findings=[Finding(str(path), "was made without a pipeline", "Use a plan with pp above 1")])
    seconds, split = tuple(stages["seconds"]), tuple(stages["split"])
    return Measured(path, seconds, split, rebalance(seconds, split))


def rebalanced(folder: RunFolder) -> tuple[Measured, Plan]:
    """The run's plan with the better split, which the next resume uses once it is saved as the folder's plan."""
    stages = measured_stages(folder)
    plan = Plan.load(folder.plan)
    if stages.better == stages.split:
        return stages, plan
    return stages, replace(plan, split=stages.better, reason=f"{plan.reason}; stages balanced by measured times")
