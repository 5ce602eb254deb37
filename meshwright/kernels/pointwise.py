"""Activations of training that a compiler leaves slower than memory is: exact GELU and the gate of swiglu, with gradients.

Where `kernels.pointwise_triton` can run they are operators, opaque to a compiler, that read and write each element once (but
for swiglu's forward in compiled code, where a compiler does so too).
Everywhere else (on a CPU, in fp64, without Triton, in an exported graph) they are what torch has, which a compiler may fuse.
Both sides of an activation are matrix products, so that an opaque operator keeps nothing from being fused.

Shapes: F width of a feed-forward layer.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.kernels.accelerated import pointwise_kernels

__all__ = ["gelu", "one_pass", "plain_gelu", "plain_gelu_gradient", "plain_swiglu", "plain_swiglu_gradient", "swiglu"]

_TRITON = find_spec("triton") is not None
"""Known without importing it, and a plain number to a compiler that traces this file."""


def one_pass(x: torch.Tensor) -> bool:
    """Whether a kernel in Triton can take x where this is called."""
    elsewhere = x.device.type not in ("cpu", "meta") and x.dtype != torch.float64
    # a compiler that traces for itself is told that everything is being exported
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return elsewhere and _TRITON and not exporting


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x), with Phi the distribution of a standard normal: x of any floating dtype and shape."""
    return gelu_operator(x) if one_pass(x) else plain_gelu(x)


def swiglu(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    """[..., 2 F] -> [..., F], silu(gate) value: features alternate, `gate_rows` of the gate, then as many of the value."""
    runs = gate_rows & (gate_rows - 1) == 0 and x.shape[-1] % (2 * gate_rows) == 0  # what the kernel takes
    if not runs or not one_pass(x):
        return plain_swiglu(x, gate_rows)
    return _FusedSwiglu.apply(x, gate_rows) if torch.compiler.is_compiling() else swiglu_operator(x, gate_rows)


plain_gelu = F.gelu


def plain_gelu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of x, from that of `gelu(x)`, of one shape: times Phi(x) + x Phi'(x)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    slope = torch.special.ndtr(wide) + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
    return (gradient * slope).to(x.dtype)


def plain_swiglu(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    """As `swiglu`."""
    gate, value = x.unflatten(-1, (-1, 2, gate_rows)).unbind(-2)
    return (F.silu(gate) * value).flatten(-2)


def plain_swiglu_gradient(gradient: torch.Tensor, x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    """Gradient of x [..., 2 F], from that of `swiglu(x)` [..., F]; with s = sigmoid(gate) silu has the slope
    s (1 + gate (1 - s))."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, value = wide.unflatten(-1, (-1, 2, gate_rows)).unbind(-2)
    gradient = gradient.unflatten(-1, (-1, gate_rows))
    s = torch.sigmoid(gate)
    both = (gradient * value * s * (1.0 + gate * (1.0 - s)), gradient * gate * s)
    return torch.stack(both, dim=-2).flatten(-3).to(x.dtype)


@torch.library.custom_op("meshwright::gelu", mutates_args=())
def gelu_operator(x: torch.Tensor) -> torch.Tensor:
    kernels = pointwise_kernels(x.device)
    return plain_gelu(x) if kernels is None else kernels.gelu(x)


@torch.library.custom_op("meshwright::gelu_gradient", mutates_args=())
def _gelu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kernels = pointwise_kernels(x.device)
    return (plain_gelu_gradient if kernels is None else kernels.gelu_gradient)(gradient, x)


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def swiglu_operator(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    kernels = pointwise_kernels(x.device)
    return (plain_swiglu if kernels is None else kernels.swiglu)(x, gate_rows)


@torch.library.custom_op("meshwright::swiglu_gradient", mutates_args=())
def _swiglu_gradient(gradient: torch.Tensor, x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    kernels = pointwise_kernels(x.device)
    return (plain_swiglu_gradient if kernels is None else kernels.swiglu_gradient)(gradient, x, gate_rows)


@gelu_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@_gelu_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@swiglu_operator.register_fake
def _(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@_swiglu_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, gate_rows: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *rows = inputs
    ctx.save_for_backward(x)
    ctx.rows = rows


def _backward_of_gelu(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return _gelu_gradient(gradient, *ctx.saved_tensors)


def _backward_of_swiglu(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _swiglu_gradient(gradient, *ctx.saved_tensors, *ctx.rows), None


class _FusedSwiglu(torch.autograd.Function):
    """A compiler is as fast as memory in forward, and finds the largest number of a row, which fp8 needs, in the same kernel;
    only its gradient is slow."""

    @staticmethod
    def forward(x: torch.Tensor, gate_rows: int) -> torch.Tensor:
        return plain_swiglu(x, gate_rows)

    setup_context = staticmethod(_remember)
    backward = staticmethod(_backward_of_swiglu)


gelu_operator.register_autograd(_backward_of_gelu, setup_context=_remember)
swiglu_operator.register_autograd(_backward_of_swiglu, setup_context=_remember)
