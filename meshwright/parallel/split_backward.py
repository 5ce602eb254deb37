"""Backward in two parts: linear layers put off the gradients of their weights, on which no other stage waits.

`Deferral.collect` is around the backward of a micro-batch: it gives the gradients of all inputs, and of weights other than
those of deferred linear layers, and keeps for those the two factors, the input [N, in] and the gradient of the output
[N, out]. `weight_gradients` multiplies them later. What is kept meanwhile is N (in + out) elements a layer, of which the
inputs were kept for backward anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.errors import MeshwrightError

__all__ = ["Deferral", "Factors", "deferred_linear"]


@dataclass(frozen=True, eq=False)
class Factors:
    """What the gradients of one linear layer are made of: x [..., in], gradient of its output [..., out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    gradient: torch.Tensor

    def weight_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of the weight, then of the bias, as far as they are trained."""
        gradient = self.gradient.flatten(0, -2)
        if self.weight.requires_grad:
            yield self.weight, gradient.T @ self.x.flatten(0, -2)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(0)


class Deferral:
    """Collects the weight gradients that are put off. One for all linear layers of a rank."""

    def __init__(self) -> None:
        self.kept: list[Factors] | None = None
        self.anchor = torch.zeros(0, requires_grad=True)
        """An input of every deferred layer, so that it has a backward whether or not its x needs a gradient."""

    def attach(self, block: nn.Module) -> None:
        """Linear layers of a block are deferred from now on: plain `nn.Linear`, and modules that say `deferrable = True`, have
        an attribute `deferral` and multiply by `deferred_linear(x, weight, bias, self.deferral)`."""
        for module in block.modules():
            if type(module) is nn.Linear:
                module.forward = self._forward_of(module)  # type: ignore[assignment, method-assign]  # of this one
            elif getattr(module, "deferrable", False):
                module.deferral = self  # type: ignore[assignment]  # no submodule

    def _forward_of(self, module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        # its parameters are looked up at each call: they are put into flat buffers later
        return lambda x: deferred_linear(x, module.weight, module.bias, self)

    @contextmanager
    def collect(self) -> Iterator[list[Factors]]:
        """Around a backward; the list fills in the order in which backward comes by."""
        kept: list[Factors] = []
        self.kept = kept
        try:
            yield kept
        finally:
            self.kept = None


def deferred_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferral: Deferral | None
) -> torch.Tensor:
    """`F.linear` of x [..., in], whose weight [out, in] and bias [out] get no gradient from backward: it may run only inside of
    `deferral.collect`. deferral: None: it is plain `F.linear`."""
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if deferral is None or not trained or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    # hidden from autograd: it calls the hooks of a parameter that it knows even where there is no gradient
    return _Linear.apply(x, deferral.anchor, _Weights(weight, bias), deferral)


class _Weights(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, weights: _Weights, deferral: Deferral) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.deferral = weights, deferral
        return F.linear(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.deferral.kept is None:
            raise MeshwrightError(
                "backward reached a linear layer that puts off its weight gradients, outside of a split backward"
            )
        (x,), (weight, bias) = ctx.saved_tensors, ctx.weights
        ctx.deferral.kept.append(Factors(weight, bias, x.detach(), gradient))  # x itself would keep the graph behind it alive
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None
