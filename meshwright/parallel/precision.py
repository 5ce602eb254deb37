"""Dtypes of a run and the dynamic loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.config.schema import LossScaleConfig

__all__ = ["LossScaler", "working_dtype"]

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

CEILING = 2.0**96
"""The scale never grows past this: a loss times the scale must stay finite in fp32."""


def working_dtype(precision: str) -> torch.dtype:
    """Dtype of the weights and activations for `plan.precision`; of fp8, where only products are in 8 bits, bf16."""
    return _DTYPES[precision]


@dataclass
class LossScaler:
    """Dynamic loss scale: backed off on overflow, grown after a run of good steps. Pure arithmetic on agreed flags, so
    that ranks which feed it the same flags hold the same scale.

    The first `hysteresis` - 1 overflows leave the scale, every later one multiplies it by `backoff`, not below `floor`.
    `interval` good steps in a row multiply it by `growth` and start the count of overflows anew.
    static: the scale never changes.
    """

    config: LossScaleConfig
    scale: float = 0.0
    good: int = 0
    tries: int = 0

    def __post_init__(self) -> None:
        self.scale = self.scale or self.config.initial
        self.tries = self.tries or self.config.hysteresis

    def update(self, overflow: bool) -> bool:
        """Takes the outcome of a step. Returns whether the scaler is at its end: an overflow that no smaller scale can
        answer, because the scale is static or already at the floor."""
        if not overflow:
            self.good += 1
            if self.good >= self.config.interval and not self.config.static:
                self.scale = min(self.scale * self.config.growth, max(CEILING, self.scale))
                self.good, self.tries = 0, self.config.hysteresis
            return False
        self.good = 0
        if self.config.static:
            return True
        if self.tries > 1:
            self.tries -= 1
            return False
        if self.scale <= self.config.floor:
            return True
        self.scale = max(self.scale * self.config.backoff, self.config.floor)
        return False

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "tries": self.tries}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.good, self.tries = float(state["scale"]), int(state["good"]), int(state["tries"])
