"""RMSNorm before a branch of a pre-norm layer, whose gradient a compiler leaves slower than memory is.

There x goes into the norm and around it, and both gradients meet. A compiler adds them in the kernel of the norm's gradient but
reads rows twice; `kernels.rms_norm_triton` does all of it in one pass, as an operator that is opaque to the compiler.

Shapes: D width, of the last dimension; leading ones are rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.kernels.accelerated import norm_kernels
from meshwright.kernels.pointwise import one_pass

__all__ = ["fork", "in_one_pass", "plain_rms_norm_gradient", "rms_norm_gradient"]

WIDEST = 8192
"""Bytes of a row that a program of the kernel keeps at once, three times over."""


def in_one_pass(x: torch.Tensor, norm: nn.Module) -> bool:
    """Whether the gradient of `norm(x)` is for the kernel: in compiled training only, whose forward the compiler makes."""
    if type(norm) is not nn.RMSNorm or norm.weight is None or norm.eps is None or not torch.compiler.is_compiling():
        return False
    trained = torch.is_grad_enabled() and x.requires_grad and norm.weight.requires_grad
    fits = norm.weight.shape == x.shape[-1:] and norm.weight.dtype == x.dtype and x.shape[-1] * x.element_size() <= WIDEST
    return trained and fits and one_pass(x)


def fork(x: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D], for the residual sum, and `norm(x)`, for the branch beside it."""
    return _Fork.apply(x, norm.weight, norm.eps) if in_one_pass(x, norm) else (x, norm(x))


def plain_rms_norm_gradient(
    residual: torch.Tensor, normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [..., D] and of weight [D] from those of x itself and of y = weight x r, r = 1 / sqrt(mean(x**2) + eps):
    residual + r (g - x r mean(g x r)) with g = weight normed, and the sum over rows of normed x r; both in at least fp32,
    rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    r = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    scaled, g = x.to(wide) * r, normed.to(wide) * weight.to(wide)
    of_x = residual.to(wide) + r * (g - scaled * (g * scaled).mean(-1, keepdim=True))
    of_weight = (normed.to(wide) * scaled).reshape(-1, x.shape[-1]).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


@torch.library.custom_op("meshwright::rms_norm_gradient", mutates_args=())
def rms_norm_gradient(
    residual: torch.Tensor, normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = norm_kernels(x.device)
    return (plain_rms_norm_gradient if kernels is None else kernels.rms_norm_gradient)(residual, normed, x, weight, eps)


@rms_norm_gradient.register_fake
def _(
    residual: torch.Tensor, normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


class _Fork(torch.autograd.Function):
    """Forward is the compiler's, which makes it of one piece with the sum before it and with what fp8 needs after it."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view_as(x), torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, residual: torch.Tensor, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        of_x, of_weight = rms_norm_gradient(residual, normed, *ctx.saved_tensors, ctx.eps)
        return of_x, of_weight, None
