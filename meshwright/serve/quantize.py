"""Weights of serving in 8 bits: the matrices of every layer, each row with a scale of its own (`kernels.rowwise`).

Embedding, output matrix, norms, biases and routers stay as they are, and so do the matrices of experts, which no kernel here
multiplies in 8 bits. A matrix that ranks share is rounded as each of them holds it: split by its columns, its rows then have a
scale on each rank.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.kernels.rowwise import E4M3, ScaledLinear
from meshwright.models.layers import MLP, Layer
from meshwright.models.trunk import Trunk
from meshwright.parallel.tensor import RowParallel, SplitQKV

__all__ = ["KV_DTYPES", "QUANTIZATIONS", "cache_dtype", "quantize_matrices"]

QUANTIZATIONS = ("fp8",)
KV_DTYPES = {"fp8": E4M3}
"""Dtypes of a cache that is not of the weights' own. Keys and values have no scale: e4m3 reaches from 2**-9 to 448, and what a
norm and a matrix leave lies in between."""


def cache_dtype(name: str | None) -> torch.dtype | None:
    """None: that of the weights."""
    return None if name is None else KV_DTYPES[name]


def quantize_matrices(model: Trunk, device: torch.device) -> Trunk:
    """The matrices of all layers that are here, in place, one after the other on `device`, and all else there too: at no time
    more than one of them is on it at its full size."""
    for layer in model.layers:
        if isinstance(layer, Layer):
            owners: list[tuple[nn.Module, str]] = [(layer.attention, "qkv"), (layer.attention, "out")]
            owners += [(layer.mlp, "up"), (layer.mlp, "down")] if isinstance(layer.mlp, MLP) else []
            for owner, name in owners:
                setattr(owner, name, _scaled(getattr(owner, name), device))
    return model.to(device)


class _Summed(nn.Module):
    """As `parallel.tensor.RowParallel`, whose bias is added once."""

    def __init__(self, module: RowParallel, device: torch.device):
        super().__init__()
        self.matrix = ScaledLinear(module.weight.to(device), None)
        self.bias, self.axis = module.bias, module.axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.axis.leave(self.matrix(x))
        return y if self.bias is None else y + self.bias


def _scaled(module: nn.Module, device: torch.device) -> nn.Module:
    if isinstance(module, RowParallel):
        return _Summed(module, device)
    if isinstance(module, SplitQKV):
        weight: torch.Tensor = torch.cat((module.q_weight, module.kv_weight))
        bias: torch.Tensor | None = None
        if module.q_bias is not None and module.kv_bias is not None:
            bias = torch.cat((module.q_bias, module.kv_bias))
    else:
        assert isinstance(module, nn.Linear)
        weight, bias = module.weight, module.bias
    return ScaledLinear(weight.to(device), None if bias is None else bias.to(device))
