"""Linear layers of a step, with what comes before and after each of them.

A single row reads every weight once and multiplies each by one number: what counts is that the reads never stop. On an
accelerator such a row goes through one kernel for a matrix and all around it (`kernels.one_row_triton`): an RMS norm (whose
scale is a factor of the result, so nothing waits for it), bias, gate, rotation, the write into pages, and the sum of the
residual stream. More rows, and what that kernel does not know, are a matrix product between the functions of `kernels.fused`,
which round their results themselves where the matrix behind them would (`rowwise.takes_rounded`).

The residual stream is two tensors here: x, and a branch that the next norm adds to it; None: x has it already.

Shapes as in `kernels.fused`; x and branch [B, T, D] with any B and T, and one row where B T is 1.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.kernels.accelerated import one_row_kernels
from meshwright.kernels.fused import Heads, add_norm, add_norm_rounded, gate, gate_rounded, turn_and_write
from meshwright.kernels.rowwise import Rounded, ScaledLinear, row_scales, takes_rounded

__all__ = ["gate_linear", "heads_linear", "linear", "vocabulary_linear"]


def _kernels(x: torch.Tensor, module: nn.Module) -> ModuleType | None:
    """For one row, and a matrix that is whole: others bring sums over ranks of their own."""
    return one_row_kernels(x.device) if x.numel() == x.shape[-1] and type(module) in (nn.Linear, ScaledLinear) else None


def _before(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with what is new in it, and what the next matrix sees."""
    if norm is not None:
        return add_norm(x, branch, norm)
    total = x if branch is None else x + branch
    return total, total


def _left(
    x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module | None
) -> tuple[torch.Tensor, torch.Tensor, nn.RMSNorm | None]:
    """As `_before`, but an RMS norm is left to the kernel of the matrix where there is nothing to add."""
    if branch is None and (norm is None or isinstance(norm, nn.RMSNorm)):
        return x, x, norm
    return *_before(x, branch, norm), None


def _through(
    x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module | None, module: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + branch, and module(norm of that)."""
    if norm is not None and takes_rounded(module, x):
        total, rows = add_norm_rounded(x, branch, norm)
        return total, module(rows)
    total, y = _before(x, branch, norm)
    return total, module(y)


def linear(y: torch.Tensor | Rounded, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The residual stream x with module(y) as its branch, or in it."""
    kernels = None if isinstance(y, Rounded) else _kernels(y, module)
    if kernels is None:
        return x, module(y)
    return kernels.linear(y, None, module.weight, module.bias, row_scales(module), residual=x), None


def gate_linear(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    norm: nn.Module | None,
    module: nn.Module,
    name: str,
    gate_rows: int,
    behind: nn.Module | None = None,
) -> tuple[torch.Tensor, torch.Tensor | Rounded]:
    """x + branch, and `fused.gate` of module(norm of that): [..., D], [..., F]. behind: the matrix that takes the latter."""
    kernels = _kernels(x, module)
    if kernels is None:
        x, y = _through(x, branch, norm, module)
        return x, (gate_rounded if takes_rounded(behind, y) else gate)(y, name, gate_rows)
    x, y, norm = _left(x, branch, norm)
    return x, kernels.gate_linear(y, norm, module.weight, module.bias, row_scales(module), name, gate_rows)


def heads_linear(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    norm: nn.Module | None,
    module: nn.Module,
    heads: Heads,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + branch, and `fused.turn_and_write` of module(norm of that): [..., D], [T, H, E]. B is 1."""
    kernels = _kernels(x, module) if keys.shape[3] % 2 == 0 else None
    if kernels is None:
        x, y = _through(x, branch, norm, module)
        return x, turn_and_write(y[0], heads, keys, values, slots)
    x, y, norm = _left(x, branch, norm)
    if heads.q_norm is None:
        return x, kernels.heads_linear(y, norm, module.weight, module.bias, row_scales(module), heads, keys, values, slots)
    qkv = kernels.linear(y, norm, module.weight, module.bias, row_scales(module))  # a norm of heads waits for whole heads
    return x, turn_and_write(qkv[0], heads, keys, values, slots)


def vocabulary_linear(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    norm: nn.Module | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """weight times the norm of x + branch, + bias, [..., V]. out: [B T, V], where it goes."""
    kernels = one_row_kernels(x.device) if x.numel() == x.shape[-1] else None
    if kernels is not None:
        _, y, left = _left(x, branch, norm)
        return kernels.linear(y, left, weight, bias, None, out=out)
    _, y = _before(x, branch, norm)
    if out is None or bias is not None:
        logits = F.linear(y, weight, bias)
        return logits if out is None else out.copy_(logits.flatten(0, -2)).view(logits.shape)
    return torch.mm(y.flatten(0, -2), weight.t(), out=out).view(*y.shape[:-1], -1)
