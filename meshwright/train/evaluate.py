"""Held-out figures: every row exactly once, whatever the number of ranks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.batch import Batch
from meshwright.data.loader import Loader
from meshwright.parallel.apply import Engine
from meshwright.parallel.context import counted_here
from meshwright.train.objectives import Objective

__all__ = ["evaluate", "sum_batches"]

WINDOW = 16
"""Batches that are run together: a pipeline fills and drains once for so many, and so many wait in host memory."""


def evaluate(engine: Engine, objective: Objective, loader: Loader, *, rows: int, device: torch.device) -> dict[str, float]:
    """Figures of the held-out rows (see `Objective.figures`), with the averaged weights where there are any.

    rows: how many of them, 0 for all. Every rank must call it. Sums are fp64 and added over the data ranks; padded rows weigh
    zero, so ragged ends are exact. Ranks that hold parts of one model all have the sums of its rows; of ranks that share the
    positions of a row each adds its own targets.
    """
    with engine.averaged():
        sums = sum_batches(engine.model, objective, loader, rows=rows, device=device, engine=engine)
    if engine.axes.data is not None:
        dist.all_reduce(sums, group=engine.axes.data)
    return objective.figures(sums)


@torch.no_grad()
def sum_batches(
    model: nn.Module, objective: Objective, loader: Loader, *, rows: int, device: torch.device, engine: Engine | None = None
) -> torch.Tensor:
    """`Objective.evaluate` summed over this rank's batches, with the model in evaluation mode meanwhile.

    engine: runs the batches where the model may be a part of one; else they go through the model."""
    was_training = model.training
    model.eval()
    parts: list[torch.Tensor] = []

    def taken(_: int, part: torch.Tensor) -> None:
        parts.append(part)

    batches = iter(loader.evaluate(rows))
    while window := list(itertools.islice(batches, WINDOW)):

        def forward(model: nn.Module, i: int, window: list[Batch] = window) -> torch.Tensor:
            return objective.evaluate(model, counted_here(model, window[i].to(device)))

        if engine is None:
            parts += [forward(model, i) for i in range(len(window))]
        else:
            engine.evaluate(len(window), forward, taken)
    model.train(was_training)
    return torch.stack(parts).sum(0)
