"""Floating-point operations that a training step needs, and the share of the peak that it reaches (MFU).

Counted: what the model's mathematics asks for. A multiplication and an addition are two operations; the backward of a matmul
costs twice its forward. Not counted: recomputation, norms, activations, softmax, the optimizer, the embedding look-up.

    matmuls    6 x (weights that multiply) for each position that they multiply: the blocks for every token, the head only for
               the positions whose logits are computed
    attention  12 x layers x heads x head_dim for each (query, key) pair: QK^T and PV are 2 x head_dim each forward, tripled
               with the backward. A document of L tokens has L^2 pairs, L^2 / 2 when causal (half the square). In a window
               of w < L keys: L^2 - (L - w)(L - w + 1), and when causal w L - w^2 / 2
    MFU        operations of the step / (seconds x peak of a device x devices), seconds without evaluation

The peak is the data sheet's dense rate where the device is known (`meshwright.plan.hardware`), else the rate of a large
matmul measured on this machine; `Peak.source` says which, and every place that shows an MFU shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.plan.hardware import lookup
from meshwright.spec.counts import expert_parameters

__all__ = [
    "MatmulWeights",
    "Peak",
    "StepFlops",
    "attention_pairs",
    "flops_per_token",
    "matmul_weights",
    "measure_matmul",
    "mfu",
    "peak_rate",
    "training_flops",
]

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class MatmulWeights:
    """Weights (biases are none) that multiply: `blocks` every token, `head` every position whose logits are computed. Of
    experts, those that a token goes to, dropped or not."""

    blocks: int
    head: int


@dataclass(frozen=True)
class StepFlops:
    """Operations, forward and backward, of some tokens."""

    blocks: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.blocks + self.head + self.attention


@dataclass(frozen=True)
class Peak:
    """rate: FLOP/s of one device (of one rank on a CPU). source: where the number comes from, for people."""

    rate: float
    source: str


def matmul_weights(config: ModelConfig, task: str = "lm") -> MatmulWeights:
    """Weights that multiply in a decoder or encoder of this shape. `task`: lm, mlm or classify.

    Raises ValueError for a registered architecture, whose shape is not known here, and when the vocabulary (the number of
    classes) is still open.
    """
    if config.arch not in ("decoder", "encoder"):
        raise ValueError(f"the operations of architecture {config.arch!r} are not known")
    kv_heads = config.kv_heads or config.heads
    head_dim = config.head_dim or config.width // config.heads
    attention = config.width * head_dim * (config.heads + 2 * kv_heads) + config.heads * head_dim * config.width
    feed_forward = (3 if config.activation == "swiglu" else 2) * config.width * config.ffn
    if config.experts:  # those that a token goes to, and the router
        feed_forward = config.experts_per_token * expert_parameters(config) + config.experts * config.width
    if task == "classify":
        if config.classes is None:
            raise ValueError("model.classes is not resolved yet")
        head = config.width * config.classes + (config.width**2 if config.pooler else 0)
    else:
        if config.vocab is None:
            raise ValueError("model.vocab is not resolved yet")
        head = config.width * config.vocab + (config.width**2 if config.head_transform else 0)
    return MatmulWeights(config.layers * (attention + feed_forward), head)


def attention_pairs(lengths: Iterable[int], *, causal: bool, window: int | None = None) -> float:
    """(query, key) pairs of documents of these lengths; `window`: keys that a query sees, its own included (without
    `causal` as many on either side)."""
    total = 0.0
    for length in lengths:
        beyond = 0 if window is None else max(0, length - window)
        if causal:
            total += (length * length - beyond * beyond) / 2
        else:
            total += length * length - beyond * (beyond + 1)
    return total


def training_flops(config: ModelConfig, *, tokens: int, head_positions: int, pairs: float, task: str = "lm") -> StepFlops:
    """Operations of forward and backward over some rows.

    tokens: real tokens (no padding). head_positions: positions whose logits are computed (rows, for classification).
    pairs: from `attention_pairs` of the documents' lengths.
    """
    weights = matmul_weights(config, task)
    head_dim = config.head_dim or config.width // config.heads
    return StepFlops(
        blocks=6.0 * weights.blocks * tokens,
        head=6.0 * weights.head * head_positions,
        attention=12.0 * config.layers * config.heads * head_dim * pairs,
    )


def flops_per_token(config: ModelConfig, seq_len: int, task: str = "lm", head_positions: float | None = None) -> float:
    """Operations a token for full rows of one document each. head_positions: a row (default: all; 1 for classification)."""
    if head_positions is None:
        head_positions = 1 if task == "classify" else seq_len
    pairs = attention_pairs([seq_len], causal=config.arch == "decoder", window=config.sliding_window)
    weights = training_flops(config, tokens=seq_len, head_positions=1, pairs=pairs, task=task)
    return (weights.blocks + weights.attention + weights.head * head_positions) / seq_len


def mfu(flops: float, seconds: float, peak: float, devices: int = 1) -> float:
    """Share of the peak (0..1). flops: of all devices together; seconds: without evaluation; peak: FLOP/s of one device."""
    return flops / (seconds * peak * devices)


def measure_matmul(device: torch.device | str, precision: str, *, size: int | None = None, seconds: float = 0.3) -> Peak:
    """FLOP/s of a square matmul on this device: 2 n^3 / the fastest of as many as fit in `seconds` (three at least).

    On a CPU every rank of the machine should measure at the same time, since they share the cores in training too.
    """
    device = torch.device(device)
    size = size or (768 if device.type == "cpu" else 8192)
    a = torch.randn(size, size, device=device).to(_DTYPES[precision])  # zeros and ones run faster than data does
    out = torch.empty_like(a)
    fastest, spent, runs = float("inf"), 0.0, 0
    while spent < seconds or runs < 4:
        start = time.perf_counter()
        torch.matmul(a, a, out=out)
        devices.synchronize(device)
        took = time.perf_counter() - start
        runs += 1
        if runs > 1:  # the first one loads libraries and chooses kernels
            fastest = min(fastest, took)
            spent += took
    return Peak(2.0 * size**3 / fastest, f"measured, {precision} matmul {size} x {size} x {size} on this machine")


def peak_rate(device: torch.device | str, precision: str, device_name: str | None = None) -> Peak:
    """The peak that MFU is given against: the data sheet's, or, for an unknown device or precision, a measured one.

    precision: as in a config; fp32 stands for TF32 where torch is told to use that for fp32 matmuls, fp8 for bf16, in which the
    rest of such a run multiplies: shares of one peak can be compared, and there is no other peak of a mixture.
    """
    known = lookup(device_name) if device_name else None
    precision = "bf16" if precision == "fp8" else precision
    key = "tf32" if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else precision
    if known is None or key not in known.peak:
        return measure_matmul(device, precision)
    return Peak(known.peak[key], f"{known.name} data sheet, {key} dense")
