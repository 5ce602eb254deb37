"""What lies between the matrices of a layer when nothing is trained. On an accelerator each function here is one kernel
(`kernels.fused_triton`); the plain versions compute it on a CPU, and are the oracles of the kernels.

Shapes: T tokens, D width, H = K G query heads, K key/value heads, G query heads of each, E features of a head, P pages of N
tokens, F width of a feed-forward layer, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.kernels.accelerated import fused_kernels
from meshwright.kernels.rowwise import E4M3, Rounded, rounded, to_e4m3

__all__ = [
    "GATES",
    "Heads",
    "add_norm",
    "add_norm_rounded",
    "best",
    "gate",
    "gate_rounded",
    "plain_add_norm",
    "plain_best",
    "plain_gate",
    "plain_turn_and_write",
    "turn_and_write",
]

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""By the names of `models.activations`."""


class Heads(NamedTuple):
    """How the result of a query-key-value matrix is to be read, and what is done to its heads.

    group           query heads of a key/value head: [T, K, G + 2, E], queries, then a key, then a value
    q_norm, k_norm  RMS norms over the features of each query and key; None: none
    cos, sin        [T, E/2] of the angles of each token, at least fp32; None: nothing turns
    """

    group: int
    q_norm: nn.RMSNorm | None = None
    k_norm: nn.RMSNorm | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None


def turn_and_write(
    qkv: torch.Tensor, heads: Heads, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Queries [T, H, E] of qkv [T, K (G + 2) E], normed and turned; keys, turned alike, and values into the pages [P, N, K, E],
    of the same dtype or e4m3, at slots int64 [T] (page * N + place), in place."""
    kernels = fused_kernels(qkv.device)
    return (plain_turn_and_write if kernels is None else kernels.turn_and_write)(qkv, heads, keys, values, slots)


def plain_turn_and_write(
    qkv: torch.Tensor, heads: Heads, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    parts = qkv.view(qkv.shape[0], keys.shape[2], heads.group + 2, keys.shape[3])
    q, k, v = parts.split((heads.group, 1, 1), dim=2)
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = heads.q_norm(q), heads.k_norm(k)
    if heads.cos is not None and heads.sin is not None:
        q, k = (_turned(x, heads.cos[:, None, None], heads.sin[:, None, None]) for x in (q, k))
    _write(keys, k[:, :, 0], slots)
    _write(values, v[:, :, 0], slots)
    return q.flatten(1, 2)


def _write(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    if pool.dtype == E4M3:  # which torch copies as bytes only
        pool, rows = pool.view(torch.uint8), to_e4m3(rows).view(torch.uint8)
    pool.flatten(0, 1).index_copy_(0, slots, rows)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `models.rope.rotate`: feature e turns with e + E/2, in the dtype of the angles."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def add_norm(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """x + branch (x where there is none) and the norm of it, [..., D] each. norm: RMSNorm or LayerNorm over D."""
    kernels = fused_kernels(x.device)
    return (plain_add_norm if kernels is None else kernels.add_norm)(x, branch, norm)


def add_norm_rounded(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, Rounded]:
    """`add_norm`, and `rowwise.rounded` of the norm: the same bits."""
    kernels = fused_kernels(x.device)
    if kernels is not None:
        return kernels.add_norm_rounded(x, branch, norm)
    total, y = plain_add_norm(x, branch, norm)
    return total, rounded(y)


def plain_add_norm(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if branch is None else x + branch
    return total, norm(total)


def gate(x: torch.Tensor, name: str, gate_rows: int) -> torch.Tensor:
    """[..., 2 F] -> [..., F]: features alternate, `gate_rows` of the gate, then as many of the value, as in
    `models.activations.gated`. 0: no gate, [..., F]. name: of GATES."""
    kernels = fused_kernels(x.device) if gate_rows else None  # one kernel of torch does without
    return (plain_gate if kernels is None else kernels.gate)(x, name, gate_rows)


def gate_rounded(x: torch.Tensor, name: str, gate_rows: int) -> Rounded:
    """`rowwise.rounded` of `gate`: the same bits."""
    kernels = fused_kernels(x.device) if gate_rows else None
    return rounded(plain_gate(x, name, gate_rows)) if kernels is None else kernels.gate_rounded(x, name, gate_rows)


def plain_gate(x: torch.Tensor, name: str, gate_rows: int) -> torch.Tensor:
    if not gate_rows:
        return GATES[name](x)
    first, value = x.unflatten(-1, (-1, 2, gate_rows)).unbind(-2)
    return (GATES[name](first) * value).flatten(-2)


def best(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Of logits [R, V] int64 [2, R]: the index of the largest (the first of equals), and 1 where that logit is no finite
    number, in which case the index means nothing. out: where it goes."""
    kernels = fused_kernels(logits.device)
    if out is None:
        out = torch.empty(2, logits.shape[0], dtype=torch.int64, device=logits.device)
    (plain_best if kernels is None else kernels.best)(logits, out)
    return out


def plain_best(logits: torch.Tensor, out: torch.Tensor) -> None:
    values, tokens = logits.max(1)
    out[0], out[1] = tokens, values.isfinite().logical_not()
