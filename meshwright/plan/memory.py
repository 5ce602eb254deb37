"""Bytes of weights, gradients and optimizer state on one rank, for every way to split them over data ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.layout import Layout

__all__ = ["BUCKETS_IN_FLIGHT", "WEIGHT_BYTES", "StateBytes", "state_bytes"]

WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Of fp8, which is how some of the products multiply, weights and activations are bf16."""
BUCKETS_IN_FLIGHT = 4
"""Buckets of ZeRO-2 that exist at once: one being filled, one just started, two under way before it."""


@dataclass(frozen=True)
class StateBytes:
    """weights, gradients, optimizer: there on the device from step to step. gathered: the most whole weights that ZeRO-3 holds
    beside them at any time. staging: the most that ZeRO-2 and ZeRO-3 hold of gradients that are filled or on their way. host:
    what is kept in host memory, before torch rounds each pinned buffer up to a power of two (at most twice as much).
    """

    weights: float
    gradients: float
    optimizer: float
    staging: float = 0.0
    gathered: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Of the device, at the worst moment."""
        return self.weights + self.gradients + self.optimizer + self.staging + self.gathered


def state_bytes(
    parameters: int,
    precision: str,
    layout: Layout,
    *,
    moments: int = 2,
    ema: bool = False,
    bucket_bytes: int = 32 * 2**20,
    largest: int = 0,
    outside: int = 0,
    block: int = 0,
    experts: int = 0,
    expert_block: int = 0,
    gather: str = "twice",
    offload: str = "none",
) -> StateBytes:
    """With P parameters of w bytes (bf16, fp16, fp8 2, fp32 4, fp64 8), g = max(w, 4), N = dp_shard cp, k tensors of optimizer
    state (moments, average where kept, masters where w < g), E parameters outside of the blocks and B in the largest block:

                    weights   gradients                  optimizer     gathered
        zero 0      w P       g P                        k g P         -
        zero 1      w P       g P                        k g P / N     -
        zero 2      w P       g P / N + staging          k g P / N     -
        zero 3      w P / N   g P / N + staging          k g P / N     w (E + 2 B), or w P where they are gathered once

    staging: of ZeRO-2 4 max(bucket, g * largest parameter), of ZeRO-3 g (E + 2 B); both at most g P. One rank with one
    micro-step a step needs w P for gradients. moments: 2 for AdamW, 1 for SGD with momentum, 0 without. offload "optimizer"
    keeps the optimizer's k, masters always among them, in host memory, "parameters" the weights of ZeRO-3 too; 4 windows of
    at most 2^22 elements beside them. Gaps between parameters (below 128 bytes each) and between pieces (below 128 N bytes a
    bucket) are left out.

    experts: how many of the P are of experts, of which a rank has 1 / ep (`expert_block`: of B). They are sharded over N / ep
    ranks, where that is more than one: read P / N as (P - experts) / N + experts ep / N.
    """
    weight = WEIGHT_BYTES[precision]
    wide = max(weight, 4)
    kept = moments + ema + (weight < wide or offload == "optimizer")
    shards = layout.shards if layout.zero else 1
    ours = max(1, shards // layout.ep)  # ranks among which the states of an expert are cut
    piece = (parameters - experts) / shards + experts / ours
    unit = min(parameters, outside + 2 * block)
    gathered = parameters if gather == "once" else unit
    if ours == 1:  # whole weights of experts are the rank's own piece
        gathered -= experts if gather == "once" else min(experts, 2 * expert_block)
    staging = {
        2: min(BUCKETS_IN_FLIGHT * max(bucket_bytes, wide * largest), wide * parameters),
        3: wide * unit,
    }
    weights = weight * (piece if layout.zero == 3 else parameters)
    optimizer = kept * wide * piece
    away = {"none": 0.0, "optimizer": optimizer, "parameters": optimizer + weights}[offload]
    return StateBytes(
        weights=0.0 if offload == "parameters" else weights,
        gradients=wide * (piece if layout.zero >= 2 else parameters),
        optimizer=optimizer if offload == "none" else 0.0,
        staging=staging.get(layout.zero, 0),
        gathered=weight * gathered if layout.zero == 3 else 0.0,
        host=away,
    )
