"""From a built model, a config and a plan to the engine that trains it, and its initial weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import Config
from meshwright.models import initialize
from meshwright.models.initialize import values_of
from meshwright.parallel.apply import Engine, parallelize
from meshwright.spec.parameters import Table
from meshwright.spec.plan import Plan

__all__ = ["give_values", "make_engine"]


def make_engine(model: nn.Module, config: Config, plan: Plan, mesh: DeviceMesh | None, device: torch.device) -> Engine:
    """model: of `models.build`, on meta or filled; it is split in place. Raises what `parallelize` raises."""
    return parallelize(
        model,
        plan=plan,
        mesh=mesh,
        table=_table(model),
        optimizer=config.train.optimizer,
        device=device,
        loss_scale=config.loss_scale,
        ema=config.train.ema,
        sync=config.train.sync,
        seed=config.run.seed,
    )


def give_values(engine: Engine, seed: int, device: torch.device) -> None:
    """Initial weights: of our own models parameter by parameter, of others as a whole, by their constructor."""
    if getattr(engine.model, "remake", None) is None:
        table = _table(engine.model)
        engine.fill(lambda name, placement: values_of(table, placement, seed))
        return
    with engine.masters() as shell:
        initialize(shell, seed, device)


def _table(model: nn.Module) -> Table:
    table = getattr(model, "table", None)
    assert isinstance(table, Table), "build gives every model one"
    return table
