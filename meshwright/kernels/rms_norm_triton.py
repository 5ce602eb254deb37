"""`kernels.rms_norm` in Triton. Import through `kernels.accelerated`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rms_norm_gradient"]

THREADS, EACH, STAGES = 65536, 16, 3
"""Of the device, at most 128 registers each: 512 of a multiprocessor of an H200; numbers of a row that one of them takes; rows
in flight in a program."""
_COLUMNS, _PARTS = 16, 512


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _gradient(
    residual_ptr,
    normed_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    parts_ptr,
    rows,
    width: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """Program i of P takes rows i, i + P, i + 2 P, ..., and sums the weight's gradient over them in registers."""
    column = tl.arange(0, block)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([block], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=stages):
        at = row * width + column
        stored = tl.load(x_ptr + at, mask=inside, other=0.0)
        x = stored.to(tl.float32)
        normed = tl.load(normed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = normed * weight
        squares, product = tl.reduce((x * x, g * x), 0, _both)
        r = tl.rsqrt(squares / width + eps)
        scaled = x * r
        part += normed * scaled
        out = residual + r * (g - scaled * (product * r / width))
        tl.store(out_ptr + at, out.to(stored.dtype), mask=inside)
    tl.store(parts_ptr + first * width + column, part, mask=inside)


@triton.jit
def _sum_parts(parts_ptr, out_ptr, parts, width: tl.constexpr, columns: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([block, columns], tl.float32)
    for start in range(0, parts, block):
        part = start + tl.arange(0, block)
        inside = (part < parts)[:, None] & (column < width)[None, :]
        total += tl.load(parts_ptr + part[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < width)


def rms_norm_gradient(
    residual: torch.Tensor, normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.rms_norm.plain_rms_norm_gradient`, up to fp32. Sums are in one order: the same bits every time."""
    width = x.shape[-1]
    residual, normed, x, weight = (t.contiguous() for t in (residual, normed, x, weight))
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    rows = x.numel() // max(width, 1)
    if not rows:
        return of_x, of_weight.zero_()
    block = triton.next_power_of_2(width)
    warps = max(1, min(32, block // (32 * EACH)))
    programs = min(rows, THREADS // (32 * warps))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gradient[(programs,)](
        residual, normed, x, weight, of_x, parts, rows, width=width, eps=eps, block=block, stages=STAGES, num_warps=warps
    )
    grid = (triton.cdiv(width, _COLUMNS),)
    _sum_parts[grid](parts, of_weight, programs, width=width, columns=_COLUMNS, block=_PARTS, num_warps=8)
    return of_x, of_weight
