"""Attention over all positions of a row whose positions are spread over a ring of ranks (arXiv:2310.01889).

A rank keeps its queries. Keys and values go round: in step s it has those of rank r - s, computes with them, and passes them on
meanwhile. In backward they go round once more, and their gradient goes with them, one step behind, until it is home. With c
ranks, B rows, P positions a rank, K key/value heads of E features, e bytes an element and g = max(e, 4) a rank sends

    forward     (c - 1) 2 B P K E e                in c - 1 messages
    backward    2 B P K E ((c - 1) e + c g)        in 2 c - 1 messages

and holds, beside its own, keys and values of two other ranks and two gradients of them. What is computed with each block:
`context_blocks`. One operator forward and one backward, so that the compiler and recompute take each as a whole.

Shapes: B rows, S = c P positions, P of them here, H query heads, K key/value heads, E features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.distributed.collectives import group_of
from meshwright.parallel.context_blocks import Blocks, Flash, Merged, Tiles, flash_suits
from meshwright.spec.context import chunks_of

__all__ = ["ring_attention"]


class _Coming:
    """What the rank before sends, while ours goes to the one behind it."""

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup):
        rank, size = group.rank(), group.size()
        self._sent, self._values = values, torch.empty_like(values)  # the former must live until it is sent
        self._works: Sequence[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, values, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._values, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._values


def _blocks(
    q_BPHE: torch.Tensor,
    k_BPKE: torch.Tensor,
    documents_BS: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    merged: Merged,
    grad_BPHE: torch.Tensor | None,
    *,
    causal: bool,
    window: int,
    scale: float,
    group: dist.ProcessGroup,
) -> Blocks:
    rank, size = group.rank(), group.size()
    length = q_BPHE.shape[1] * size
    runs = tuple(chunks_of(length, size, each, pairs=causal) for each in range(size))
    window = 0 if window >= length else window
    if flash_suits(q_BPHE, window, documents_BS, cu_seqlens):
        bounds = None if documents_BS is None else cu_seqlens
        return Flash(q_BPHE, rank, runs, merged, causal=causal, cu_seqlens=bounds, scale=scale, grad_BPHE=grad_BPHE)
    options: dict[str, Any] = {"causal": causal, "window": window, "documents": documents_BS, "scale": scale}
    return Tiles(q_BPHE, k_BPKE.shape[2], rank, runs, merged, **options, grad_BPHE=grad_BPHE)


@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale) v for the queries that are here, [B, P, H, E], and the log-sum-exp of their scores, [B, H, P] in
    at least fp32, which has no gradient.

    q [B, P, H, E], k, v [B, P, K, E]: of the positions of this rank, `chunks_of(S, ranks, rank, pairs=causal)`. documents
    [B, S], cu_seqlens: of whole rows, as in `models.attention`. window: keys a query sees, itself included; 0 for all. key: of
    the ring's group. Collective.
    """
    group = group_of(key)
    merged = Merged.over_nothing(q)
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "group": group}
    blocks = _blocks(q, k, documents, cu_seqlens, merged, None, **options)
    held, rank, size = torch.stack((k, v)), group.rank(), group.size()
    for step in range(size):
        coming = _Coming(held, group) if step < size - 1 else None
        blocks.forward(held[0], held[1], (rank - step) % size)
        if coming is not None:
            held = coming.wait()
    return merged.out.to(q.dtype, copy=True), merged.lse


@torch.library.custom_op("meshwright::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = group_of(key)
    merged = Merged(out.to(lse.dtype), lse)
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "group": group}
    blocks = _blocks(q, k, documents, cu_seqlens, merged, grad, **options)
    held, rank, size = torch.stack((k, v)), group.rank(), group.size()
    gradient: _Coming | None = None
    for step in range(size):
        coming = _Coming(held, group) if step < size - 1 else None
        part = blocks.backward(held[0], held[1], (rank - step) % size)
        if gradient is not None:
            part += gradient.wait()
        gradient = _Coming(part, group)
        if coming is not None:
            held = coming.wait()
    assert gradient is not None and blocks.dq_BPHE is not None  # there is at least one step, and it has a gradient
    dk, dv = gradient.wait()
    return blocks.dq_BPHE.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


@ring_attention.register_fake
def _(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@_ring_attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, documents, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, documents, cu_seqlens)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (*_ring_attention_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6)


ring_attention.register_autograd(_backward, setup_context=_remember)
