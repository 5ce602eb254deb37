"""Matrices in 8 bits (e4m3: 4 bits of exponent, 3 of mantissa, up to 448), with a scale for each of their rows: half the
bytes of bf16, rounded to 2**-4 of a number at most.

One row of activations is multiplied as it is (`kernels.one_row`). More are rounded too, each row with a scale of its own, where
a device multiplies 8 bits by 8 bits; elsewhere, and on a CPU, the matrix is widened. What rounds them is the kernel before the
matrix where it has whole rows (`kernels.fused`, which then gives `Rounded`), and else one of its own: the same bits.

Shapes: T rows, K columns, N rows of the matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.kernels.accelerated import rowwise_kernels

__all__ = [
    "E4M3",
    "LARGEST",
    "Rounded",
    "ScaledLinear",
    "multiplied",
    "plain_quantize_rows",
    "quantize_rows",
    "rounded",
    "row_scales",
    "takes_rounded",
    "to_e4m3",
]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
ALIGNED = 16
"""Rows and columns of a matrix that a device multiplies in 8 bits are multiples of it."""
LEAST = 2.0**-100
"""For a row of zeros, which has any scale."""
ROUNDS_BEFORE = True
"""Whether the kernel before a matrix may round its rows; a benchmark times both."""


class Rounded(NamedTuple):
    """Rows of activations in 8 bits.

    values, scale  of `quantize_rows`: e4m3 [..., K] and fp32 [..., 1]
    dtype          what they had before, and what a product with them has
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 8 bits; beyond the largest one that one, on every device. NaN stays."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [..., K] and fp32 [..., 1], whose product is x [..., K] up to rounding: the largest number of a row becomes 448."""
    kernels = rowwise_kernels(x.device)
    return (plain_quantize_rows if kernels is None else kernels.quantize_rows)(x)


def rounded(x: torch.Tensor) -> Rounded:
    """[..., K]"""
    return Rounded(*quantize_rows(x), x.dtype)


def plain_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST).float()
    return to_e4m3(wide / scale), scale


class ScaledLinear(nn.Module):
    """y = x (scale * weight)^T + bias, as of an `nn.Linear` whose weight is rounded. weight: e4m3 [N, K]. scale: fp32 [N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        values, scale = quantize_rows(weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scale[:, 0], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """[..., K] -> [..., N]; rows that are rounded already: where `takes_rounded`."""
        if isinstance(x, Rounded) or self._multiplies(x):
            values, scale, dtype = x if isinstance(x, Rounded) else rounded(x)
            y = multiplied(values.view(-1, self.in_features), scale.view(-1, 1), self.weight, self.scale, dtype)
            y = y.view(*values.shape[:-1], -1)
            return y if self.bias is None else y + self.bias
        wide = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (wide if self.bias is None else wide + self.bias).to(x.dtype)

    def _multiplies(self, x: torch.Tensor) -> bool:
        kernels = rowwise_kernels(x.device)
        aligned = self.out_features % ALIGNED == 0 and self.in_features % ALIGNED == 0
        return kernels is not None and kernels.multiplies() and aligned and x.dtype == torch.bfloat16


def multiplied(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(a_scale * a) (b_scale * b)^T in `dtype`, [T, N]. a e4m3 [T, K], b e4m3 [N, K]; scales fp32 [T, 1] and [N]."""
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(a, b.t(), a_scale, by_row, b_scale[None], by_row, output_dtype=dtype, use_fast_accum=True)


def takes_rounded(module: nn.Module | None, x: torch.Tensor) -> bool:
    """Whether the matrix would round rows of the dtype and on the device of x, so that what comes before it can."""
    return ROUNDS_BEFORE and isinstance(module, ScaledLinear) and module._multiplies(x)


def row_scales(module: nn.Module) -> torch.Tensor | None:
    """Of a matrix in 8 bits; None: of any other."""
    return module.scale if isinstance(module, ScaledLinear) else None
