"""Where the Triton versions of this package's kernels can run.

Each has a plain torch oracle beside its caller: that is what runs on a CPU, and what the kernel is tested against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "fp8_kernels",
    "fused_kernels",
    "one_row_kernels",
    "optimizer_kernels",
    "paged_kernels",
    "pointwise_kernels",
    "rowwise_kernels",
    "scaled_cast",
    "softmax_rows",
]


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from meshwright.kernels import triton_kernels
    except ImportError:  # no Triton: the plain versions run everywhere
        return None
    return triton_kernels


def softmax_rows(device: torch.device) -> Callable[..., Any] | None:
    """The fused softmax, loss and gradient over rows of logits for tensors on `device`, or None."""
    kernels = None if device.type == "cpu" else _kernels()
    return None if kernels is None else kernels.softmax_rows


def scaled_cast(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor] | None:
    """The one-pass product with a 0-d factor, rounded to another dtype, for tensors on `device`, or None. torch's own takes
    three times as long as its bytes where the dtypes differ (1.2 ms for 2.6e8 numbers on an H200)."""
    kernels = None if device.type == "cpu" else _kernels()
    return None if kernels is None else kernels.scaled_cast


def optimizer_kernels(device: torch.device) -> ModuleType | None:
    """A module with the one-pass `adamw_` and `sgd_` for tensors on `device`, or None."""
    return None if device.type == "cpu" else _kernels()


@functools.cache
def paged_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.paged_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import paged_triton
    except ImportError:
        return None
    return paged_triton


@functools.cache
def fused_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.fused_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import fused_triton
    except ImportError:
        return None
    return fused_triton


@functools.cache
def one_row_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.one_row_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import one_row_triton
    except ImportError:
        return None
    return one_row_triton


@functools.cache
def pointwise_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.pointwise_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import pointwise_triton
    except ImportError:
        return None
    return pointwise_triton


@functools.cache
def fp8_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.fp8_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import fp8_triton
    except ImportError:
        return None
    return fp8_triton


def rowwise_kernels(device: torch.device) -> ModuleType | None:
    """`kernels.rowwise_triton`, for tensors on `device`, or None."""
    if device.type == "cpu":
        return None
    try:
        from meshwright.kernels import rowwise_triton
    except ImportError:
        return None
    return rowwise_triton
