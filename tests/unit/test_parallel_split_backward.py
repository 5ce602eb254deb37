"""Linear layers whose weight gradients are computed later."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.errors import MeshwrightError
from meshwright.parallel.split_backward import Deferral, deferred_linear


class Row(nn.Module):
    """A layer with a matmul of its own, as a split one has."""

    deferrable = True
    deferral: Deferral | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return deferred_linear(x, self.weight, None, self.deferral) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.row = Row()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.bias_only = nn.Linear(4, 4)
        self.bias_only.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias_only(self.frozen(self.row(torch.tanh(self.up(self.norm(x))))))


def gradients(block: nn.Module, x: torch.Tensor, deferral: Deferral | None) -> dict[str, torch.Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    loss = block(x).square().sum()
    if deferral is None:
        loss.backward()
    else:
        with deferral.collect() as kept:
            loss.backward()
        assert block.up.weight.grad is None and block.row.weight.grad is None and block.norm.weight.grad is not None
        assert len(kept) == 3 and not any(factors.x.requires_grad for factors in kept)
        for factors in kept:
            for parameter, gradient in factors.weight_gradients():
                assert parameter.grad is None and not gradient.requires_grad
                parameter.grad = gradient
    return {"x": x.grad, **{name: p.grad for name, p in block.named_parameters() if p.requires_grad}}


# a bias summed over the rows of the first dimension alone is red, and so is the transposed weight gradient
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 4)])
def test_the_gradients_are_those_of_one_backward(shape, recompute):
    torch.manual_seed(0)
    block = Block().double()
    x = torch.randn(shape, dtype=torch.float64)
    expected = gradients(block, x, None)
    deferral = Deferral()
    deferral.attach(block)
    if recompute:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    found = gradients(block, x, deferral)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_hooks_of_a_deferred_weight_are_not_called():
    block, called = Block(), []
    block.up.weight.register_post_accumulate_grad_hook(called.append)
    deferral = Deferral()
    deferral.attach(block)
    gradients(block, torch.randn(2, 4), deferral)
    assert not called


def test_an_input_without_a_gradient_does_not_hide_the_weight():
    deferral, weight = Deferral(), nn.Parameter(torch.randn(3, 4))
    x = torch.randn(2, 4)
    with deferral.collect() as kept:
        deferred_linear(x, weight, None, deferral).sum().backward()
    ((parameter, gradient),) = kept[0].weight_gradients()
    assert parameter is weight
    torch.testing.assert_close(gradient, x.sum(0).expand(3, 4))


def test_a_backward_elsewhere_is_refused_instead_of_losing_gradients():
    deferral, weight = Deferral(), nn.Parameter(torch.randn(3, 4))
    out = deferred_linear(torch.randn(2, 4, requires_grad=True), weight, None, deferral)
    with pytest.raises(MeshwrightError, match="outside of a split backward"):
        out.sum().backward()


def test_without_a_deferral_it_is_a_plain_linear_layer():
    x, weight, bias = torch.randn(2, 4), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    assert torch.equal(deferred_linear(x, weight, bias, None), F.linear(x, weight, bias))
    with torch.no_grad():
        assert torch.equal(deferred_linear(x, weight, bias, Deferral()), F.linear(x, weight, bias))
    assert not deferred_linear(x, weight.detach(), None, Deferral()).requires_grad
