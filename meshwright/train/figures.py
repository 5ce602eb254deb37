"""Rates and shares of a step: tokens/s, samples/s, MFU, memory, time split, gradient noise scale. docs/metrics.md has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from meshwright.config.schema import ModelConfig
from meshwright.data.batch import Batch
from meshwright.observe.clock import Split
from meshwright.observe.flops import Peak, attention_pairs, mfu, training_flops
from meshwright.observe.noise import NoiseScale
from meshwright.observe.resources import memory_now
from meshwright.train.result import Agreed

__all__ = ["Figures", "pairs_of"]


class Figures:
    """peak: rate of one device behind MFU. world: devices of the run. parts: into how many equal shares of rows the gradient
    noise is measured (data ranks, or micro-steps of a single rank); below two it cannot be."""

    def __init__(
        self, model: ModelConfig, task: str, *, peak: Peak, world: int, parts: int, device: torch.device, noise: NoiseScale
    ):
        self.peak = peak
        self.noise = noise
        self._model, self._task, self._world, self._parts, self._device = model, task, world, parts, device
        self._known = model.arch in ("decoder", "encoder")

    def of(self, agreed: Agreed, split: Split, *, norm: float, small: float) -> dict[str, Any]:
        """small: mean square norm of the mean gradient of one part (NaN: not measured in this step)."""
        seconds = max(split.training, 1e-9)
        record: dict[str, Any] = {
            "tokens_per_s": agreed.tokens / seconds,
            "samples_per_s": agreed.rows / seconds,
            "split": split.as_dict(),
            "memory": memory_now(self._device),
        }
        if self._known:
            flops = training_flops(
                self._model, tokens=agreed.tokens, head_positions=agreed.targets, pairs=agreed.pairs, task=self._task
            )
            record["mfu"] = mfu(flops.total, seconds, self.peak.rate, self._world)
        if math.isfinite(small) and self._parts > 1 and agreed.rows >= self._parts:
            self.noise.update(small, norm**2, agreed.rows / self._parts, agreed.rows)
        if self.noise.value is not None:
            record["noise_scale"] = self.noise.value
        return record


def pairs_of(batch: Batch, *, causal: bool, window: int | None) -> float:
    """(query, key) pairs that the attention of this micro-batch needs, padding left out. Host tensors only."""
    rows, size = batch.tokens.shape
    real = int((batch.samples >= 0).sum())
    if batch.cu_seqlens is None or batch.documents is None:
        return real * attention_pairs([size], causal=causal, window=window)
    starts = batch.cu_seqlens.numpy()
    starts = starts[: int(np.searchsorted(starts, rows * size))]
    lengths = np.diff(np.append(starts, rows * size))
    kept = batch.documents.numpy().reshape(-1)[starts] >= 0
    return attention_pairs(lengths[kept].tolist(), causal=causal, window=window)
