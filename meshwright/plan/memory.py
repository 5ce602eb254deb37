"""Bytes of weights, gradients and optimizer state on one rank, for every way to split them over data ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.layout import Layout

__all__ = ["BUCKETS_IN_FLIGHT", "WEIGHT_BYTES", "StateBytes", "state_bytes"]

WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
BUCKETS_IN_FLIGHT = 4
"""Buckets of ZeRO-2 that exist at once: one being filled, one just started, two under way before it."""


@dataclass(frozen=True)
class StateBytes:
    """staging: the most that ZeRO-2 holds in buckets at any time; the others are there from step to step."""

    weights: float
    gradients: float
    optimizer: float
    staging: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.staging


def state_bytes(
    parameters: int,
    precision: str,
    layout: Layout,
    *,
    moments: int = 2,
    ema: bool = False,
    bucket_bytes: int = 32 * 2**20,
    largest: int = 0,
) -> StateBytes:
    """With P parameters of w bytes (bf16 and fp16 2, fp32 4, fp64 8), g = max(w, 4), N = dp_shard, k tensors of optimizer
    state (moments, average where kept, masters where w < g):

                    weights   gradients                  optimizer
        zero 0      w P       g P                        k g P
        zero 1      w P       g P                        k g P / N
        zero 2      w P       g P / N + staging          k g P / N

    staging = 4 max(bucket, g * largest parameter), at most g P. One rank with one micro-step a step needs w P for gradients.
    moments: 2 for AdamW, 1 for SGD with momentum, 0 without. Gaps between parameters (below 128 bytes each) and between
    pieces (below 128 N bytes a bucket) are left out.
    """
    weight = WEIGHT_BYTES[precision]
    wide = max(weight, 4)
    kept = moments + ema + (weight < wide)
    shards = layout.dp_shard if layout.zero else 1
    staging = 0
    if layout.zero == 2:
        staging = min(BUCKETS_IN_FLIGHT * max(bucket_bytes, wide * largest), wide * parameters)
    return StateBytes(
        weights=weight * parameters,
        gradients=wide * parameters / (shards if layout.zero == 2 else 1),
        optimizer=kept * wide * parameters / shards,
        staging=staging,
    )
