"""One training step: count the targets, run the micro-batches, update. The order here is what makes the loss layout-free."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.batch import Batch
from meshwright.data.loader import StepData
from meshwright.distributed.reduce import sum_scalars
from meshwright.kernels.dropout import position_keys
from meshwright.models.heads import LossParts
from meshwright.train.context import Context
from meshwright.train.figures import pairs_of
from meshwright.train.result import Agreed, StepResult

__all__ = ["agree", "attention_seed", "train_step"]

NOISE_EVERY = 10
"""Steps between two measurements of the gradient noise: each costs one more pass over this rank's gradient."""


def agree(run: Context, data: StepData) -> Agreed:
    """Sum the counts of all data ranks; any rank that was asked to stop stops all. One small reduction on the host.

    Ranks that hold parts of one model, or other positions, have the same rows: only the first of them counts those.
    """
    model = run.config.model
    causal, window = model.arch == "decoder", model.sliding_window
    pairs = sum(pairs_of(batch, causal=causal, window=window) for batch in data.micro)
    stop = run.stop.local or run.out_of_time()
    counts = [data.targets, data.tokens, data.local_rows, pairs]
    if not all(group.rank() == 0 for group in run.engine.axes.same_rows):
        counts = [0, 0, 0, 0.0]
    # where replicas train apart each has a column for its own targets
    mine = run.engine.axes.replicas if run.engine.apart else None
    columns = [0.0] * (0 if mine is None else mine.size())
    if mine is not None:
        columns[mine.rank()] = counts[0]
    targets, tokens, rows, pairs, stops, *own = sum_scalars([*counts, int(stop), *columns], run.ranks.control)
    share = targets if mine is None else own[mine.rank()]
    return Agreed(int(targets), int(tokens), int(rows), pairs, stops > 0, int(share))


def train_step(run: Context, data: StepData, agreed: Agreed, lr: float) -> StepResult:
    """Forward and backward over every micro-batch, then one update.

    Each micro-batch adds sum(losses) / global targets, so gradients are summed, never averaged, over ranks and micro-steps.
    A step without a single target in the whole global batch updates nothing. Where replicas train apart, all this is said of
    the rows of a replica; the loss that is reported counts all rows.
    """
    engine, clock, config = run.engine, run.clock, run.config
    if config.model.attention_dropout:  # hidden dropout needs no generator; attention kernels draw from torch's
        torch.manual_seed(attention_seed(run))
    # replicas that train apart have no gradient in common whose noise could be told; ranks of other positions none of own rows
    alone = not engine.apart and engine.axes.context is None
    engine.measure_noise = config.train.noise_scale and alone and run.state.step % NOISE_EVERY == 0
    engine.zero()
    # [loss sum, square norm of this part's mean gradient]; fp64, so that sums over ranks do not round
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)

    def forward(model: nn.Module, i: int) -> LossParts:
        batch = data.micro[i].to(run.device)
        return run.objective.loss(model, batch, _dropout_key(run, batch))

    def taken(i: int, parts: LossParts) -> None:
        sums[0] += (parts.loss_sum - parts.z_sum).detach()

    with clock.span("compute"):
        engine.run(len(data.micro), forward, engine.loss_scale / max(1, agreed.own), taken, clock.waiting)
        engine.finish(clock.waiting)
        square = _part_square(run, data, agreed)
        if square is None:  # `sums[1] = nan` would copy from the host, and wait for the device
            sums[1].fill_(math.nan)
        else:
            sums[1].copy_(square)
        with clock.waiting():
            if (pipeline := engine.axes.model.get("pp")) is not None:
                dist.all_reduce(sums[:1], group=pipeline)  # the last stage has the loss, and all have the square norm
            if engine.axes.data is not None:
                dist.all_reduce(sums, group=engine.axes.data)
        loss, noise = sums[0] / max(1, agreed.targets), sums[1] / run.plan.layout.dp
        if agreed.targets == 0:
            zero = torch.zeros_like(loss)
            return StepResult(zero, zero, noise, True, engine.loss_scale, False, _nothing)
        routing = None if engine.balance is None else engine.balance.figures()
        info = engine.update(lr, config.train.clip, empty=agreed.own == 0)
    return StepResult(
        loss=loss,
        grad_norm=info.grad_norm.double(),
        noise=noise,
        skipped=info.skipped,
        loss_scale=info.loss_scale,
        retries=engine.scaler is not None and not info.exhausted,
        culprit=engine.nonfinite_parameter if not run.recorder.deferred else _nothing,
        routing=routing,
    )


def _part_square(run: Context, data: StepData, agreed: Agreed) -> torch.Tensor | None:
    """Square norm of the mean gradient of this rank's rows (or of its first micro-step's); None if not measured."""
    squares = run.engine.micro_square_norms
    targets = data.micro[0].targets() if run.engine.gradients.noise_of_one_micro_step else data.targets
    if not squares or not targets:
        return None
    return squares[0].double() * (agreed.targets / targets) ** 2


def _dropout_key(run: Context, batch: Batch) -> torch.Tensor | None:
    model = run.config.model
    if not model.dropout and not model.head_dropout and not model.attention_dropout:
        return None
    return position_keys(run.config.run.seed, batch.samples, torch.arange(batch.tokens.shape[1], device=run.device))


def attention_seed(run: Context) -> int:
    """Seed of torch's generator for this step, another one wherever samples, heads or layers are others."""
    others = (dist.get_rank(group) for group in run.engine.axes.same_rows)
    parts = (run.config.run.seed, run.state.step, run.data_rank, *others)
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def _nothing() -> None:
    return None
