"""What a checkpoint of a user's run keeps beside its tensors, and the tensors of all its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint import Piece
from meshwright.errors import CheckpointError, Finding, counted
from meshwright.runtime.training import Training

__all__ = ["check_alike", "pieces_of", "take_state", "training_state"]


def training_state(training: Training) -> dict[str, Any]:
    """JSON values of one module under training."""
    settings = [each.state_dict()["param_groups"] for each in training.optimizers]
    counts = {"steps": training.steps, "updates": training.updates, "skipped": training.skipped}
    return {**counts, "engine": training.engine.extra_state(), "optimizers": training.own.state(), "settings": settings}


def check_alike(trainings: Sequence[Training], saved: Mapping[str, Any] | None, path: Path) -> None:
    """Raises CheckpointError where a checkpoint has other modules, optimizers or groups than the script. saved: its `run`."""
    if saved is None:
        raise CheckpointError(findings=[Finding(str(path), "is none that run.save has written")])
    here = [[len(optimizer.param_groups) for optimizer in each.optimizers] for each in trainings]
    there = [[len(groups) for groups in each["settings"]] for each in saved["trainings"]]
    if here != there:
        what = f"has {_counted(there)}; this script has {_counted(here)}"
        raise CheckpointError(findings=[Finding(str(path), what, "Call run.parallelize as the script did that saved it")])


def _counted(groups: Sequence[Sequence[int]]) -> str:
    """Groups of each optimizer of each module, in words."""
    modules = [", ".join(counted(number, "group") for number in each) for each in groups]
    return "; ".join(f"module {number}: optimizers of {each}" for number, each in enumerate(modules, 1)) or "no module"


def take_state(training: Training, saved: Mapping[str, Any]) -> None:
    """Takes `training_state`, once the tensors are loaded."""
    training.engine.after_load()
    training.engine.load_extra(saved["engine"])
    training.steps, training.updates, training.skipped = saved["steps"], saved["updates"], saved["skipped"]
    for optimizer, groups in zip(training.optimizers, saved["settings"], strict=True):
        for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
            mine.update({key: tuple(value) if isinstance(value, list) else value for key, value in theirs.items()})


def pieces_of(trainings: Sequence[Training]) -> list[Piece]:
    """Of all modules; with several each has its number before its names."""
    if len(trainings) == 1:
        return trainings[0].engine.parameters_state()
    numbered = [(number, piece) for number, each in enumerate(trainings) for piece in each.engine.parameters_state()]
    return [replace(piece, name=f"{number}/{piece.name}") for number, piece in numbered]
