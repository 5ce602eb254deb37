"""Attention of some queries over some keys of the same rows, and its backward: what a ring adds up, block by block.

With a log-sum-exp L of the scores of each query beside a result, results over two sets of keys make the result over both:

    L = log(exp(L1) + exp(L2)),    out = exp(L1 - L) out1 + exp(L2 - L) out2

and the gradient is a sum over sets of keys once L and out of all of them are known (FlashAttention, arXiv:2205.14135, 3.1).

`Tiles` does it with matrix products in at least fp32, a bounded tile of scores at a time, under any mask; `Flash` by the
accelerator's kernel, whole rows or documents, without a window.

Shapes: B rows, P positions of this rank, H query heads, K key/value heads, G = H/K, E features of a head; n queries and m keys
of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.compat import flash_backward, flash_forward

__all__ = ["Blocks", "Flash", "Merged", "Runs", "Tiles", "flash_suits"]

TILE = {"cpu": 2**20}
TILE_ACCELERATOR = 2**27
"""Scores of a tile. On a CPU near its last cache."""
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_DIM = 256

Runs = tuple[tuple[int, int], ...]
"""(start in the row, size) of the runs of positions that a rank has, in rising order: `spec.context.chunks_of`."""


class Blocks(Protocol):
    """Adds up over key blocks. source: number of the rank whose keys they are."""

    dq_BPHE: torch.Tensor | None
    """Gradient of the queries so far, for backward."""

    def forward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> None: ...

    def backward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> torch.Tensor:
        """Adds to the gradient of the queries; returns that of these keys and values, [2, B, P, K, E] in at least fp32."""
        ...


@dataclass
class Merged:
    """The result over all keys so far: out [B, P, H, E], lse [B, H, P], in at least fp32."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def over_nothing(cls, q_BPHE: torch.Tensor) -> Merged:
        batch, length, heads, _ = q_BPHE.shape
        wide = torch.promote_types(q_BPHE.dtype, torch.float32)
        out = torch.zeros(q_BPHE.shape, dtype=wide, device=q_BPHE.device)
        return cls(out, torch.full((batch, heads, length), -math.inf, dtype=wide, device=q_BPHE.device))

    def add(self, start: int, out_BnHE: torch.Tensor, lse_BHn: torch.Tensor) -> None:
        """Queries [start, start + n) over some more keys; -inf for one that sees none of them."""
        mine = self.lse.narrow(2, start, lse_BHn.shape[2])
        both = torch.logaddexp(mine, lse_BHn)
        base = both.masked_fill(both == -math.inf, 0.0)
        keep, take = ((part - base).exp().transpose(1, 2)[..., None] for part in (mine, lse_BHn))
        out = self.out.narrow(1, start, out_BnHE.shape[1])
        out.mul_(keep).add_(out_BnHE * take)
        mine.copy_(both)


@dataclass(frozen=True)
class _Tile:
    """queries, keys: (first on the rank, first in the row, count). masked: whether some pair may be hidden."""

    queries: tuple[int, int, int]
    keys: tuple[int, int, int]
    masked: bool


class Tiles:
    """runs: of every rank. merged: of forward, to be continued, or whole for backward. grad_BPHE: of the result, for
    backward."""

    def __init__(
        self,
        q_BPHE: torch.Tensor,
        kv_heads: int,
        rank: int,
        runs: tuple[Runs, ...],
        merged: Merged,
        *,
        causal: bool,
        window: int,
        documents: torch.Tensor | None,
        scale: float,
        grad_BPHE: torch.Tensor | None = None,
    ):
        self.merged, self.runs, self.rank = merged, runs, rank
        self.causal, self.window, self.scale, self.kv_heads = causal, window, scale, kv_heads
        self.wide = merged.out.dtype
        self.least = 0 if causal else 1 - window if window else -(2**62)
        """A query sees keys that it is at least so far ahead of."""
        self.q = self._grouped(q_BPHE.to(self.wide) * scale)
        self.documents = documents
        self.rising = None if documents is None else documents.masked_fill(documents < 0, torch.iinfo(documents.dtype).max)
        """As `documents`, but never falling over a row."""
        self.dq_BPHE = torch.zeros_like(merged.out) if grad_BPHE is not None else None
        if grad_BPHE is not None:
            grad = grad_BPHE.to(self.wide)
            self.grad = self._grouped(grad)
            self.delta = (grad * merged.out).sum(-1).transpose(1, 2).unflatten(1, (kv_heads, -1))  # [B, K, G, P]
            self.lse = merged.lse.unflatten(1, (kv_heads, -1))

    def _grouped(self, x_BPHE: torch.Tensor) -> torch.Tensor:
        """[B, K, G, P, E]"""
        return x_BPHE.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)

    def forward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> None:
        k, v = (t.to(self.wide).transpose(1, 2) for t in (k_BPKE, v_BPKE))
        for tile in self._tiles(source):
            scores_BKGnm = self._scores(tile, k)
            top = scores_BKGnm.amax(-1, keepdim=True)
            top = top.masked_fill_(top == -math.inf, 0.0)
            weights = scores_BKGnm.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            out = weights.flatten(2, 3) @ self._keys(tile, v)
            out = out.view(*weights.shape[:-1], -1) / total.masked_fill(total == 0, 1.0)
            lse = (top + total.log())[..., 0].flatten(1, 2)
            self.merged.add(tile.queries[0], out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse)

    def backward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> torch.Tensor:
        assert self.dq_BPHE is not None  # made with a gradient
        grads = torch.zeros((2, *k_BPKE.shape), dtype=self.wide, device=k_BPKE.device)
        dk, dv = grads.transpose(2, 3)  # [B, K, P, E]
        k, v = (t.to(self.wide).transpose(1, 2) for t in (k_BPKE, v_BPKE))
        dq = self._grouped(self.dq_BPHE)
        for tile in self._tiles(source):
            first, _, count = tile.queries
            lse, delta = (t.narrow(3, first, count)[..., None] for t in (self.lse, self.delta))
            weights = self._scores(tile, k).sub_(lse).exp_()
            q, grad = (t.narrow(3, first, count).flatten(2, 3) for t in (self.q, self.grad))
            values = self._keys(tile, v)
            self._keys(tile, dv).add_(weights.flatten(2, 3).transpose(2, 3) @ grad)
            scores = (grad @ values.transpose(2, 3)).view_as(weights).sub_(delta).mul_(weights).flatten(2, 3)
            self._keys(tile, dk).add_(scores.transpose(2, 3) @ q)
            part = dq.narrow(3, first, count)
            part.add_((scores @ self._keys(tile, k)).view_as(part), alpha=self.scale)
        return grads

    def _keys(self, tile: _Tile, x_BKPE: torch.Tensor) -> torch.Tensor:
        return x_BKPE.narrow(2, tile.keys[0], tile.keys[2])

    def _scores(self, tile: _Tile, k_BKPE: torch.Tensor) -> torch.Tensor:
        """[B, K, G, n, m], -inf where a query does not see a key."""
        q = self.q.narrow(3, tile.queries[0], tile.queries[2])
        scores = (q.flatten(2, 3) @ self._keys(tile, k_BKPE).transpose(2, 3)).view(*q.shape[:-1], -1)
        return scores.masked_fill_(self._hidden(tile), -math.inf) if tile.masked else scores

    def _hidden(self, tile: _Tile) -> torch.Tensor:
        """bool [B or 1, 1, 1, n, m]"""
        (_, query, n), (_, key, m) = tile.queries, tile.keys
        device = self.q.device
        ahead_nm = torch.arange(query, query + n, device=device)[:, None] - torch.arange(key, key + m, device=device)
        hidden = ahead_nm < self.least
        if self.window:
            hidden = hidden | (ahead_nm >= self.window)
        if self.documents is None:
            return hidden[None, None, None]
        of_queries, of_keys = self.documents[:, query : query + n, None], self.documents[:, None, key : key + m]
        return (hidden | (of_queries != of_keys))[:, None, None]

    def _tiles(self, source: int) -> Iterator[_Tile]:
        """Those with a pair that is seen, as far as the host knows."""
        batch, kv_heads, group, _, _ = self.q.shape
        most = TILE.get(self.q.device.type, TILE_ACCELERATOR) // max(1, batch * kv_heads * group)
        side = max(16, math.isqrt(most))
        for queries in _cut(self.runs[self.rank], side):
            for keys in _cut(self.runs[source], max(side, most // queries[2])):
                seen = self._seen(queries, keys)
                if seen:
                    yield _Tile(queries, keys, seen < 0)

    def _seen(self, queries: tuple[int, int, int], keys: tuple[int, int, int]) -> int:
        """0: no query sees a key. 1: every one sees all. -1: it must be looked at."""
        (_, query, n), (_, key, m) = queries, keys
        least, most = query - (key + m - 1), query + n - 1 - key  # how far a query is ahead of a key
        if most < self.least or (self.window and least >= self.window):
            return 0
        whole = least >= self.least and (not self.window or most < self.window)
        if self.rising is None:
            return 1 if whole else -1
        if self.rising.device.type == "cpu":  # elsewhere to look would be to wait
            of_queries, of_keys = self.rising[:, query : query + n], self.rising[:, key : key + m]
            if bool(((of_queries[:, -1] < of_keys[:, 0]) | (of_keys[:, -1] < of_queries[:, 0])).all()):
                return 0
        return -1


def _cut(runs: Runs, most: int) -> Iterator[tuple[int, int, int]]:
    """(first on the rank, first in the row, count) of pieces of at most `most` positions."""
    here = 0
    for start, size in runs:
        for first in range(0, size, most):
            yield here + first, start + first, min(most, size - first)
        here += size


def flash_suits(q_BPHE: torch.Tensor, window: int, documents: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether `Flash` can do it."""
    head_dim = q_BPHE.shape[-1]
    return (
        q_BPHE.device.type == "cuda"
        and q_BPHE.dtype in _FLASH_DTYPES
        and head_dim % 8 == 0
        and head_dim <= _FLASH_HEAD_DIM
        and not window
        and (documents is None or cu_seqlens is not None)
    )


class Flash:
    """Variable-length flash attention, one call a block. A document's positions on a rank lie together, since a rank's runs
    rise, so its queries and keys are two runs; and a block is causal with itself, or its queries come after its keys.

    cu_seqlens: boundaries of documents over the flattened tokens; None: a row is one.
    """

    def __init__(
        self,
        q_BPHE: torch.Tensor,
        rank: int,
        runs: tuple[Runs, ...],
        merged: Merged,
        *,
        causal: bool,
        cu_seqlens: torch.Tensor | None,
        scale: float,
        grad_BPHE: torch.Tensor | None = None,
    ):
        self.q, self.merged, self.runs, self.rank = q_BPHE, merged, runs, rank
        self.causal, self.scale = causal, scale
        self.batch, self.share = q_BPHE.shape[:2]
        self.length = self.share * len(runs)
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, (self.batch + 1) * self.length, self.length, device=q_BPHE.device)
        self.row, self.offset = cu_seqlens.long() // self.length, cu_seqlens.long() % self.length
        self.dq_BPHE = torch.zeros_like(merged.out) if grad_BPHE is not None else None
        if grad_BPHE is not None:
            self.grad, self.out = grad_BPHE.to(q_BPHE.dtype), merged.out.to(q_BPHE.dtype)

    def forward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> None:
        (first, n), (_, m), arguments = self._block(source)
        q, k, v = _flat(self.q, first, n), _flat(k_BPKE, 0, m), _flat(v_BPKE, 0, m)
        out, lse_HT = flash_forward(q, k, v, *arguments, source == self.rank and self.causal, self.scale)
        lse = lse_HT.view(-1, self.batch, n).transpose(0, 1)
        lse = lse.masked_fill(lse == math.inf, -math.inf)
        self.merged.add(first, out.view(self.batch, n, *out.shape[1:]), lse)

    def backward(self, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, source: int) -> torch.Tensor:
        assert self.dq_BPHE is not None  # made with a gradient
        (first, n), (_, m), arguments = self._block(source)
        lse_HT = self.merged.lse.narrow(2, first, n).transpose(0, 1).flatten(1, 2).contiguous()
        grad, q, out = (_flat(t, first, n) for t in (self.grad, self.q, self.out))
        k, v = _flat(k_BPKE, 0, m), _flat(v_BPKE, 0, m)
        causal = source == self.rank and self.causal
        parts = flash_backward(grad, q, k, v, out, lse_HT, *arguments, causal, self.scale)
        dq, dk, dv = (part.view(self.batch, -1, *part.shape[1:]) for part in parts)
        self.dq_BPHE.narrow(1, first, n).add_(dq)
        grads = torch.zeros((2, *k_BPKE.shape), dtype=self.merged.out.dtype, device=k_BPKE.device)
        grads[0, :, :m].copy_(dk)
        grads[1, :, :m].copy_(dv)
        return grads

    def _block(
        self, source: int
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]:
        """(first, count) of the queries and of the keys between which anything can be seen, and the kernel's boundaries."""
        mine, theirs = self.runs[self.rank], self.runs[source]
        if self.causal and source < self.rank:  # all queries come after the first run of keys, and before the second
            theirs = theirs[:1]
        elif self.causal and source > self.rank:  # only the second run of queries comes after keys: after all of them
            mine = mine[1:]
        n, m = (sum(size for _, size in runs) for runs in (mine, theirs))
        return (self.share - n, n), (0, m), (self._bounds(mine), self._bounds(theirs), (n, m))

    def _bounds(self, runs: Runs) -> torch.Tensor:
        """Boundaries of documents among the positions of these runs, int32 [N+1]."""
        before = sum((self.offset - start).clamp(0, size) for start, size in runs)
        return (self.row * sum(size for _, size in runs) + before).to(torch.int32)


def _flat(x_BPHE: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """[B * count, H, E]"""
    return x_BPHE.narrow(1, first, count).flatten(0, 1)
