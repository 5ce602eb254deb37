"""Attention of new tokens over keys and values that lie in pages. On a CPU it is gather + `scaled_dot_product_attention`, which
is also the oracle of the kernel that does it elsewhere (`kernels.paged_triton`).

Shapes: T new tokens of R sequences, H query heads, K key/value heads, E features of a head, P pages of N tokens, M most pages
of a sequence, C most tokens of a sequence (M N).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from meshwright.kernels.accelerated import paged_kernel

__all__ = ["QUERIES", "Pages", "Rows", "gathered_attention", "paged_attention", "write_pages"]

QUERIES = 16
"""Queries of a sequence with more than one new token that a program of the kernel has."""


@dataclass(frozen=True)
class Pages:
    """Which tokens are new in a step, and where those before them lie. The new ones of a sequence are its last ones.

    slots    int64 [T]: page * N + place in the page, where the keys and values of each new token go
    tables   int64 [R, M]: pages of each sequence, in order; what is behind the last one may be anything valid
    counts   new tokens of each sequence, in the order of the T tokens. On the host: shapes depend on them
    lengths  tokens of each sequence, the new ones included. On the host
    """

    slots: torch.Tensor
    tables: torch.Tensor
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

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
        """What a kernel asks of the sequences; made once a step, for all layers."""
        starts, single = self.starts, self.single
        blocks = [(row, q) for row, count in enumerate(self.counts) if count > 1 for q in range(0, count, QUERIES)]

        def sent(values: list[Any], *shape: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).view(*shape).to(self.slots.device, non_blocking=True)

        return Rows(
            sent(starts[:-1], -1),
            sent(list(self.counts), -1),
            sent(list(self.lengths), -1),
            sent([(row, 0) for row in single], -1, 2),
            sent([starts[row] for row in single], -1).long(),
            sent(blocks, -1, 2),
        )


class Rows(NamedTuple):
    """starts, counts, lengths: int32 [R]. single: (row, 0) of those with one new token, single_tokens: where that is. blocks:
    (row, first query) of QUERIES queries each, of the others."""

    starts: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    single: torch.Tensor
    single_tokens: torch.Tensor
    blocks: torch.Tensor


def write_pages(k_TKE: torch.Tensor, v_TKE: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Pages) -> None:
    """Keys and values of the new tokens into the pages, [P, N, K, E] each, in place."""
    keys.flatten(0, 1).index_copy_(0, pages.slots, k_TKE)
    values.flatten(0, 1).index_copy_(0, pages.slots, v_TKE)


def paged_attention(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v over the pages of each sequence, causal, [T, H, E].

    keys, values  [P, N, K, E]; those of the new tokens are in them already
    window        keys a query sees, itself included. scale: default 1/sqrt(E)
    """
    kernel = paged_kernel(q_THE.device)
    attend = gathered_attention if kernel is None else kernel
    return attend(q_THE, keys, values, pages, window=window, scale=scale)


def gathered_attention(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What `paged_attention` computes, on any device.

    Sequences with one new token go together, others one by one: padding them to each other would cost more.
    """
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
        k_RCKE, v_RCKE = (pool[table_RM].flatten(1, 2)[:, :longest] for pool in (keys, values))
        lengths = torch.tensor([pages.lengths[row] for row in rows], device=q_THE.device)
        query_RQ1 = (lengths[:, None] - count + torch.arange(count, device=q_THE.device))[..., None]
        key_C = torch.arange(longest, device=q_THE.device)
        nobodys_RC = key_C >= lengths[:, None]
        for gathered in (k_RCKE, v_RCKE):  # what lies there may be no number, and stays none when it is multiplied by 0
            gathered.masked_fill_(nobodys_RC[..., None, None], 0.0)
        seen_RQC = key_C <= query_RQ1
        if window is not None:
            seen_RQC = seen_RQC & (query_RQ1 - key_C < window)
        out_RHQE = F.scaled_dot_product_attention(
            q_THE[index_RQ].transpose(1, 2),
            k_RCKE.transpose(1, 2),
            v_RCKE.transpose(1, 2),
            attn_mask=seen_RQC[:, None],
            scale=scale,
            enable_gqa=q_THE.shape[1] != keys.shape[2],
        )
        out_THE[index_RQ] = out_RHQE.transpose(1, 2)
    return out_THE
