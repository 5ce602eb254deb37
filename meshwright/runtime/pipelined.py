"""Steps of a pipeline: micro-batches of one shape, and what the last stage knows told to the others.

A loss exists on the rank of the last stage only. Nothing can be agreed on while micro-batches run, since the others do not see
them: what the weight is guessed from is agreed on before, and what was counted is told afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from meshwright.distributed.reduce import broadcast_json, max_scalars, sum_scalars
from meshwright.distributed.world import Ranks
from meshwright.parallel.engine import Engine
from meshwright.runtime.batches import Split, rows_of
from meshwright.runtime.losses import Window
from meshwright.spec.pipeline import rank_of

__all__ = ["even_parts", "guess_weight", "tell"]


def even_parts(batch: Any, empty: bool, at_once: int | None, count: int, split: Split, ranks: Ranks) -> list[tuple[Any, bool]]:
    """(micro-batch, whether it stands in for no rows), the same number on every rank, of equally many rows on this one.

    at_once: rows of one, at most; None: as many as make `count` of them. The rows are the largest divisor of those of the batch
    that is not more; ranks with fewer micro-batches than others run their first one again, which then weighs nothing.
    Collective.
    """
    rows = rows_of(batch)
    if rows:
        most = max(1, math.ceil(rows / count)) if at_once is None else at_once
        count = rows // max(size for size in range(1, min(most, rows) + 1) if rows % size == 0)
    wanted = int(max_scalars([count], ranks.control)[0])
    parts = [batch] if count == 1 else split(batch, count)
    return [(part, empty) for part in parts] + [(parts[0], True)] * (wanted - len(parts))


def guess_weight(window: Window, batch: Any, empty: bool) -> None:
    """Lets all ranks divide by the number of rows where the weight is not known. Collective."""
    rows = 0 if empty or not window.counts else rows_of(batch) or 1
    window.guess = sum_scalars([rows], window.ranks.control)[0] or 1.0


def tell(window: Window, engine: Engine) -> None:
    """What the last stage has counted, on every rank of its pipeline. Collective."""
    group, runner = engine.axes.model["pp"], engine.runner
    last: int = rank_of(runner.schedule, runner.ranks, runner.final)  # type: ignore[attr-defined]  # a pipeline's
    mine = dist.get_rank(group) == last
    told = broadcast_json(window.told() if mine else None, group, last, engine.parameters.groups[0].device)
    if not mine:
        window.follow(told)
