"""The global gradient norm, the overflow flag, and digests: numbers on which all ranks must agree.

Each works on what a rank holds and is then reduced over the axes on which ranks hold *distinct* pieces (norm) or over
every axis (flags, digests), so that every logical element counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.distributed.reduce import gather_json
from meshwright.parallel.buffers import master_dtype

__all__ = ["agree_any", "agree_least", "clip_coefficient", "differing", "digest", "reduce_sum", "square_norm"]

CHUNK = 1 << 15
"""Elements summed in one run before the partial sums are: keeps fp32 rounding near 1e-7 for any size."""


def square_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a tensor: 0-d, in at least fp32, the same bits every time for the same values.

    Squares are summed over chunks of CHUNK elements, then the partial sums are summed, without a copy of the input.
    """
    flat = values.detach().reshape(-1)
    dtype = master_dtype(flat.dtype)
    whole = flat.numel() // CHUNK * CHUNK
    parts = [flat[:whole].view(-1, CHUNK)] if whole else []
    parts += [flat[whole:].view(1, -1)] if whole < flat.numel() else []
    if not parts:
        return torch.zeros((), dtype=dtype, device=flat.device)
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts])
    return norms.square().sum()


def reduce_sum(value: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Sum of a 0-d value over the groups in turn, in place; every rank ends with the same bits."""
    for group in groups:
        dist.all_reduce(value, group=group)
    return value


def clip_coefficient(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """min(1, clip / (norm + 1e-6)), 0-d on the device; 1 where `clip` is 0 (off)."""
    if clip == 0:
        return torch.ones_like(norm)
    return (clip / (norm + 1e-6)).clamp(max=1.0)


def agree_any(flag: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Logical or of a 0-d bool over every rank of the groups."""
    groups = tuple(groups)
    if not groups:
        return flag
    number = flag.to(torch.float32)
    for group in groups:
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return number > 0


def agree_least(mine: list[Any] | None, groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[Any] | None:
    """Least of the JSON lists that the ranks bring; None when no rank has one. Ranks may hold different things: what is
    agreed on is a value, not a place in a list of their own."""
    for group in groups:
        mine = min((other for other in gather_json(mine, group, device) if other is not None), default=None)
    return mine


DIGEST_BLOCK = 1 << 24
"""Elements digested at a time: their int64 copies stay small."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: torch.Tensor) -> torch.Tensor:
    """int64 [2] over the bits of a tensor: their sum and their sum weighted by position, both modulo 2^64.

    Any single changed element changes the first, a swap of two unequal elements the second.
    """
    bits = values.detach().reshape(-1).view(_INTEGERS[values.dtype.itemsize])
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), DIGEST_BLOCK):
        part = bits[start : start + DIGEST_BLOCK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=bits.device)
        total += torch.stack([part.sum(), (part * place).sum()])
    return total


def differing(digests: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> int | None:
    """First row of int64 [N, 2] that is not the same on every rank of the groups; the same answer on every rank."""
    low, high = digests.clone(), digests.clone()
    for group in groups:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    rows = (low != high).any(dim=1).nonzero()
    return int(rows[0, 0]) if rows.numel() else None
