"""What differs between the torch releases this package supports, any name that is not public, and what a library does otherwise
than its callers here need. Each has a canary test."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # what BatchNorm1d to 3d and SyncBatchNorm have in common
from torch.nn.modules.batchnorm import _NormBase as NormBase  # and InstanceNorm1d to 3d

__all__ = [
    "BatchNorm",
    "NormBase",
    "all_gather_single",
    "count_step",
    "flash_backward",
    "flash_forward",
    "grouped_mm",
    "reduce_scatter_single",
    "save_tensors",
]

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


# torch's public variable-length attention gives the log-sum-exp but has no backward that takes one which other keys went into
def flash_forward(
    q_THE: torch.Tensor,
    k_UKE: torch.Tensor,
    v_UKE: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention of sequences that lie behind each other: T queries, U keys, of each sequence as int32 boundaries [N+1].

    longest: at least the most queries and keys of a sequence. causal: a sequence has as many queries as keys. Returns the
    result [T, H, E] and the log-sum-exp, fp32 [H, T] (infinite for a query without a key).
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_THE, k_UKE, v_UKE, cu_q, cu_k, *longest, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_backward(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_UKE: torch.Tensor,
    v_UKE: torch.Tensor,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values. out, lse: over all keys of a query, those of other calls too: what comes out is
    then the part of the gradient that these keys have in it."""
    random = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)  # without dropout nothing is drawn
    return torch.ops.aten._flash_attention_backward(
        grad_THE,
        q_THE,
        k_UKE,
        v_UKE,
        out_THE,
        lse_HT,
        cu_q,
        cu_k,
        *longest,
        0.0,
        causal,
        random,
        torch.empty(0, device=q_THE.device),
        scale=scale,
    )


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's learning-rate schedulers see that this optimizer made a step; they warn where they see none. Where a
    scheduler is attached, `step` sets the same name."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """`safetensors.torch.save_file`, but with the permissions of any new file: by itself it lets the owner alone read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)
