"""`kernels.fp8.cast` in Triton. Import through `kernels.accelerated`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshwright.kernels.fp8 import ALIGNED, E4M3

__all__ = ["cast"]

BLOCK = (128, 128)
"""Rows and columns of a program: lines of 128 bytes and more are read, and written either way."""
WARPS = 8


@triton.jit
def _scales(largest):
    """The scale and one over it, as in `kernels.fp8.scale_of`; NaN where the largest is no finite number."""
    bits = largest.to(tl.float32).to(tl.int32, bitcast=True)
    finite = bits < 0x7F800000
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 9)
    exponent = tl.where(finite, exponent, 127)
    poison = tl.where(finite, 0, 0x7FC00000)
    scale = ((exponent - 8) << 23) | poison
    inverse = ((262 - exponent) << 23) | poison
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _cast(
    x_ptr,
    rows_ptr,
    whole_ptr,
    straight_ptr,
    straight_scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    rows,
    padded,
    columns,
    straight: tl.constexpr,
    turned: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """A block of x, cast and written once as it lies and once transposed. Rows from `rows` to `padded` are zeros."""
    row = tl.program_id(1).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=there, other=0.0).to(tl.float32)
    if straight:
        scale, inverse = _scales(tl.load(rows_ptr + row, mask=row < rows, other=0.0))
        inside = (row < padded)[:, None] & (column < columns)[None, :]
        place = straight_ptr + row[:, None] * columns + column[None, :]
        tl.store(place, (x * inverse[:, None]).to(tl.float8e4nv), mask=inside)
        tl.store(straight_scale_ptr + row, scale, mask=(row < padded) & (tl.program_id(0) == 0))
    if turned:
        scale, inverse = _scales(tl.load(whole_ptr))
        inside = (column < columns)[:, None] & (row < padded)[None, :]
        place = turned_ptr + column.to(tl.int64)[:, None] * padded + row[None, :]
        tl.store(place, tl.trans((x * inverse).to(tl.float8e4nv)), mask=inside)
        scales = tl.full((block_columns,), 0.0, tl.float32) + scale
        tl.store(turned_scale_ptr + column, scales, mask=(column < columns) & (tl.program_id(1) == 0))


def cast(
    x: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor, straight: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.fp8.cast`; x is contiguous."""
    count, columns = x.shape
    padded = count + -count % ALIGNED
    made = (
        torch.empty((padded, columns) if straight else (0,), dtype=E4M3, device=x.device),
        torch.empty((padded,) if straight else (0,), dtype=torch.float32, device=x.device),
        torch.empty((columns, padded) if turned else (0,), dtype=E4M3, device=x.device),
        torch.empty((columns,) if turned else (0,), dtype=torch.float32, device=x.device),
    )
    grid = (triton.cdiv(columns, BLOCK[1]), triton.cdiv(padded, BLOCK[0]))
    _cast[grid](
        x,
        rows,
        whole,
        *made,
        count,
        padded,
        columns,
        straight=straight,
        turned=turned,
        block_rows=BLOCK[0],
        block_columns=BLOCK[1],
        num_warps=WARPS,
    )
    return made
