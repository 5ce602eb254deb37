"""Rotary positions and their scalings.

The rotate-half convention of Hugging Face's `transformers` (dimension e turns with e + E/2), so that their weights load
without a permutation. Frequencies, scalings and angles are computed in fp64 and rounded once.

Shapes: B rows, S positions, K key/value heads, G query heads of a group, E features of a head, H = E/2 frequencies.
"""

from __future__ import annotations

import math

import torch

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.errors import ConfigError, Finding

__all__ = ["RopeTable", "frequencies", "rotate"]


def _yarn(inverse_H: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN, arXiv:2309.00071, section 3.2: slow dimensions are interpolated, fast ones kept, a linear ramp between."""
    half = inverse_H.numel()
    length = scaling.original_max_position_embeddings
    assert length is not None  # refused before any model is built: spec.model_rules

    def dimension(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times over the original length."""
        return half * math.log(length / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast or 32.0), dimension(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * half - 1.0)
    if low == high:
        high += 0.001  # a step, and no division by zero
    slow_H = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inverse_H / scaling.factor * slow_H + inverse_H * (1 - slow_H)


def _llama3(inverse_H: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond length / low_freq_factor are stretched, those under length / high_freq_factor kept."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    assert length is not None and low is not None and high is not None  # refused before: spec.model_rules
    turns_H = length * inverse_H / (2 * math.pi)
    smooth_H = ((turns_H - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_H) * inverse_H / scaling.factor + smooth_H * inverse_H


def _yarn_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: the temperature of arXiv:2309.00071, section 3.4, as attention sees it."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def frequencies(config: ModelConfig, length: int = 0) -> tuple[torch.Tensor, float]:
    """Angle a position turns in each dimension, fp64 [H], and the factor of cosine and sine.

    length: of the sequence; only the dynamic scaling (NTK-aware, stretched beyond the original length) looks at it.
    """
    scaling, theta = config.rope_scaling, config.rope_theta
    width = config.head_dim or config.width // config.heads
    exponent_H = torch.arange(0, width, 2, dtype=torch.float64) / width
    if scaling is not None and scaling.rope_type == "dynamic":
        original = scaling.original_max_position_embeddings or config.max_len
        stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        theta = theta * stretch ** (width / (width - 2))
    inverse_H = theta**-exponent_H
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return inverse_H, 1.0
    if scaling.rope_type == "linear":
        return inverse_H / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(inverse_H, scaling), 1.0
    return _yarn(inverse_H, theta, scaling), _yarn_factor(scaling)


class RopeTable:
    """Cosines and sines of a model, made once for each (device, dtype, length) and kept.

    No buffer, so that a model built on meta has nothing to fill, cast or save.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._tables: dict[tuple[torch.device, torch.dtype, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def _original(self) -> int:
        """Longest sequence that dynamic scaling leaves alone; 0 where there is none."""
        scaling = self.config.rope_scaling
        if scaling is None or scaling.rope_type != "dynamic":
            return 0
        return scaling.original_max_position_embeddings or self.config.max_len

    def __call__(
        self, length: int, positions_BS: torch.Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin in `dtype` (at least fp32), [S, 1, 1, H], or [B, S, 1, 1, H] with positions, to go with [B, S, K, G, E].

        Positions must lie under max(max_len, length). With them, a dynamic scaling beyond its original length is
        refused: a document's angles would depend on the row that it happens to share.
        """
        stretched = length if self._original and length > self._original else 0
        if stretched and positions_BS is not None:
            raise ConfigError(
                findings=[
                    Finding(
                        "data.seq_len",
                        f"{length} is beyond the {self._original} positions of the dynamic rope scaling, whose angles depend "
                        "on the sequence length, and the rows hold several documents",
                        f"Use seq_len <= {self._original}, data.packing: none, or another scaling",
                    )
                ]
            )
        rows = max(length, self.config.max_len if positions_BS is not None else 0)
        cos_TH, sin_TH = self._table(1 << max(rows - 1, 0).bit_length(), stretched, device, dtype)
        if positions_BS is None:
            return cos_TH[:length, None, None], sin_TH[:length, None, None]
        return cos_TH[positions_BS][:, :, None, None], sin_TH[positions_BS][:, :, None, None]

    def _table(self, rows: int, stretched: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        key = (device, dtype, rows, stretched)
        if key not in self._tables:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # kept for training too
                inverse_H, factor = frequencies(self.config, stretched)
                angle_TH = torch.arange(rows, dtype=torch.float64)[:, None] * inverse_H
                cos_TH, sin_TH = ((f(angle_TH) * factor).to(dtype).to(device) for f in (torch.cos, torch.sin))
            self._tables[key] = (cos_TH, sin_TH)
        return self._tables[key]


def rotate(x_BSKGE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head's feature pairs (e, e + H) by the angle of their position. Computed in the tables' dtype."""
    first, second = x_BSKGE.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSKGE.dtype)
