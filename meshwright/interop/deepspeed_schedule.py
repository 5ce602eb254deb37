"""DeepSpeed's learning-rate schedules as pure functions of the number of the optimizer step.

A schedule is set after each optimizer step, so that step k (from 0) uses its value at index k - 1, and the first two steps both
its lowest one. The formulas are those of DeepSpeed's `runtime/lr_schedules.py` (2026); older releases of `OneCycle` left the
stairs out and multiplied in its decay, and older ones of `WarmupLR` took 0.001 where no highest rate was given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["OneCycle", "Schedule", "Warmup"]


BETA2 = 0.99
"""What `OneCycle` of DeepSpeed writes as the second beta of Adam."""


@dataclass(frozen=True)
class Warmup:
    """Rises from `low` to `high` over `warmup` indices, as ln(i + 1) / ln(warmup) or straight, then by `kind`: "constant";
    "decay": straight down to 0 at `total`; "cosine": down to `floor` * high, with low = `low` and high the optimizer's rate.
    """

    kind: str
    low: float
    high: float
    warmup: int
    log: bool = True
    total: int = 0
    floor: float = 0.0

    def lr(self, index: int) -> float:
        """At schedule index `index`; -1 is before the first step of the schedule."""
        if index < 0:
            return self.low
        if index < self.warmup:
            rise = math.log(index + 1) / math.log(self.warmup) if self.log else index / self.warmup
            return self.low + (self.high - self.low) * rise
        if self.kind == "decay":
            left = (self.total - index) / max(1.0, self.total - self.warmup)
            return self.low + (self.high - self.low) * max(0.0, left)
        if self.kind == "cosine":
            done = (index - self.warmup + 1) / max(1, self.total - self.warmup)
            wave = (1 + math.cos(math.pi * done)) / 2
            return self.high * max(0.0, self.floor + (1 - self.floor) * wave)
        return self.high

    def betas(self, index: int) -> None:
        """It leaves them alone."""
        return None


@dataclass(frozen=True)
class OneCycle:
    """Up over `first` indices in `first_stairs` stairs (0: smoothly), down over `second`, then low / (1 + rate * i / step);
    the first beta runs the other way between `low_momentum` and `high_momentum` where `cycle_momentum`."""

    low: float
    high: float
    first: int
    second: int
    first_stairs: int = 0
    second_stairs: int = 0
    decay_step: int = 0
    decay_rate: float = 0.0
    cycle_momentum: bool = True
    low_momentum: float = 0.8
    high_momentum: float = 0.9
    momentum_decay: float = 0.0

    def _height(self, index: int) -> float:
        """0 at the foot of the cycle, 1 at its top."""
        place = index + 1
        if place <= self.first:
            return _stairs(place, self.first, self.first_stairs)
        return 1.0 - _stairs(place - self.first, self.second, self.second_stairs)

    def lr(self, index: int) -> float:
        """At schedule index `index`; -1 is before the first step of the schedule."""
        if index < 0:
            return self.low
        after = index - self.first - self.second + 1
        if after <= 0:
            return self.low + (self.high - self.low) * self._height(index)
        return self.low / (1 + self.decay_rate * after / self.decay_step) if self.decay_step else self.low

    def betas(self, index: int) -> tuple[float, float] | None:
        """Both betas at an index: DeepSpeed sets the second one to 0.99 meanwhile. None where momentum does not cycle."""
        return (self._momentum(index), BETA2) if self.cycle_momentum else None

    def _momentum(self, index: int) -> float:
        if index < 0:
            return self.low_momentum
        after = index - self.first - self.second + 1
        if after <= 0:
            return self.high_momentum - (self.high_momentum - self.low_momentum) * self._height(index)
        return (
            self.high_momentum * (1 + self.momentum_decay * after / self.decay_step) if self.decay_step else self.high_momentum
        )


Schedule = Warmup | OneCycle


def _stairs(place: int, size: int, stairs: int) -> float:
    return math.floor(place * stairs / size) / stairs if stairs else place / size
