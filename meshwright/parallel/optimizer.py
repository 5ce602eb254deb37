"""The optimizer over flat buffers: one fused pass a group for clip, unscale, moments, decay, weights and working copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from meshwright.config.schema import OptimizerConfig
from meshwright.kernels.adamw import adamw_, sgd_
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.offload_optimizer import HostStage

__all__ = ["FlatOptimizer", "exchanged"]

_EXCHANGE = 1 << 22
"""Elements exchanged at a time: the copy in flight stays at 16 MiB in fp32."""


class FlatOptimizer:
    """AdamW (decoupled decay, arXiv:1711.05101) or SGD with momentum, and optionally an average of the weights.

    Decay applies to the groups that are decayed. ema: decay of the average, 0 for none; it starts from the weights and
    after each update becomes ema * average + (1 - ema) * weights (one more pass, r8 + w4 bytes a parameter in fp32).
    Moments and average have the dtype of the masters.
    """

    def __init__(self, config: OptimizerConfig, parameters: FlatParameters, ema: float = 0.0):
        self.config = config
        self.parameters = parameters
        self.ema = ema
        names = ("exp_avg", "exp_avg_sq") if config.kind == "adamw" else ("momentum",) if config.momentum else ()
        self.moments = [{name: part.buffer() for name in names} for part in parameters.ranges]
        self.averages = [part.buffer().copy_(part.master) for part in parameters.ranges] if ema else []
        device = parameters.groups[0].device
        largest = max(part.master.numel() for part in parameters.ranges)
        self._stage = HostStage(device, largest) if parameters.offload != "none" else None
        home = torch.device("cpu") if self._stage else device
        self._updates = torch.zeros((), dtype=torch.int64, device=home)

    @property
    def updates(self) -> int:
        """Updates that were not skipped. Waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates.fill_(value)

    def step(self, lr: float, scale: torch.Tensor, skip: torch.Tensor) -> None:
        """One update from gradient * scale. Where the 0-d bool `skip` is true nothing changes, not one bit."""
        skip, scale = skip.to(self._updates.device), scale.to(self._updates.device)  # offloaded: waits for the device
        step = self._updates + 1
        self.parameters.settle()
        for part, moments in zip(self.parameters.ranges, self.moments, strict=True):
            if self._stage is None:
                working = part.working if part.mixed else None
                self._update(part.decay, part.master, part.gradient, moments, working, lr, step, scale, skip)
            elif not bool(skip):
                for span, gradient, working in self._stage.windows(part):
                    mine = {name: moment[span] for name, moment in moments.items()}
                    self._update(part.decay, part.master[span], gradient, mine, working, lr, step, scale, skip)
            self.parameters.publish(part)
        for part, average in zip(self.parameters.ranges, self.averages, strict=False):
            average.lerp_(part.master, (~skip).to(average.dtype) * (1.0 - self.ema))  # a bool times a float is fp32
        self._updates += ~skip

    def _update(
        self,
        decayed: bool,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        working: torch.Tensor | None,
        lr: float,
        step: torch.Tensor,
        scale: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        config = self.config
        decay = config.weight_decay if decayed else 0.0
        if config.kind == "adamw":
            adamw_(
                master,
                gradient,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                lr=lr,
                beta1=config.betas[0],
                beta2=config.betas[1],
                eps=config.eps,
                weight_decay=decay,
                step=step,
                grad_scale=scale,
                working=working,
                skip=skip,
            )
        else:
            sgd_(
                master,
                gradient,
                moments.get("momentum"),
                lr=lr,
                momentum=config.momentum,
                weight_decay=decay,
                grad_scale=scale,
                working=working,
                skip=skip,
            )

    def restart_averages(self) -> None:
        """The average starts again from the present weights."""
        for part, average in zip(self.parameters.ranges, self.averages, strict=False):
            average.copy_(part.master)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model computes with the average inside, and with its weights, bit for bit, again afterwards."""
        with exchanged(self.parameters, self.averages):
            yield


@contextmanager
def exchanged(parameters: FlatParameters, others: Sequence[torch.Tensor]) -> Iterator[None]:
    """The model computes with other masters inside, one tensor a range (or none at all: nothing changes), and with its own,
    bit for bit, again afterwards."""
    _swap(parameters, others)
    try:
        yield
    finally:
        _swap(parameters, others, back=True)


def _swap(parameters: FlatParameters, others: Sequence[torch.Tensor], back: bool = False) -> None:
    parameters.settle()
    for part, other in zip(parameters.ranges, others, strict=False):
        if part.mixed:
            part.working.copy_(part.master if back else other)
        else:
            for a, b in zip(part.master.split(_EXCHANGE), other.split(_EXCHANGE), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        parameters.publish(part)
    parameters.settle()
