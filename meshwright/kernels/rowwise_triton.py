"""`kernels.rowwise` in Triton. Import through `kernels.accelerated`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshwright.kernels.early import launch_options

__all__ = ["as_stored", "empty_rows", "multiplies", "quantize_rows", "row_warps", "store_rounded", "widened"]


@triton.jit
def as_stored(x, pointer):
    """x in the dtype of what the pointer points to: 8 bits hold no more than 448, and NaN stays."""
    if pointer.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in a dtype that has all of its numbers; nothing makes fp64 of 8 bits at once."""
    if dtype == tl.float64 and x.dtype == tl.float8e4nv:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def store_rounded(x, inside, at, out_ptr, scale_ptr, row):
    """A whole row x [block], 0 where it is not inside, in 8 bits at out_ptr + at, and its scale."""
    scale = (tl.maximum(tl.max(tl.abs(x), 0), 7.888609052210118e-31) / 448.0).to(tl.float32)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + at, as_stored(x / scale, out_ptr), mask=inside)


@triton.jit
def _quantize(x_ptr, out_ptr, scale_ptr, width, wide: tl.constexpr, block: tl.constexpr, early: tl.constexpr):
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(wide)
    store_rounded(x, inside, row * width + column, out_ptr, scale_ptr, row)


def row_warps(block: int) -> int:
    """Of a program that keeps a row of `block` numbers."""
    return max(1, min(16, block // 512))


def empty_rows(*shape: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For e4m3 [..., K], and fp32 [..., 1]."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(*shape[:-1], 1, dtype=torch.float32, device=device)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.rowwise.quantize_rows`, but where some of a row are no numbers, those alone stay none."""
    width = x.shape[-1]
    values, scale = empty_rows(*x.shape, device=x.device)
    block = triton.next_power_of_2(width)
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    _quantize[(x.numel() // width,)](
        x.contiguous(), values, scale, width, wide=wide, block=block, num_warps=row_warps(block), **launch_options()
    )
    return values, scale


def multiplies() -> bool:
    """Whether torch multiplies rows of 8 bits with scales of their own on this device."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90
