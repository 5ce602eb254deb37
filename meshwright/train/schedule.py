"""Learning rate, batch size and length of a run, each a pure function of counters. No torch, no state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.config.schema import ScheduleConfig, TrainConfig
from meshwright.errors import ConfigError, Finding, counted

__all__ = ["Budget", "batch_at", "learning_rate", "learning_rate_factor", "peak_learning_rate", "total_steps"]


def learning_rate_factor(schedule: ScheduleConfig, update: int, total: int) -> float:
    """Learning rate over its peak for the update with index `update` (from 0) in a schedule of `total` updates.

    Warm-up over w updates: (update + 1) / w, so that the first update already learns and update w - 1 is the peak.
    After it, with t = (update - w) / (total - w) in [0, 1] and m = min_ratio:
    cosine m + (1 - m)(1 + cos(pi t)) / 2; linear 1 - (1 - m) t; constant 1;
    wsd 1, then linear to m over the last `decay` share of all updates; inverse_sqrt sqrt(w / (update + 1)), at least m.
    Past `total` the final value holds.
    """
    warmup, floor = schedule.warmup, schedule.min_ratio
    if update < warmup:
        return (update + 1) / warmup
    t = min(1.0, (update - warmup) / max(1, total - warmup))
    match schedule.kind:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - floor) * t
        case "cosine":
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * t))
        case "wsd":
            start = total - schedule.decay * total
            return 1.0 if update <= start else 1.0 - (1.0 - floor) * min(1.0, (update - start) / max(1.0, total - start))
        case "inverse_sqrt":
            return max(floor, math.sqrt(max(1, warmup) / (update + 1)))
    raise ValueError(schedule.kind)


def peak_learning_rate(train: TrainConfig) -> float:
    """`train.lr` moved from the batch it was tuned for to the batch of this run: none, linear (b / b0) or sqrt (b / b0)^0.5."""
    if train.lr_scaling == "none" or train.lr_batch is None:
        return train.lr
    ratio = train.batch / train.lr_batch
    return train.lr * (ratio if train.lr_scaling == "linear" else math.sqrt(ratio))


def learning_rate(train: TrainConfig, update: int, total: int) -> float:
    return peak_learning_rate(train) * learning_rate_factor(train.schedule, update, train.schedule.total or total)


def batch_at(train: TrainConfig, consumed: int) -> int:
    """Global batch in rows after `consumed` samples. A ramp goes up by `increment` in equal stretches of samples:
    start + increment * floor(consumed / (samples / n)), n = ceil((batch - start) / increment), never above the batch."""
    ramp = train.ramp
    if ramp is None or consumed >= ramp.samples or ramp.start >= train.batch:
        return train.batch
    increments = -(-(train.batch - ramp.start) // ramp.increment)
    return min(train.batch, ramp.start + ramp.increment * (consumed * increments // ramp.samples))


@dataclass(frozen=True)
class Budget:
    """Where a run stops, in the counters of its state. `steps` is always known unless only hours were given."""

    steps: int | None
    hours: float | None = None

    def spent(self, step: int) -> str | None:
        """Why the run is over, or None. Hours are decided by one rank's clock (see `train.step.agree`)."""
        return f"{counted(step, 'step')} done" if self.steps is not None and step >= self.steps else None


def total_steps(train: TrainConfig, rows_per_epoch: int, seq_len: int) -> Budget:
    """The smallest of the given limits, in steps. With none given, one epoch.

    tokens counts row positions (rows * seq_len), padding included, so that the end is known before the data is read.
    """
    limits = []
    if train.steps is not None:
        limits.append(train.steps)
    if train.tokens is not None:
        limits.append(_steps_for(train, rows_per_epoch, rows=-(-train.tokens // seq_len)))
    if train.epochs is not None or (train.steps is None and train.tokens is None and train.hours is None):
        limits.append(_steps_for(train, rows_per_epoch, rows=math.ceil((train.epochs or 1) * rows_per_epoch)))
    steps = min(limits) if limits else None
    needs_total = train.schedule.kind in ("cosine", "linear", "wsd") and train.schedule.total is None
    if steps is None and needs_total:
        raise ConfigError(
            findings=[
                Finding(
                    "train.schedule.total",
                    f"is needed: {train.schedule.kind} must know its length and train.hours does not give it",
                    "Set train.schedule.total, or use constant or inverse_sqrt",
                )
            ]
        )
    return Budget(steps, train.hours)


def _steps_for(train: TrainConfig, rows_per_epoch: int, rows: int) -> int:
    """Steps until at least `rows` samples are consumed, epoch borders included (see `Loader.steps`)."""
    size: Callable[[int], int] = lambda consumed: batch_at(train, consumed)
    consumed = steps = 0
    ramp_end = train.ramp.samples if train.ramp else 0
    while consumed < rows:
        left = rows_per_epoch - consumed % rows_per_epoch
        take = size(consumed)
        if consumed >= ramp_end and left == rows_per_epoch and rows - consumed >= rows_per_epoch:
            per_epoch = max(1, rows_per_epoch // take if train.tail == "drop" else -(-rows_per_epoch // take))
            whole = (rows - consumed) // rows_per_epoch  # every epoch from here on has the same number of steps
            steps += whole * per_epoch
            consumed += whole * rows_per_epoch
            continue
        if left < take and train.tail == "drop":
            consumed += left  # the ragged end is passed over without a step
            continue
        if consumed >= ramp_end:
            stretch = max(1, min(left, rows - consumed) // take)
            steps += stretch
            consumed += min(left, stretch * take)
            continue
        steps += 1
        consumed += min(take, left)
    return max(1, steps)
