"""Whether a registered model mixes the rows of a batch, said before its layouts are compared."""

from __future__ import annotations

from torch import nn

from meshwright.data.batch import Batch
from meshwright.distributed.world import Ranks
from meshwright.errors import Finding
from meshwright.models import LossParts
from meshwright.verify.cases import Case, alone, opened
from meshwright.verify.probe import mixes_rows

__all__ = ["rows_finding"]


def rows_finding(case: Case, ranks: Ranks, micro_batch: int) -> Finding | None:
    """Of the case's model, with its initial weights, on its first rows. In this process alone."""
    with opened(case, alone(case.config, max(2, micro_batch)), None, ranks) as context:
        data = next(context.train_loader.steps(context.state.consumed, lambda _: case.config.train.batch))

        def call(model: nn.Module, batch: Batch) -> LossParts:
            return context.objective.loss(model, batch, None)

        context.engine.zero()
        return mixes_rows(context.engine.model, data.micro[0].to(ranks.device), call)
