"""Held-out figures: every row exactly once, whatever the number of ranks."""

from __future__ import annotations

import torch

from meshwright.train.context import Context

__all__ = ["evaluate"]


def evaluate(run: Context) -> dict[str, float]:
    """Figures of the held-out rows (see `Objective.figures`), with the averaged weights where there are any.

    All ranks must call it. Sums are fp64 and added over the data ranks, so padded rows, which weigh zero, change nothing.
    """
    assert run.valid_loader is not None
    sums: torch.Tensor | None = None
    was_training = run.model.training
    run.model.eval()
    with run.engine.averaged(), torch.no_grad():
        for batch in run.valid_loader.evaluate(run.config.evaluate.rows):
            part = run.objective.evaluate(run.model, batch.to(run.device))
            sums = part if sums is None else sums + part
    run.model.train(was_training)
    assert sums is not None, "a loader yields at least one batch on every rank"
    run.data_group.sum_(sums)
    return run.objective.figures(sums)
