"""A linear layer whose three products are of 8-bit floating-point numbers, with scales taken from the numbers themselves.

Shapes: M rows (tokens), K features in, N features out. Every factor is e4m3 (3 bits of mantissa, up to 448), accumulated in
fp32; results have the dtype of x. Along what is summed over, a scale is constant:

    output            x8 [M, K] w8 [N, K]'     a scale a row of x, a scale a row of the weight
    input gradient    g8 [M, N] w8 [N, K]      a scale a row of g, one scale of the whole weight
    weight gradient   g8 [M, N]' x8 [M, K]     one scale of all of g, one of all of x (its rows are summed over)

A scale is the smallest power of two with which the largest magnitude stays within 448: a multiplication by it is exact, so that
a number is rounded to the same 8 bits whichever of the scales it goes by, unless it is so much smaller than the largest that it
falls below 2**-6 of the format (2**-15 of the largest, where the first bits of its mantissa are lost; zero below 2**-19). A row
with an infinity or NaN gets NaN for a scale, and so does all that depends on it.

The largest magnitudes are plain torch operators, which a compiler puts into the kernel that makes x. Cast and copy transposed
is one kernel on an accelerator (`kernels.fp8_triton`); `plain_cast` and `plain_multiply` are what runs on a CPU, and the
oracles. A cast has its rows filled up with zeros to a multiple of 16, as the products want them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from meshwright.kernels.accelerated import fp8_kernels

__all__ = ["ALIGNED", "E4M3", "cast", "fp8_linear", "multiply", "plain_cast", "plain_multiply", "row_largest", "scale_of"]

E4M3 = torch.float8_e4m3fn
ALIGNED = 16
"""Features in and out are multiples of this: what the products of a device ask for."""
LEAST = 9
"""Smallest biased exponent of a largest magnitude, 2**-118: a scale, and one over it, are then normal numbers."""

FAST_OUTPUT, FAST_INPUT, FAST_WEIGHT = True, True, False
"""Which of the three products may sum with fewer bits (`multiply`). The gradient of a weight is summed over all tokens."""


def row_largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, [M, K] -> [M], in the dtype of x; NaN where a row has one."""
    return torch.linalg.vector_norm(x.detach(), float("inf"), dim=-1)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """What 8-bit numbers are multiplied by to get those that they stand for, fp32: 2**e with largest <= 448 * 2**e."""
    bits = largest.float().view(torch.int32)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 goes to the next exponent
    exponent = ((bits + 0x1FFFFF) >> 23).clamp(min=LEAST)
    return torch.where(largest.isfinite(), ((exponent - 8) << 23).view(torch.float32), torch.nan)


def plain_cast(
    x: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor, straight: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    more = -x.shape[0] % ALIGNED
    x, rows = F.pad(x.float(), (0, 0, 0, more)), F.pad(rows, (0, more))
    one, all_ = scale_of(rows), scale_of(whole).expand(x.shape[1]).contiguous()
    nothing = x.new_empty(0)
    return (
        (x / one[:, None]).to(E4M3) if straight else nothing.to(E4M3),
        one if straight else nothing,
        (x / all_).t().contiguous().to(E4M3) if turned else nothing.to(E4M3),
        all_ if turned else nothing.clone(),
    )


def plain_multiply(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    return ((a.float() * a_scale[:, None]) @ (b.float() * b_scale[:, None]).t()).to(dtype)


@torch.library.custom_op("meshwright::fp8_cast", mutates_args=())
def cast(
    x: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor, straight: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] in 8 bits, M filled up to M' = a multiple of 16: as it lies [M', K] with the scale of each row, fp32 [M'], and
    transposed [K, M'] with the scale of the whole, fp32 [K], once for each of its rows. rows [M], whole []: the largest
    magnitudes. straight, turned: which of the two are made; what is not has no elements."""
    kernels = fp8_kernels(x.device)
    return (plain_cast if kernels is None else kernels.cast)(x, rows, whole, straight, turned)


@cast.register_fake
def _(
    x: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor, straight: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    features, padded = x.shape[1], x.shape[0] + -x.shape[0] % ALIGNED
    return (
        x.new_empty((padded, features) if straight else (0,), dtype=E4M3),
        x.new_empty((padded,) if straight else (0,), dtype=torch.float32),
        x.new_empty((features, padded) if turned else (0,), dtype=E4M3),
        x.new_empty((features,) if turned else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("meshwright::fp8_multiply", mutates_args=())
def multiply(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, both e4m3, with scales fp32 [M] and [N] -> [M, N]. fast: the device may keep fewer
    bits than fp32 has while it sums (14 of the mantissa on Hopper), which is faster."""
    if a.device.type == "cpu":
        return plain_multiply(a, a_scale, b, b_scale, dtype, fast)
    by_row = F.ScalingType.RowWise
    scales = (a_scale[:, None], by_row, b_scale[None, :], by_row)
    return F.scaled_mm(a, b.t(), *scales, output_dtype=dtype, use_fast_accum=fast)


@multiply.register_fake
def _(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, weight_rows = row_largest(x), row_largest(weight)
        weight_whole = weight_rows.amax()
        x8, x_scale, x8_turned, x_turned_scale = cast(x, rows, rows.amax(), True, True)
        weight8, weight_scale, _, _ = cast(weight, weight_rows, weight_whole, True, False)
        # the weight itself and not its 8 bits: those of all layers would be one byte a parameter, and ZeRO-3 frees it meanwhile
        ctx.save_for_backward(x8_turned, x_turned_scale, weight, weight_rows, weight_whole)
        return multiply(x8, x_scale, weight8, weight_scale, x.dtype, FAST_OUTPUT)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x8_turned, x_turned_scale, weight, weight_rows, weight_whole = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows = row_largest(gradient)
        g8, g_scale, g8_turned, g_turned_scale = cast(gradient, rows, rows.amax(), True, True)
        _, _, weight8, weight_scale = cast(weight, weight_rows, weight_whole, False, True)
        to_x = multiply(g8, g_scale, weight8, weight_scale, gradient.dtype, FAST_INPUT)
        to_weight = multiply(g8_turned, g_turned_scale, x8_turned, x_turned_scale, weight.dtype, FAST_WEIGHT)
        return to_x[: gradient.shape[0]], to_weight


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` in 8 bits: x [..., K], weight [N, K], bias [N] -> [..., N], in the dtype of x. K and N are multiples of 16.

    Keeps for backward the input in 8 bits, and the weight. The bias is added, and its gradient summed, as elsewhere.
    """
    out = _Linear.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias
