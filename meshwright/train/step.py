"""One training step: count the targets, run the micro-batches, update. The order here is what makes the loss layout-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from meshwright.data.loader import StepData
from meshwright.kernels.dropout import position_keys
from meshwright.train.context import Context

__all__ = ["Agreed", "StepResult", "agree", "train_step"]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know before the first forward of a step."""

    targets: int
    tokens: int
    rows: int
    stop: bool


@dataclass(frozen=True)
class StepResult:
    """Device scalars of one step; reading them waits for the device.

    loss: mean over the global targets (label smoothing included, z-loss not). skipped: True where nothing was updated.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor | bool
    loss_scale: float


def agree(run: Context, data: StepData) -> Agreed:
    """Sum the counts of all data ranks; any rank that was asked to stop stops all. One small reduction on the host."""
    stop = run.stop.local or run.out_of_time()
    targets, tokens, rows, stops = run.control.sum([data.targets, data.tokens, data.local_rows, int(stop)])
    return Agreed(int(targets), int(tokens), int(rows), stops > 0)


def train_step(run: Context, data: StepData, agreed: Agreed, lr: float) -> StepResult:
    """Forward and backward over every micro-batch, then one update.

    Each micro-batch adds sum(losses) / global targets, so gradients are summed, never averaged, over ranks and micro-steps.
    A step without a single target in the whole global batch updates nothing.
    """
    engine, clock = run.engine, run.clock
    if run.config.model.attention_dropout:  # hidden dropout needs no generator; attention kernels draw from torch's
        torch.manual_seed(_generator_seed(run.config.run.seed, run.state.step, run.data_rank))
    engine.zero()
    loss_sum = torch.zeros((), dtype=torch.float64 if run.config.precision == "fp64" else torch.float32, device=run.device)
    run.model.train()
    for i, micro in enumerate(data.micro):
        with clock.span("compute"):
            batch = micro.to(run.device)
            parts = run.objective.loss(run.model, batch, _dropout_key(run, batch))
            loss_sum += (parts.loss_sum - parts.z_sum).detach()
            with engine.backward_scope(last=i == len(data.micro) - 1):
                (parts.loss_sum * (engine.loss_scale / max(1, agreed.targets))).backward()
    with clock.span("compute"):
        engine.finish(clock.waiting)
        if agreed.targets == 0:
            return StepResult(loss_sum, torch.zeros_like(loss_sum), True, engine.loss_scale)
        info = engine.update(lr, run.config.train.clip)
        run.data_group.sum_(loss_sum)
    return StepResult(loss_sum / agreed.targets, info.grad_norm, info.skipped, info.loss_scale)


def _dropout_key(run: Context, batch) -> torch.Tensor | None:
    if not run.config.model.dropout and not run.config.model.head_dropout:
        return None
    positions = torch.arange(batch.tokens.shape[1], device=run.device)
    return position_keys(run.config.run.seed, batch.samples, positions)


def _generator_seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")
