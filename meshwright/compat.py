"""What differs between the torch releases this package supports, and any name that is not public. Each has a canary test."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "count_step", "reduce_scatter_single"]

# torch 2.13 renames these two collectives and warns about the old names; older releases know the old names only
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's learning-rate schedulers see that this optimizer made a step; they warn where they see none. Where a
    scheduler is attached, `step` sets the same name."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
