"""What differs between the torch releases this package supports, and any name that is not public. Each has a canary test."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "grouped_mm", "reduce_scatter_single"]

# torch 2.13 renames these two collectives and warns about the old names; older releases know the old names only
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# public as torch.nn.functional.grouped_mm from 2.10 on in some builds, else by its private name
_grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Matrix products of groups whose borders only the device knows. ends: int32 [G], where each group ends.

    a [T, K], b [G, K, N] -> [T, N], a group's rows times its matrix; a [M, T], b [T, N] -> [G, M, N], summed over the group.
    """
    return _grouped(a, b, offs=ends)


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather `input` [n, ...] of every rank into `output` [world * n, ...], in rank order."""
    return _gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `input` [world * n, ...] over the ranks and leave this rank's piece in `output` [n, ...]."""
    return _scatter(output, input, op=op, group=group, async_op=async_op)
