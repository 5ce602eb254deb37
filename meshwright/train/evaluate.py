"""Held-out figures: every row exactly once, whatever the number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.loader import Loader
from meshwright.parallel.apply import Engine
from meshwright.train.objectives import Objective

__all__ = ["evaluate"]


def evaluate(engine: Engine, objective: Objective, loader: Loader, *, rows: int, device: torch.device) -> dict[str, float]:
    """Figures of the held-out rows (see `Objective.figures`), with the averaged weights where there are any.

    rows: how many of them, 0 for all. Every data rank must call it. Sums are fp64 and added over the data ranks; padded rows
    weigh zero, so ragged ends are exact.
    """
    with engine.averaged():
        sums = sum_batches(engine.model, objective, loader, rows=rows, device=device)
    if engine.axes.data is not None:
        dist.all_reduce(sums, group=engine.axes.data)
    return objective.figures(sums)


@torch.no_grad()
def sum_batches(model: nn.Module, objective: Objective, loader: Loader, *, rows: int, device: torch.device) -> torch.Tensor:
    """`Objective.evaluate` summed over this rank's batches, with the model in evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    parts = [objective.evaluate(model, batch.to(device)) for batch in loader.evaluate(rows)]
    model.train(was_training)
    return torch.stack(parts).sum(0)
