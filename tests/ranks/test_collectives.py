"""The differentiable collectives: results, gradients, what the compiler is told, and groups by keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.distributed.collectives import all_sum, copy, gather, gather_alike, gather_uneven, register_group, scatter_sum
from tests.ranks.pool import mesh


def keys() -> list[str]:
    """Two meshes beside each other: their groups have keys of their own, and a group keeps its key."""
    one, other = mesh((2, 2), ("a", "b")).get_group("a"), mesh((2, 2), ("a", "b")).get_group("b")
    out = [register_group("test", one), register_group("test", other), register_group("test", one)]
    value = torch.full((1,), float(2 ** dist.get_rank()))
    return [*out, *(str(all_sum(value, key).item()) for key in out[:2])]


def test_groups_go_by_keys(ranks):
    sums = [["5.0", "3.0"], ["10.0", "3.0"], ["5.0", "12.0"], ["10.0", "12.0"]]
    for said, expected in zip(ranks(4).run(keys), sums, strict=True):
        assert said == ["test.0", "test.1", "test.0", *expected]


def operators(dtype: torch.dtype) -> None:
    """Each operator against plain torch, its gradient, and what the compiler is told of it."""
    group = mesh((3,), ("t",)).get_group("t")
    key, rank = register_group("operators", group), group.rank()
    blocks = [torch.arange(24).view(2, 3, 4).to(dtype) + 100 * r for r in range(3)]
    for dim in range(3):
        x = blocks[rank].clone().requires_grad_()
        whole = torch.cat(blocks, dim)
        for function in (gather, gather_alike):
            out = function(x, dim, key)
            assert torch.equal(out, whole) and out.is_contiguous()
            (gradient,) = torch.autograd.grad((out * whole * 0.5).sum(), x)
            assert torch.equal(gradient, blocks[rank] * (1.5 if function is gather else 0.5))
        y = whole.clone().requires_grad_()
        out = scatter_sum(y, dim, key)
        assert torch.equal(out, blocks[rank] * 3)
        (gradient,) = torch.autograd.grad((out * blocks[rank]).sum(), y)
        assert torch.equal(gradient, whole)
    x = blocks[rank].clone().requires_grad_()
    out = all_sum(x, key)
    assert torch.equal(out, sum(blocks)) and torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
    out = copy(x, key)
    assert torch.equal(torch.autograd.grad((out * blocks[rank] / 4).sum(), x)[0], sum(blocks) / 4)
    sizes = [2, 4, 1]
    x = blocks[rank][..., : sizes[rank]].clone().requires_grad_()
    out = gather_uneven(x, sizes, key)
    whole = torch.cat([block[..., :size] for block, size in zip(blocks, sizes, strict=True)], dim=-1)
    assert torch.equal(out, whole)
    assert torch.equal(torch.autograd.grad((out * whole).sum(), x)[0], x.detach())
    if dtype == torch.float64:
        for function, shape in ((gather, (2, 3, 4)), (gather_alike, (2, 3, 4)), (scatter_sum, (2, 3, 4))):
            arguments = (torch.ones(shape).transpose(1, 2).requires_grad_(), 2, key)
            torch.library.opcheck(
                function, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_operators(ranks, dtype):
    # Red with: blocks in the order of the other dimension, a backward without its sum.
    ranks(3).run(operators, dtype)
