"""Saving and resuming a run: what goes into a checkpoint beside tensors, and what a resume accepts or refuses."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.checkpoint.retain import checkpoint_copies
from meshwright.config.load import flatten
from meshwright.config.schema import Config
from meshwright.train.context import Context
from meshwright.train.schedule import Budget, learning_rate
from meshwright.train.state import TrainState

__all__ = ["check_room", "restore", "save"]


def check_room(run: Context) -> None:
    """Refuse to start on a disk that cannot hold what will lie on it at the worst moment: the kept checkpoints, the best one
    and a new one beside them. Raises DeviceError with needed and free bytes."""
    copies = checkpoint_copies(run.config, run.valid_loader is not None)
    if copies:
        run.store.check_space(run.engine.parameters_state(), copies=copies)


def save(run: Context) -> None:
    """Save now unless this step is saved already. The lines of all steps so far are written first."""
    state = run.state
    if run.saved_at == state.step or state.step == 0:
        return
    run.recorder.flush()
    state.engine = run.engine.extra_state()
    state.noise = run.recorder.figures.noise.state_dict()
    meta = {
        "config": run.config.model_dump(mode="json"),
        "plan": run.plan.to_dict(),
        "state": {**state.to_dict(), "seconds": run.elapsed()},
        "identity": run.identity,
        "total": run.budget.steps,
        "stages": run.engine.runner.measured(),
        "versions": {"meshwright": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    run.store.save(state.step, run.engine.parameters_state(), meta, background=run.config.checkpoint.background)
    if run.config.evaluate.best and state.best_step == state.step and state.best_loss is not None:
        run.store.mark_best(state.step, state.best_loss)
    run.saved_at = state.step
    run.watchdog.beat("a save")


def restore(run: Context, path: Path, meta: dict[str, Any]) -> None:
    """Take weights, moments and counters from the checkpoint `path` whose meta is `meta`."""
    run.store.load(path, run.engine.parameters_state())
    run.engine.after_load()
    run.state = TrainState.from_dict(meta["state"])
    run.engine.load_extra(run.state.engine)
    if run.state.noise:
        run.recorder.figures.noise.load_state_dict(run.state.noise)
    run.saved_at = run.state.step
    run.progress.note(f"resumed from {path} at step {run.state.step}")
    for line in changes(Config.model_validate(meta["config"]), run.config, meta["total"], run.budget, run.state):
        run.progress.note(line)


def changes(old: Config, new: Config, old_total: int | None, budget: Budget, state: TrainState) -> list[str]:
    """Settings that differ from those the run was saved with, and what they do to the learning rate."""
    before, after = dict(flatten(old.model_dump(mode="json"))), dict(flatten(new.model_dump(mode="json")))
    lines = [f"changed: {key} {before.get(key)} -> {after.get(key)}" for key in after if before.get(key) != after.get(key)]
    lines = [line for line in lines if not line.startswith("changed: run.dir")]
    was = learning_rate(old.train, state.updates, old_total or 0)
    is_now = learning_rate(new.train, state.updates, budget.steps or 0)
    if old_total != budget.steps:
        lines.append(f"changed: total steps {old_total} -> {budget.steps}")
    if was != is_now:
        lines.append(f"changed: learning rate of step {state.step + 1} {was:.6g} -> {is_now:.6g}")
    return lines
