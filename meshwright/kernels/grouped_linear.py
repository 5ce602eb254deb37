"""One matrix product for many experts: rows that lie together by expert, each run times the matrix of its expert.

Shapes: T rows, E experts, K features of a row, F features of a result. `ends` [E] says where the run of each expert ends; the
rows behind the last run belong to nobody, and give zeros. The number of rows of an expert is known to the device alone: no
shape depends on it. On CUDA, in bf16, it is one grouped kernel (`compat.grouped_mm`); elsewhere, and as its oracle, a loop
over the experts, which reads `ends` on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.compat import grouped_mm

__all__ = ["grouped_linear", "looped_linear", "looped_weight_gradient", "stays_on_device"]

ALIGNED = 8
"""Elements to which the grouped kernel wants rows aligned: 16 bytes of bf16."""


def _runs(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, start, stop) of each; may be empty. Waits for the device."""
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        yield expert, start, stop


def looped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [E, F, K] -> [T, F], in any dtype: what `grouped_linear` computes."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, start, stop in _runs(ends):
        torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
    return out


def looped_weight_gradient(gradient: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """gradient [T, F], x [T, K] -> [E, F, K]; zeros for an expert without a row."""
    out = x.new_zeros(ends.numel(), gradient.shape[1], x.shape[1])
    for expert, start, stop in _runs(ends):
        torch.mm(gradient[start:stop].t(), x[start:stop], out=out[expert])
    return out


def _grouped(x: torch.Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0 and all(size % ALIGNED == 0 for size in sizes)


def stays_on_device(weight: torch.Tensor) -> bool:
    """Whether `grouped_linear` of rows in the dtype of this weight [E, F, K] reads nothing on the host."""
    return weight.is_cuda and weight.dtype == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:])


def _cleared(out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zeros in the rows that belong to nobody, which the kernel leaves as they come."""
    foreign = torch.arange(out.shape[0], device=out.device) >= ends[-1]
    return out.masked_fill_(foreign[:, None], 0.0)


def _multiply(x: torch.Tensor, weight_EKF: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _grouped(x, *weight_EKF.shape[1:]):
        return _cleared(grouped_mm(x.contiguous(), weight_EKF, ends.to(torch.int32)), ends)
    return looped_linear(x, weight_EKF.transpose(1, 2), ends)


@torch.library.custom_op("meshwright::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [T, K] sorted by expert, weight [E, F, K], ends int64 [E] -> [T, F] in the dtype of x, which is that of the weight."""
    return _multiply(x, weight.transpose(1, 2), ends)


@torch.library.custom_op("meshwright::grouped_input_gradient", mutates_args=())
def _input_gradient(gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """gradient [T, F], weight [E, F, K] -> [T, K]"""
    return _multiply(gradient, weight, ends)


@torch.library.custom_op("meshwright::grouped_weight_gradient", mutates_args=())
def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """gradient [T, F], x [T, K] -> [E, F, K]"""
    if _grouped(x, gradient.shape[1], x.shape[1]):
        return grouped_mm(gradient.contiguous().t(), x.contiguous(), ends.to(torch.int32))
    return looped_weight_gradient(gradient, x, ends)


@grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_input_gradient.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], gradient.shape[1], x.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    wanted = ctx.needs_input_grad
    return (
        _input_gradient(gradient, weight, ends) if wanted[0] else None,
        _weight_gradient(gradient, x, ends) if wanted[1] else None,
        None,
    )


grouped_linear.register_autograd(_backward, setup_context=_remember)
