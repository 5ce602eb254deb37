"""What a step says: the numbers that ranks agree on before it, and the device scalars that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Agreed", "StepResult"]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know before the first forward of a step, summed over the data ranks.

    targets: positions that count in the loss. tokens: positions that are no padding. rows: samples.
    pairs: (query, key) pairs of attention. stop: some rank was asked to stop. own: targets by which this rank's loss is
    divided, those of its replica where replicas train apart.
    """

    targets: int
    tokens: int
    rows: int
    pairs: float
    stop: bool
    own: int


@dataclass(frozen=True)
class StepResult:
    """fp64 scalars [] of one step, on the device: reading them waits.

    loss: mean over the global targets, label smoothing included, z-loss not. grad_norm: before clipping.
    noise: mean square norm of the mean gradient of a part of the batch, NaN where it was not measured.
    skipped: whether nothing was updated. retries: fp16 overflowed and will try again with a smaller scale.
    culprit: names the first parameter whose gradient is not finite; every rank calls it, or none.
    routing: of a model of experts fp64 [2]: load of the fullest expert over the mean, of the worst layer; (token, expert) pairs
    that an expert had no place for, in all layers.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    noise: torch.Tensor
    skipped: torch.Tensor | bool
    loss_scale: float
    retries: bool
    culprit: Callable[[], str | None]
    routing: torch.Tensor | None = None
