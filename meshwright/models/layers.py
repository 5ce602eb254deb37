"""What decoder and encoder layers are made of. Single-device code: nothing here knows of ranks.

Shapes: B rows, S positions, D width, H query heads, K key/value heads, G = H/K query heads of a group, E features of a
head, F width of the feed-forward layer.

Head and feature counts are read off the weights, never off the config, so that a slice of a weight by whole groups is
a smaller layer of the same kind. No attribute differs between the layers of a model: compiled code is shared by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.kernels.dropout import dropout
from meshwright.models.attention import attention
from meshwright.models.rope import rotate

__all__ = ["MLP", "Attention", "Layer", "activation", "layer_keys", "make_norm"]

_LAYER_KEY = 0x3C6EF35F
"""Odd, so that the keys of a token differ in all layers."""
ATTENTION_SITE, MLP_SITE = 0, 1
EMBEDDING_SITE, CLASSIFIER_SITE = 2, 3


def layer_keys(key_BS: torch.Tensor | None, layer: int) -> torch.Tensor | None:
    """Dropout keys of one layer from those of the model.

    Folded in outside of the layer: a number that differs from layer to layer, as an attribute or argument, would make
    the compiler build every layer anew.
    """
    if key_BS is None:
        return None
    return key_BS + ((layer + 1) * _LAYER_KEY + 2**31) % 2**32 - 2**31


def make_norm(config: ModelConfig, width: int, dtype: torch.dtype, *, rms: bool | None = None) -> nn.Module:
    """Norm over the last dimension on meta. torch computes both kinds in at least fp32 and rounds once."""
    if config.norm == "rms" if rms is None else rms:
        return nn.RMSNorm(width, eps=config.norm_eps, device="meta", dtype=dtype)
    return nn.LayerNorm(width, eps=config.norm_eps, device="meta", dtype=dtype)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function of one tensor. gelu is exact (erf), gelu_tanh the approximation of GPT-2; swiglu gates with silu."""
    if name == "gelu_tanh":
        return _gelu_tanh
    plain: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swiglu": F.silu, "gelu": F.gelu, "relu": F.relu}
    return plain[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


class Attention(nn.Module):
    """Self-attention. The rows of `qkv` are laid out by key/value head: G*E of queries, E of keys, E of values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, causal: bool):
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.head_dim = config.head_dim or config.width // config.heads
        self.group = config.heads // kv_heads
        self.causal = causal
        self.window = config.sliding_window
        self.dropout = config.attention_dropout
        self.attend: Callable[..., torch.Tensor] = attention
        """Where positions are spread over ranks, one that sees all of them."""
        rows = (config.heads + 2 * kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.qkv_bias, device="meta", dtype=dtype)
        self.out = nn.Linear(config.heads * self.head_dim, config.width, bias=config.attention_bias, device="meta", dtype=dtype)
        self.q_norm = make_norm(config, self.head_dim, dtype, rms=True) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim, dtype, rms=True) if config.qk_norm else None

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        documents_BS: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        key_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, length, _ = x_BSD.shape
        qkv = self.qkv(x_BSD).view(batch, length, -1, self.group + 2, self.head_dim)
        q_BSKGE, k_BSK1E, v_BSK1E = qkv.split((self.group, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSKGE, k_BSK1E = self.q_norm(q_BSKGE), self.k_norm(k_BSK1E)
        if cos is not None and sin is not None:
            q_BSKGE, k_BSK1E = rotate(q_BSKGE, cos, sin), rotate(k_BSK1E, cos, sin)
        out_BSHE = self.attend(
            q_BSKGE.flatten(2, 3),
            k_BSK1E.flatten(2, 3),
            v_BSK1E.flatten(2, 3),
            causal=self.causal,
            documents=documents_BS,
            cu_seqlens=cu_seqlens,
            window=self.window,
            dropout_p=0.0 if key_BS is None else self.dropout,
        )
        return self.out(out_BSHE.reshape(batch, length, -1))


class MLP(nn.Module):
    """Feed-forward layer. With swiglu the rows of `up` alternate: `gate_rows` of the gate, as many of the value."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate_rows = math.gcd(config.ffn, 16) if gated else 0
        self.activation = activation(config.activation)
        self.up = nn.Linear(config.width, config.ffn * (2 if gated else 1), bias=config.mlp_bias, device="meta", dtype=dtype)
        self.down = nn.Linear(config.ffn, config.width, bias=config.mlp_bias, device="meta", dtype=dtype)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_BSF = self.up(x_BSD)
        if self.gate_rows:
            gate, value = x_BSF.unflatten(-1, (-1, 2, self.gate_rows)).unbind(-2)
            return self.down((self.activation(gate) * value).flatten(-2))
        return self.down(self.activation(x_BSF))


class Layer(nn.Module):
    """Attention and feed-forward, each with its norm before (pre) or after the residual sum (post)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, causal: bool):
        super().__init__()
        self.post = config.norm_order == "post"
        self.dropout = config.dropout
        self.attention_norm = make_norm(config, config.width, dtype)
        self.attention = Attention(config, dtype, causal=causal)
        self.mlp_norm = make_norm(config, config.width, dtype)
        self.mlp = MLP(config, dtype)

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        key_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """key_BS: from `layer_keys`; None means no dropout of any kind."""
        context = (cos, sin, documents_BS, cu_seqlens, key_BS)
        if self.post:
            branch = self.attention(x_BSD, *context)
            x_BSD = self.attention_norm(x_BSD + dropout(branch, key_BS, ATTENTION_SITE, self.dropout))
            return self.mlp_norm(x_BSD + dropout(self.mlp(x_BSD), key_BS, MLP_SITE, self.dropout))
        branch = self.attention(self.attention_norm(x_BSD), *context)
        x_BSD = x_BSD + dropout(branch, key_BS, ATTENTION_SITE, self.dropout)
        return x_BSD + dropout(self.mlp(self.mlp_norm(x_BSD)), key_BS, MLP_SITE, self.dropout)
