"""Attention of new tokens over keys and values that lie in pages. On a CPU it is gather + `scaled_dot_product_attention`, which
is also the oracle of the kernel that does it elsewhere (`kernels.paged_triton`).

Shapes: T new tokens of R sequences, H query heads, K key/value heads, E features of a head, P pages of N tokens, M most pages
of a sequence, C most tokens of a sequence (M N).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.kernels.accelerated import paged_kernels

__all__ = ["QUERIES", "SPAN", "Pages", "Rows", "Singles", "gathered_attention", "paged_attention", "row_numbers"]

SPAN = 512
"""Keys of a sequence with one new token that a program of the kernel has at least. More keep a device busier that has many such
sequences; of a few, they leave most of it idle."""
QUERIES = 16
"""Queries of a sequence with more than one new token that a program of the kernel has."""


class Rows(NamedTuple):
    """What a kernel asks of the sequences of a step, in int32.

    starts, counts, lengths  [R]
    single, single_tokens    [D, 2] and [D]: (row, 0) of the sequences with one new token, and where that is
    blocks                   [B, 2]: (row, first query) of QUERIES queries each, of the others
    """

    starts: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    single: torch.Tensor
    single_tokens: torch.Tensor
    blocks: torch.Tensor


def row_numbers(counts: Sequence[int], lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The fields of `Rows` on the host."""
    starts = [0, *itertools.accumulate(counts)]
    single = [row for row, count in enumerate(counts) if count == 1]
    blocks = [(row, q) for row, count in enumerate(counts) if count > 1 for q in range(0, count, QUERIES)]
    return (
        np.array(starts[:-1], np.int32),
        np.array(counts, np.int32),
        np.array(lengths, np.int32),
        np.array([(row, 0) for row in single], np.int32).reshape(-1, 2),
        np.array([starts[row] for row in single], np.int32),
        np.array(blocks, np.int32).reshape(-1, 2),
    )


class Marks:
    """How many programs of a kernel are through with a sequence and a key/value head: zeros before and after each call, so one
    tensor serves all layers of a step."""

    def __init__(self) -> None:
        self._zeros: torch.Tensor | None = None

    def of(self, rows: int, kv_heads: int, device: torch.device) -> torch.Tensor:
        """int32 [rows * kv_heads]."""
        if self._zeros is None or self._zeros.shape[0] < rows * kv_heads:
            self._zeros = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        return self._zeros


@dataclass(frozen=True)
class Pages:
    """Which tokens are new in a step, and where those before them lie. The new ones of a sequence are its last ones.

    slots    int64 [T]: page * N + place in the page, where the keys and values of each new token go
    tables   int32 or int64 [R, M]: pages of each sequence, in order; what is behind the last one may be anything valid
    counts   new tokens of each sequence, in the order of the T tokens. On the host: shapes depend on them
    lengths  tokens of each sequence, the new ones included. On the host
    rows     of `row_numbers`, on the device, for all layers of a step; None: sent when a kernel asks for them
    span     as SPAN; the order of a kernel's sums depends on it
    marks    of a kernel
    """

    slots: torch.Tensor
    tables: torch.Tensor
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: Rows | None = None
    span: int = SPAN
    marks: Marks = field(default_factory=Marks)

    @cached_property
    def starts(self) -> list[int]:
        """Where the new tokens of each sequence begin, and of all end."""
        return [0, *itertools.accumulate(self.counts)]

    @cached_property
    def single(self) -> list[int]:
        """Sequences with one new token."""
        return [row for row, count in enumerate(self.counts) if count == 1]

    @cached_property
    def on_device(self) -> Rows:
        """What a kernel asks of the sequences."""
        if self.rows is not None:
            return self.rows
        numbers = row_numbers(self.counts, self.lengths)
        return Rows(*(torch.from_numpy(part).to(self.slots.device, non_blocking=True) for part in numbers))

    @property
    def longest_single(self) -> int:
        """Tokens of the longest sequence with one new token."""
        return max(self.lengths[row] for row in self.single)


@dataclass(frozen=True)
class Singles:
    """One new token of each sequence, the last one, as `Pages`, but how long a sequence is only the device knows: what is
    launched depends on the shapes here and on nothing else.

    slots int64 [R]. tables int32 or int64 [R, M]. lengths int32 [R], from 1 to M N. span: as of `Pages`
    """

    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    span: int = SPAN
    marks: Marks = field(default_factory=Marks)


def paged_attention(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages | Singles,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v over the pages of each sequence, causal, [T, H, E].

    keys, values  [P, N, K, E], of the dtype of q or e4m3; those of the new tokens are in them already
    window        keys a query sees, itself included. scale: default 1/sqrt(E)
    """
    kernels = paged_kernels(q_THE.device)
    attend = gathered_attention if kernels is None else kernels.paged_attention
    return attend(q_THE, keys, values, pages, window=window, scale=scale)


def gathered_attention(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages | Singles,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What `paged_attention` computes, on any device.

    Sequences with one new token go together, others one by one: padding them to each other would cost more.
    """
    if isinstance(pages, Singles):
        most = pages.tables.shape[1] * keys.shape[1]
        return _alike(q_THE[:, None], keys, values, pages.tables, pages.lengths[:, None], most, window, scale)[:, 0]
    out_THE = torch.empty_like(q_THE)
    starts = pages.starts
    groups = [pages.single] if pages.single else []
    groups += [[row] for row, count in enumerate(pages.counts) if count > 1]
    for rows in groups:
        count = pages.counts[rows[0]]
        longest = max(pages.lengths[row] for row in rows)
        at = torch.tensor([starts[row] for row in rows], device=q_THE.device)
        index_RQ = at[:, None] + torch.arange(count, device=q_THE.device)
        table_RM = pages.tables[torch.tensor(rows, device=q_THE.device), : -(-longest // keys.shape[1])]
        lengths_R1 = torch.tensor([[pages.lengths[row]] for row in rows], device=q_THE.device)
        out_THE[index_RQ] = _alike(q_THE[index_RQ], keys, values, table_RM, lengths_R1, longest, window, scale)
    return out_THE


def _alike(
    q_RQHE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_RM: torch.Tensor,
    lengths_R1: torch.Tensor,
    longest: int,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Of sequences with as many new tokens each, [R, Q, H, E]; none is longer than `longest`."""
    count, device = q_RQHE.shape[1], q_RQHE.device
    k_RCKE, v_RCKE = (_gathered(pool, table_RM).flatten(1, 2)[:, :longest].to(q_RQHE.dtype) for pool in (keys, values))
    query_RQ1 = (lengths_R1 - count + torch.arange(count, device=device))[..., None]
    key_C = torch.arange(longest, device=device)
    nobodys_RC = key_C >= lengths_R1
    for gathered in (k_RCKE, v_RCKE):  # what lies there may be no number, and stays none when it is multiplied by 0
        gathered.masked_fill_(nobodys_RC[..., None, None], 0.0)
    seen_RQC = key_C <= query_RQ1
    if window is not None:
        seen_RQC = seen_RQC & (query_RQ1 - key_C < window)
    out_RHQE = F.scaled_dot_product_attention(
        q_RQHE.transpose(1, 2),
        k_RCKE.transpose(1, 2),
        v_RCKE.transpose(1, 2),
        attn_mask=seen_RQC[:, None],
        scale=scale,
        enable_gqa=q_RQHE.shape[2] != keys.shape[2],
    )
    return out_RHQE.transpose(1, 2)


def _gathered(pool: torch.Tensor, table_RM: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits are gathered as bytes: torch does not index all of their dtypes."""
    return pool.view(torch.uint8)[table_RM].view(pool.dtype) if pool.element_size() == 1 else pool[table_RM]
