"""Activations by name, and the gate that some feed-forward layers have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwright.kernels.pointwise import gelu, swiglu

__all__ = ["activation", "gated"]


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function of one tensor. gelu is exact (erf), gelu_tanh the approximation of GPT-2; swiglu gates with silu."""
    if name == "gelu_tanh":
        return _gelu_tanh
    plain: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swiglu": F.silu, "gelu": gelu, "relu": F.relu}
    return plain[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gated(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], gate_rows: int) -> torch.Tensor:
    """[..., 2 F] -> [..., F]: features alternate, `gate_rows` of the gate, then as many of the value. 0: no gate, [..., F]."""
    if not gate_rows:
        return function(x)
    if function is F.silu:
        return swiglu(x, gate_rows)
    gate, value = x.unflatten(-1, (-1, 2, gate_rows)).unbind(-2)
    return (function(gate) * value).flatten(-2)
