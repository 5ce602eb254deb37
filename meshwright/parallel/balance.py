"""How evenly the experts of a model are used: counted over all data ranks once a step, and steered by biases.

With balance: bias (arXiv:2408.15664) the choice of experts is made by p + bias, and after every update

    bias_e += rate * sign(mean load - load of e)

from the loads of the whole step, which are integers: the same on every rank, whatever the layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright.models.moe import MoE

__all__ = ["Balance"]


class Balance:
    """The layers of experts of a rank's model. data: ranks that see other rows. model: groups of ranks that hold other layers.

    rate: what a bias moves by.
    """

    def __init__(self, model: nn.Module, data: dist.ProcessGroup | None, stages: dist.ProcessGroup | None, rate: float):
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        self.data, self.stages, self.rate = data, stages, rate
        self._counts: torch.Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, data: dist.ProcessGroup | None, stages: dist.ProcessGroup | None) -> Balance | None:
        """None for a model without experts. The same answer on every rank."""
        config = getattr(model, "config", None)
        if not getattr(config, "experts", 0):
            return None
        return cls(model, data, stages, config.balance_coefficient)  # type: ignore[union-attr]  # it has experts

    def start(self) -> None:
        """Before the first forward of a step."""
        self._counts = None
        for layer in self.layers:
            layer.load.zero_()
            layer.dropped.zero_()

    def counts(self) -> torch.Tensor:
        """int64 [layers here, E + 1] of the step so far: load of every expert, pairs dropped; the same on all data ranks.
        Collective when first asked for after `start`."""
        if self._counts is None:
            self._counts = torch.stack([torch.cat((layer.load, layer.dropped[None])) for layer in self.layers])
            if self.data is not None:
                dist.all_reduce(self._counts, group=self.data)
        return self._counts

    def update(self, skip: torch.Tensor) -> None:
        """Moves the biases, unless `skip` (bool, 0-d)."""
        for layer, counts in zip(self.layers, self.counts(), strict=True):
            bias, load = layer.router.bias, counts[:-1]
            if bias is not None:
                step = (load.sum() - load * load.numel()).sign().to(bias.dtype) * self.rate
                bias.add_(step.masked_fill(skip.to(step.device), 0.0))

    def figures(self) -> torch.Tensor:
        """fp64 [2]: load of the fullest expert over the mean, of the worst layer (0 where nothing was routed); pairs dropped
        in all layers. The same on every rank. Collective."""
        counts = self.counts()
        load = counts[:, :-1].double()
        worst = (load.amax(1) / load.mean(1).clamp(min=1e-9)).amax()
        dropped = counts[:, -1].sum().double()
        if self.stages is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.stages)
            dist.all_reduce(dropped, group=self.stages)
        return torch.stack((worst, dropped))
