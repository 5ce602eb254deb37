"""Collectives that autograd differentiates and the compiler keeps as one operator each.

    function            forward                        backward
    gather              all-gather along `dim`         reduce-scatter: every rank used all of it for a part of the gradient
    gather_alike        all-gather along `dim`         own slice: every rank computed the same from it
    scatter_sum         reduce-scatter along `dim`     all-gather
    exchange            all-to-all                     all-to-all back
    all_sum             all-reduce                     identity
    copy                identity                       all-reduce
    deal                rows to the ranks they are for the same backwards

An operator cannot take a process group, so a group goes by a key: `register_group` gives one. The registry belongs to the
process as the operators do; keys never repeat, hence meshes beside each other do not meet. What is registered stays.
Floating dtypes, contiguous results. Sums are in the dtype of the tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compat import all_gather_single, reduce_scatter_single

__all__ = [
    "all_sum",
    "copy",
    "deal",
    "exchange",
    "gather",
    "gather_alike",
    "gather_uneven",
    "group_of",
    "register_group",
    "scatter_sum",
]

_groups: dict[str, dist.ProcessGroup] = {}


def register_group(name: str, group: dist.ProcessGroup) -> str:
    """The key of a group: `name` and a number. The same group gets its key again.

    Keys end up in compiled code: ranks that register the same names in the same order share what they compile.
    """
    number = 0
    for key, known in _groups.items():
        if key.rpartition(".")[0] == name:
            if known is group:
                return key
            number += 1
    key = f"{name}.{number}"
    _groups[key] = group
    return key


def group_of(key: str) -> dist.ProcessGroup:
    """The group that was registered under a key."""
    return _groups[key]


def _grown(x: torch.Tensor, dim: int, ways: int) -> list[int]:
    return [*x.shape[:dim], x.shape[dim] * ways, *x.shape[dim + 1 :]]


def _shrunk(x: torch.Tensor, dim: int, ways: int) -> list[int]:
    return [*x.shape[:dim], x.shape[dim] // ways, *x.shape[dim + 1 :]]


@torch.library.custom_op("meshwright::gather", mutates_args=())
def gather(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    """The blocks [.., n, ..] of all ranks along `dim`, in rank order: [.., ranks * n, ..]. Blocks are of one shape."""
    group = _groups[key]
    ways = group.size()
    out = x.new_empty((ways * x.shape[0], *x.shape[1:]))
    all_gather_single(out, x.contiguous(), group=group)
    if math.prod(x.shape[:dim]) == 1:
        return out.view(_grown(x, dim, ways))
    return out.view(ways, *x.shape).movedim(0, dim).reshape(_grown(x, dim, ways))


@torch.library.custom_op("meshwright::gather_alike", mutates_args=())
def gather_alike(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    """As `gather`, for what every rank then computes alike: its gradient is whole on each, and each keeps its slice."""
    return gather(x, dim, key)


@torch.library.custom_op("meshwright::scatter_sum", mutates_args=())
def scatter_sum(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    """This rank's block along `dim` of the sum over the ranks: [.., ranks * n, ..] -> [.., n, ..]."""
    group = _groups[key]
    ways = group.size()
    out = x.new_empty(_shrunk(x, dim, ways))
    blocks = x.unflatten(dim, (ways, -1)).movedim(dim, 0).reshape(ways * out.shape[0], *out.shape[1:])
    reduce_scatter_single(out, blocks.contiguous(), group=group)
    return out


@torch.library.custom_op("meshwright::all_sum", mutates_args=())
def all_sum(x: torch.Tensor, key: str) -> torch.Tensor:
    """The sum over the ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_groups[key])
    return out


@torch.library.custom_op("meshwright::exchange", mutates_args=())
def exchange(x: torch.Tensor, split: int, join: int, key: str) -> torch.Tensor:
    """Block r along `split` goes to rank r; what comes is put together along `join`, in rank order:
    [.., ranks * n, .., m, ..] -> [.., n, .., ranks * m, ..]."""
    ways = _groups[key].size()
    blocks = x.unflatten(split, (ways, -1)).movedim(split, 0).contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=_groups[key])
    return out.movedim(0, join).flatten(join, join + 1).contiguous()


@torch.library.custom_op("meshwright::deal", mutates_args=())
def deal(x: torch.Tensor, send: list[int], receive: list[int], key: str) -> torch.Tensor:
    """The first send[0] rows of x [n, ...] go to rank 0, the next send[1] to rank 1, ...; what the ranks sent here, in their
    order: [sum(receive), ...]. Any count may be 0; every rank takes part all the same. Integers are not differentiated."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=_groups[key])
    return out


@deal.register_fake
def _(x: torch.Tensor, send: list[int], receive: list[int], key: str) -> torch.Tensor:
    return x.new_empty((sum(receive), *x.shape[1:]))


@gather.register_fake
def _(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    return x.new_empty(_grown(x, dim, _groups[key].size()))


@gather_alike.register_fake
def _(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    return x.new_empty(_grown(x, dim, _groups[key].size()))


@scatter_sum.register_fake
def _(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    return x.new_empty(_shrunk(x, dim, _groups[key].size()))


@exchange.register_fake
def _(x: torch.Tensor, split: int, join: int, key: str) -> torch.Tensor:
    shape, ways = list(x.shape), _groups[key].size()
    shape[split], shape[join] = shape[split] // ways, shape[join] * ways
    return x.new_empty(shape)


@all_sum.register_fake
def _(x: torch.Tensor, key: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dim, ctx.key = inputs[-2:]


def _own(x: torch.Tensor, dim: int, key: str) -> torch.Tensor:
    group = _groups[key]
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size)


gather.register_autograd(
    lambda ctx, grad: (scatter_sum(grad, ctx.dim, ctx.key), None, None),
    setup_context=_remember,
)
gather_alike.register_autograd(
    lambda ctx, grad: (_own(grad, ctx.dim, ctx.key), None, None),
    setup_context=_remember,
)
scatter_sum.register_autograd(
    lambda ctx, grad: (gather(grad, ctx.dim, ctx.key), None, None),
    setup_context=_remember,
)


def _remember_dims(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.split, ctx.join, ctx.key = inputs


exchange.register_autograd(
    lambda ctx, grad: (exchange(grad, ctx.join, ctx.split, ctx.key), None, None, None),
    setup_context=_remember_dims,
)


def _remember_counts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.key = inputs


deal.register_autograd(
    lambda ctx, grad: (deal(grad, ctx.receive, ctx.send, ctx.key), None, None, None),
    setup_context=_remember_counts,
)
all_sum.register_autograd(lambda ctx, grad: (grad, None))


class _Copy(torch.autograd.Function):
    """No operator: its result may not be its argument, and copying one activation a layer for that would be a waste."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: str) -> torch.Tensor:
        ctx.key = key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_sum(grad, ctx.key), None


def copy(x: torch.Tensor, key: str) -> torch.Tensor:
    """x itself, for ranks that each compute a part from it: their gradients are summed."""
    return _Copy.apply(x, key)


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], key: str) -> torch.Tensor:
        group = _groups[key]
        ctx.span = (sum(sizes[: group.rank()]), sizes[group.rank()])
        room = max(sizes)
        padded = torch.nn.functional.pad(x, (0, room - x.shape[-1])).contiguous()
        out = x.new_empty((group.size(), *padded.shape))
        all_gather_single(out.flatten(0, 1) if padded.dim() > 1 else out.flatten(), padded, group=group)
        return torch.cat([block[..., :size] for block, size in zip(out, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start, size = ctx.span
        return grad.narrow(-1, start, size), None, None


def gather_uneven(x: torch.Tensor, sizes: list[int], key: str) -> torch.Tensor:
    """As `gather_alike` along the last dimension, for blocks of `sizes`. Call it outside of compiled regions."""
    return _GatherUneven.apply(x, sizes, key)
