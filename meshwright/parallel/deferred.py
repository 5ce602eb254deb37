"""Backward in two parts: linear layers put off the gradients of their weights, on which no other stage waits.

`Deferral.collect` is around the backward of a micro-batch: it gives the gradients of all inputs, and of weights other than
those of deferred linear layers, and keeps for those the two factors, the input [N, in] and the gradient of the output
[N, out]. `weight_gradients` multiplies them later. What is kept meanwhile is N (in + out) elements a layer, of which the
inputs were kept for backward anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = ["Deferral", "Factors", "deferred_linear"]


@dataclass(frozen=True, eq=False)
class Factors:
    """What the gradients of one linear layer are made of: x [..., in], gradient of its output [..., out]."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: torch.Tensor
    gradient: torch.Tensor

    def weight_gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Of the weight, then of the bias, as far as they are trained."""
        gradient = self.gradient.flatten(0, -2)
        if self.weight.requires_grad:
            yield self.weight, gradient.T @ self.x.flatten(0, -2)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(0)


class Deferral:
    """Whether gradients of weights are put off, and those that were. One for all linear layers of a rank."""

    def __init__(self) -> None:
        self.kept: list[Factors] | None = None

    def attach(self, block: nn.Module) -> None:
        """Linear layers of a block are deferred from now on: plain `nn.Linear`, and modules that say `deferrable = True`, have
        an attribute `deferral` and multiply by `deferred_linear(x, weight, bias, self.deferral)`."""
        for module in block.modules():
            if type(module) is nn.Linear:
                module.forward = lambda x, module=module: deferred_linear(x, module.weight, module.bias, self)
            elif getattr(module, "deferrable", False):
                module.deferral = self  # type: ignore[assignment]  # no submodule

    @contextmanager
    def collect(self) -> Iterator[list[Factors]]:
        """Around a backward; the list fills in the order in which backward comes by."""
        self.kept = kept = []
        try:
            yield kept
        finally:
            self.kept = None


def deferred_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferral: Deferral | None
) -> torch.Tensor:
    """`F.linear` of x [..., in], whose backward leaves out the gradients of weight [out, in] and bias [out] inside of
    `deferral.collect`. deferral: None: it is plain `F.linear`."""
    if deferral is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, deferral)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, deferral: Deferral) -> torch.Tensor:
        ctx.save_for_backward(x)
        # not saved as tensors: what unpacks those of a recomputed block gives other objects than the parameters
        ctx.weight, ctx.bias, ctx.deferral = weight, bias, deferral
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        factors = Factors(ctx.weight, ctx.bias, x.detach(), gradient)  # x itself would keep the graph behind it alive
        x_gradient = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        if ctx.deferral.kept is not None:
            ctx.deferral.kept.append(factors)
            return x_gradient, None, None, None
        whole = {id(parameter): each for parameter, each in factors.weight_gradients()}
        return x_gradient, whole.get(id(ctx.weight)), whole.get(id(ctx.bias)), None
