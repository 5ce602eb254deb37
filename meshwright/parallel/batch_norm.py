"""BatchNorm over the rows of all data ranks, so that a layer normalises by what one device would see.

With C channels a layer sends 2 C + 1 numbers in forward and 2 C in backward, and waits for both: mean, sum of squared
deviations and count of every rank, joined as in Chan, Golub and LeVeque (1979), so that a mean far from 0 costs no digits; and
the two sums in which the gradient of a row depends on the others (Ioffe and Szegedy, arXiv:1502.03167, section 3). Left to
itself a layer normalises by the rows of one rank and one micro-batch: the result then depends on the layout.

torch.nn.SyncBatchNorm runs on GPUs only; modules keep their class, parameters and buffers here, and get another forward.

Shapes: N rows, C channels, ... positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from meshwright.compat import BatchNorm, all_gather_single
from meshwright.distributed.mesh import DATA_AXES, subgroup

__all__ = ["batch_norms", "count_rows", "kept_statistics", "place_batch_norms"]


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """Every BatchNorm of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def count_rows(norms: Iterable[BatchNorm], counts: bool) -> None:
    """Whether the rows that come next count in the statistics, forward and backward: those that stand in for none do not."""
    for module in norms:
        module.no_rows = not counts  # type: ignore[assignment]  # a plain attribute, which modules may have


def place_batch_norms(model: nn.Module, mesh: DeviceMesh | None, synchronised: bool) -> str:
    """Gives every BatchNorm of the model its forward, in place. Collective over the mesh where there is one to synchronise.
    Returns what a user should know of it; "" where there is nothing.

    A group of their own: the order of their messages among those of the buckets differs between ranks that use other weights.
    Statistics and arithmetic are in at least fp32, whatever the weights have.
    """
    found = batch_norms(model)
    if not found:
        return ""
    group = _data_group(mesh) if synchronised and mesh is not None else None
    for module in found.values():
        module.forward = functools.partial(_forward, module, group)  # type: ignore[method-assign]
    count = f"{len(found)} BatchNorm layers" if len(found) > 1 else f"BatchNorm {next(iter(found))}"
    if group is not None:
        return f"{count}: statistics of a micro-step are of the rows of all data ranks"
    ranks = 1 if mesh is None else mesh.size()
    return f"{count}: statistics are of each rank's own rows, so that the result depends on the layout" if ranks > 1 else ""


def _data_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    names = list(mesh.mesh_dim_names or ())
    data = [names.index(name) for name in DATA_AXES if name in names and mesh.size(names.index(name)) > 1]
    if not data:
        return None
    others = [axis for axis in range(len(names)) if axis not in data]
    size = 1
    for axis in data:
        size *= mesh.size(axis)
    return subgroup(mesh, "batch_norm", mesh.mesh.permute(*others, *data).reshape(-1, size).tolist())


def _forward(module: BatchNorm, group: dist.ProcessGroup | None, x: torch.Tensor) -> torch.Tensor:
    """[N, C, ...] to the same: what `module` computes, by the statistics of all rows of the group where it takes them anew."""
    if not isinstance(module, nn.SyncBatchNorm):
        module._check_input_dim(x)
    tracks = module.running_mean is not None and module.running_var is not None
    follows = module.training and module.track_running_stats and tracks
    none = bool(getattr(module, "no_rows", False)) and module.training
    wide = torch.promote_types(x.dtype, torch.float32 if module.running_mean is None else module.running_mean.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (module.weight, module.bias))
    if none and group is None:
        mean, var = (module.running_mean, module.running_var) if tracks else (x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]))
        return F.batch_norm(x.to(wide), mean, var, weight, bias, False, 0.0, module.eps).to(x.dtype)
    if group is None or not module.training:
        factor = _count_batch(module, 1) if follows else 0.0
        mean, var = (module.running_mean, module.running_var) if follows or not module.training else (None, None)
        y = F.batch_norm(x.to(wide), mean, var, weight, bias, module.training or not tracks, factor, module.eps)
        return y.to(x.dtype)  # not every device takes values and statistics of two dtypes
    y, mean, var, count = _Synchronised.apply(x, weight, bias, module.eps, group, not none)
    if follows:
        factor = _count_batch(module, count > 0)
        assert module.running_mean is not None and module.running_var is not None
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp(min=1))
            some = (count > 0).to(mean.dtype) * factor  # no rank may have a row in this micro-batch
            for running, now in ((module.running_mean, mean), (module.running_var, unbiased)):
                running.lerp_(now.to(running.dtype), some.to(running.dtype))
    return y


def _count_batch(module: BatchNorm, one: int | torch.Tensor) -> float:
    """Counts a batch, or none where `one` is 0; returns its weight in the running statistics."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(one)
        if module.momentum is None:
            return 1.0 / max(1.0, float(module.num_batches_tracked))
    return module.momentum or 0.0


class _Synchronised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        counts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """y [N, C, ...]; mean, biased variance [C] and count [] over all ranks whose rows count."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rest = [dim for dim in range(x.dim()) if dim != 1]
        channels = x.shape[1]
        count = x.numel() // max(1, channels)
        mean = wide.sum(rest) / max(1, count)
        square = (wide - _spread(mean, x)).square().sum(rest)
        mine = torch.cat([mean, square, mean.new_full((1,), count)]) * float(counts)
        every = mine.new_empty(group.size() * mine.numel())
        all_gather_single(every, mine, group=group)
        means, squares, sizes = every.view(group.size(), -1).split([channels, channels, 1], dim=1)
        total = sizes.sum()
        mean = (sizes * means).sum(0) / total.clamp(min=1)
        var = (squares + sizes * (means - mean).square()).sum(0) / total.clamp(min=1)
        scale = torch.rsqrt(var + eps)
        y = (wide - _spread(mean, x)) * _spread(scale if weight is None else scale * weight, x)
        if bias is not None:
            y = y + _spread(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.group, ctx.counts = group, counts
        ctx.mark_non_differentiable(mean, var, total)
        return y.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        dy = gradients[0].to(mean.dtype)
        rest = [dim for dim in range(x.dim()) if dim != 1]
        normed = (x.to(mean.dtype) - _spread(mean, x)) * _spread(scale, x)
        mine = torch.stack([dy.sum(rest), (dy * normed).sum(rest)])  # this rank's share of the gradients of bias and weight
        every = mine.clone()
        dist.all_reduce(every, group=ctx.group)
        shift, slope = every / total.clamp(min=1)
        if ctx.counts:  # else these rows are in no statistics
            dy = dy - _spread(shift, x) - normed * _spread(slope, x)
        dx = dy * _spread(scale if weight is None else scale * weight, x)
        needed = ctx.needs_input_grad
        return dx.to(x.dtype), mine[1] if needed[1] else None, mine[0] if needed[2] else None, None, None, None


def _spread(channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[C] beside [N, C, ...]."""
    return channel.view(1, -1, *[1] * (x.dim() - 2))


@contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Running statistics are afterwards what they were before: a block that is recomputed has counted its rows already."""
    buffers = [buffer for norm in batch_norms(module).values() for buffer in norm.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in zip(buffers, before, strict=True):
            buffer.data.copy_(values)  # not a change that autograd should see: backward may hold the buffer
