"""`kernels.pointwise`, and `kernels.dropout` outside of compiled code, in Triton. Import through `kernels.accelerated`.

Each element is read once and written once; what is between is computed in fp32 and rounded once (dropout of fp64 in fp64).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshwright.kernels.dropout import FEATURE, FIRST, SECOND

__all__ = ["dropped", "gelu", "gelu_gradient", "swiglu", "swiglu_gradient"]

_BLOCK, _WARPS = 1024, 4
"""Outputs of a program: 16 bytes of bf16 a thread, the widest load there is."""


@triton.jit
def _upper_tail(a):
    """Q(a) = 1 - Phi(a) of a standard normal, for 0 <= a <= 8: 2 to the power of a polynomial, one exponential and no division.

    The polynomial is the minimax fit of log2 Q on [0, 8] (Chebyshev basis, Lawson's reweighted least squares), errors weighted
    so that 3e-8 in Q and 1e-4 of Q count alike. In fp32: within 5e-8 of Q, and within 7e-5 of it relatively, where
    0.5 (1 + erf) has no digit left (a > 5.4).
    """
    p = -1.11193093e-08 * a + 4.10093605e-07
    p = p * a - 6.29434655e-06
    p = p * a + 5.05773952e-05
    p = p * a - 1.96979904e-04
    p = p * a - 1.55466439e-04
    p = p * a + 7.11586509e-03
    p = p * a - 5.25414775e-02
    p = p * a - 4.59192118e-01
    p = p * a - 1.15110722e00
    p = p * a - 9.99999952e-01
    return tl.exp2(p)


@triton.jit
def _size(x):
    """|x|, at most 8, where Q is below what fp32 adds to 1; NaN stays NaN."""
    return tl.minimum(tl.abs(x), 8.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gelu(x_ptr, out_ptr, count, block: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block
    lane = tl.arange(0, block)
    inside = lane < count - start
    x = tl.load(x_ptr + start + lane, mask=inside, other=0.0)
    y = x.to(tl.float32)
    a = _size(y)
    tl.store(out_ptr + start + lane, (tl.maximum(y, 0.0) - a * _upper_tail(a)).to(x.dtype), mask=inside)


@triton.jit
def _gelu_gradient(gradient_ptr, x_ptr, out_ptr, count, block: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block
    lane = tl.arange(0, block)
    inside = lane < count - start
    x = tl.load(x_ptr + start + lane, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
    y = x.to(tl.float32)
    a = _size(y)
    z = a * 0.8493218002880191  # sqrt(log2(e) / 2): 2**(-z**2) = exp(-a**2 / 2)
    slope = _upper_tail(a) - a * (0.3989422804014327 * tl.exp2(-z * z))  # at -a; density 1 / sqrt(2 pi) at 0
    slope = tl.where(y < 0.0, slope, 1.0 - slope)
    tl.store(out_ptr + start + lane, (gradient * slope).to(x.dtype), mask=inside)


@triton.jit
def _place(rows: tl.constexpr, block: tl.constexpr):
    """Of the outputs of a program: the first, where its gates begin, and where each gate is from there; the value that belongs
    to it is `rows` further. 64-bit numbers are only in what the program shares, for the rest are offsets in a block."""
    start = tl.program_id(0).to(tl.int64) * block
    lane = tl.arange(0, block)
    if rows < block:
        return start, start * 2, lane // rows * (2 * rows) + lane % rows
    else:
        return start, tl.multiple_of(start // rows * (2 * rows) + start % rows, block), lane


@triton.jit
def _swiglu(x_ptr, out_ptr, count, rows: tl.constexpr, block: tl.constexpr):
    start, source, offset = _place(rows, block)
    lane = tl.arange(0, block)
    inside = lane < count - start
    gate = tl.load(x_ptr + source + offset, mask=inside, other=0.0)
    value = tl.load(x_ptr + source + rows + offset, mask=inside, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    tl.store(out_ptr + start + lane, (g / (1.0 + tl.exp(-g)) * value).to(gate.dtype), mask=inside)


@triton.jit
def _swiglu_gradient(gradient_ptr, x_ptr, out_ptr, count, rows: tl.constexpr, block: tl.constexpr):
    start, source, offset = _place(rows, block)
    lane = tl.arange(0, block)
    inside = lane < count - start
    gate = tl.load(x_ptr + source + offset, mask=inside, other=0.0)
    value = tl.load(x_ptr + source + rows + offset, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    scaled = gradient * s
    tl.store(out_ptr + source + offset, (scaled * value * (1.0 + g * (1.0 - s))).to(gate.dtype), mask=inside)
    tl.store(out_ptr + source + rows + offset, (scaled * g).to(gate.dtype), mask=inside)


@triton.jit
def _dropped(
    x_ptr,
    key_ptr,
    out_ptr,
    tokens,
    features,
    site,
    least,
    scale: tl.constexpr,
    feature: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
):
    """Words are unsigned, so that they wrap and shift in zeros; only the last comparison is of signed ones."""
    token = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    key = (tl.load(key_ptr + token, mask=token < tokens, other=0) + site).to(tl.uint32, bitcast=True)
    bits = key[:, None] + (column.to(tl.uint32) * feature)[None, :]
    bits = (bits ^ (bits >> 16)) * first
    bits = (bits ^ (bits >> 15)) * second
    keep = bits.to(tl.int32, bitcast=True) >= least
    inside = (token < tokens)[:, None] & (column < features)[None, :]
    place = token[:, None] * features + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, tl.where(keep, x.to(wide) * scale, 0.0).to(x.dtype), mask=inside)


def _grid(out: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(out.numel(), _BLOCK),)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """As `kernels.pointwise.gelu`, up to fp32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _gelu[_grid(out)](x, out, x.numel(), block=_BLOCK, num_warps=_WARPS)
    return out


def gelu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As `kernels.pointwise.plain_gelu_gradient`, up to fp32."""
    gradient, x = gradient.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _gelu_gradient[_grid(out)](gradient, x, out, x.numel(), block=_BLOCK, num_warps=_WARPS)
    return out


def swiglu(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    """As `kernels.pointwise.swiglu`, up to fp32; gate_rows a power of two."""
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if x.numel():
        _swiglu[_grid(out)](x, out, out.numel(), rows=gate_rows, block=_BLOCK, num_warps=_WARPS)
    return out


def swiglu_gradient(gradient: torch.Tensor, x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    """As `kernels.pointwise.plain_swiglu_gradient`, up to fp32; gate_rows a power of two."""
    gradient, x = gradient.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = _grid(gradient)
        _swiglu_gradient[grid](gradient, x, out, gradient.numel(), rows=gate_rows, block=_BLOCK, num_warps=_WARPS)
    return out


def dropped(x: torch.Tensor, key: torch.Tensor, site: int, least: int, scale: float) -> torch.Tensor:
    """x [..., D] times `scale` where the hash of key int32 [...], the int32 `site` and a feature is, as an int32, `least` or
    more; elsewhere 0. The bits of `kernels.dropout.plain_dropout`."""
    features = x.shape[-1]
    x, key = x.contiguous(), key.expand(x.shape[:-1]).contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = min(_BLOCK, triton.next_power_of_2(features))
    lanes = _BLOCK // columns
    grid = (triton.cdiv(key.numel(), lanes), triton.cdiv(features, columns))
    _dropped[grid](
        x,
        key,
        out,
        key.numel(),
        features,
        site,
        least,
        scale=scale,
        feature=FEATURE,
        first=FIRST,
        second=SECOND,
        wide=tl.float64 if x.dtype == torch.float64 else tl.float32,
        lanes=lanes,
        columns=columns,
        num_warps=_WARPS,
    )
    return out
