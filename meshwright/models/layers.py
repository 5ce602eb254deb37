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
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.kernels.dropout import dropout
from meshwright.kernels.rms_norm import fork
from meshwright.models.activations import activation, gated
from meshwright.models.attention import attention
from meshwright.models.moe import MoE, Routing
from meshwright.models.rope import rotate

__all__ = ["MLP", "Attention", "Layer", "layer_keys", "make_norm"]

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
        has_gate = config.activation == "swiglu"
        self.gate_rows = math.gcd(config.ffn, 16) if has_gate else 0
        self.activation = activation(config.activation)
        self.up = nn.Linear(config.width, config.ffn * (2 if has_gate else 1), bias=config.mlp_bias, device="meta", dtype=dtype)
        self.down = nn.Linear(config.ffn, config.width, bias=config.mlp_bias, device="meta", dtype=dtype)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.up(x_BSD), self.activation, self.gate_rows))


class Layer(nn.Module):
    """Attention and feed-forward, each with its norm before (pre) or after the residual sum (post)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, causal: bool):
        super().__init__()
        self.post = config.norm_order == "post"
        self.dropout = config.dropout
        self.attention_norm = make_norm(config, config.width, dtype)
        self.attention = Attention(config, dtype, causal=causal)
        self.mlp_norm = make_norm(config, config.width, dtype)
        self.mlp = MoE(config, dtype) if config.experts else MLP(config, dtype)

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        key_BS: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Routing]:
        """key_BS: from `layer_keys`; None means no dropout of any kind. Hidden states, and of experts how they were chosen."""
        context = (cos, sin, documents_BS, cu_seqlens, key_BS)
        if self.post:
            branch = self.attention(x_BSD, *context)
            x_BSD = self.attention_norm(x_BSD + dropout(branch, key_BS, ATTENTION_SITE, self.dropout))
            branch, routing = self._feed_forward(x_BSD, documents_BS)
            x_BSD = self.mlp_norm(x_BSD + dropout(branch, key_BS, MLP_SITE, self.dropout))
            return x_BSD if routing is None else (x_BSD, routing)
        x_BSD, normed_BSD = fork(x_BSD, self.attention_norm)
        branch = self.attention(normed_BSD, *context)
        x_BSD = x_BSD + dropout(branch, key_BS, ATTENTION_SITE, self.dropout)
        x_BSD, normed_BSD = fork(x_BSD, self.mlp_norm)
        branch, routing = self._feed_forward(normed_BSD, documents_BS)
        x_BSD = x_BSD + dropout(branch, key_BS, MLP_SITE, self.dropout)
        return x_BSD if routing is None else (x_BSD, routing)

    def _feed_forward(self, x_BSD: torch.Tensor, documents_BS: torch.Tensor | None) -> tuple[torch.Tensor, Routing | None]:
        return self.mlp(x_BSD, documents_BS) if isinstance(self.mlp, MoE) else (self.mlp(x_BSD), None)
