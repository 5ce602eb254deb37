"""What a rank brings to a checkpoint, and who writes which part of it.

Every rank declares the blocks it holds; `share` turns the declarations of all ranks into one plan in which each logical
element is written exactly once and the bytes are spread evenly over the ranks that could write them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.checkpoint.manifest import ITEM_BYTES, first_overlap
from meshwright.distributed.piece import Piece, flat_pieces
from meshwright.errors import Finding
from meshwright.spec.box import Box

__all__ = ["DTYPES", "Geometry", "Piece", "Share", "SharePlan", "flat_pieces", "geometry", "share"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Torch dtype -> its name in a safetensors file."""


@dataclass(frozen=True)
class Geometry:
    """A piece without its data: what ranks tell each other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    owner: bool

    def to_json(self) -> list[object]:
        return [self.name, self.dtype, self.shape, self.box.offset, self.box.shape, self.owner]

    @classmethod
    def from_json(cls, data: list) -> Geometry:
        name, dtype, shape, offset, extent, owner = data
        return cls(name, dtype, tuple(shape), Box(tuple(offset), tuple(extent)), owner)


def geometry(pieces: Iterable[Piece]) -> tuple[list[Geometry], list[Finding]]:
    """Geometry of this rank's pieces, and what is wrong with them taken alone."""
    found: list[Geometry] = []
    findings: list[Finding] = []
    for piece in pieces:
        dtype = DTYPES.get(piece.tensor.dtype)
        if not piece.name or "@" in piece.name or piece.name == "__metadata__":
            findings.append(Finding(f"tensor {piece.name!r}", "is no name for a checkpoint", "Use a name without '@'"))
        elif dtype is None:
            findings.append(Finding(piece.name, f"dtype {piece.tensor.dtype} cannot be stored in safetensors"))
        elif not piece.box.fits(piece.shape):
            what = (
                f"a block of shape {list(piece.tensor.shape)} at {list(piece.offset)} is outside the shape {list(piece.shape)}"
            )
            findings.append(Finding(piece.name, what))
        else:
            found.append(Geometry(piece.name, dtype, tuple(piece.shape), piece.box, piece.owner))
    return found, findings


@dataclass(frozen=True)
class Share:
    """One block that one rank writes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def key(self) -> str:
        """Name of the entry in the safetensors file: the logical name, with the offset when it is only a part."""
        return self.name if self.box.shape == self.shape else f"{self.name}@{','.join(map(str, self.box.offset))}"

    @property
    def bytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SharePlan:
    """ranks[r]: what rank r writes. tensors: name -> (dtype, global shape) of everything, empty tensors included."""

    ranks: tuple[tuple[Share, ...], ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    def bytes(self, rank: int) -> int:
        return sum(part.bytes for part in self.ranks[rank])

    @property
    def total(self) -> int:
        return sum(self.bytes(rank) for rank in range(len(self.ranks)))


@dataclass
class _Cell:
    share: Share
    holders: frozenset[int]


def share(held: Sequence[Sequence[Geometry]]) -> tuple[SharePlan, list[Finding]]:
    """Decide who writes what. held[r]: the pieces of rank r.

    Every logical element is written once. Blocks that one rank alone holds are its own; the others are dealt out so that
    the most loaded rank writes as little as possible, cut along the first dimension that can be cut.
    Findings: a name with two dtypes or shapes, elements that no rank may write.
    """
    tensors, boxes, findings = _merge(held)
    cells: list[_Cell] = []
    for name, (dtype, shape) in tensors.items():
        parts = _cells(boxes[name])
        missing = math.prod(shape) - sum(box.numel for box, _ in parts)
        if missing:
            what = f"{missing} of {math.prod(shape)} elements are held by no rank that may write them"
            findings.append(Finding(name, what, "Every element needs an owner"))
        cells += [_Cell(Share(name, dtype, shape, box), holders) for box, holders in parts]
    ranks = [sorted(parts, key=lambda part: (part.name, part.box)) for parts in _deal(cells, len(held))]
    return SharePlan(tuple(map(tuple, ranks)), tensors), findings


def _merge(
    held: Sequence[Sequence[Geometry]],
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, dict[Box, set[int]]], list[Finding]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, dict[Box, set[int]]] = {}
    findings = []
    for rank, pieces in enumerate(held):
        for piece in pieces:
            known = tensors.setdefault(piece.name, (piece.dtype, piece.shape))
            if known != (piece.dtype, piece.shape):
                what = f"rank {rank} has {piece.dtype} {list(piece.shape)}, another rank {known[0]} {list(known[1])}"
                findings.append(Finding(piece.name, what))
                continue
            holders = boxes.setdefault(piece.name, {})
            if piece.owner and piece.box.numel:
                holders.setdefault(piece.box, set()).add(rank)
    return tensors, boxes, findings


def _cells(boxes: dict[Box, set[int]]) -> list[tuple[Box, frozenset[int]]]:
    """Disjoint blocks with the ranks that hold each. Blocks that overlap in part are cut on the grid of all their edges."""
    if first_overlap(list(boxes)) is None:
        return [(box, frozenset(ranks)) for box, ranks in sorted(boxes.items())]
    dims = len(next(iter(boxes)).shape)
    edges = [sorted({e for b in boxes for e in (b.offset[d], b.offset[d] + b.shape[d])}) for d in range(dims)]
    cells = []
    for corner in itertools.product(*(range(len(e) - 1) for e in edges)):
        start = tuple(edges[d][i] for d, i in enumerate(corner))
        cell = Box(start, tuple(edges[d][i + 1] - edges[d][i] for d, i in enumerate(corner)))
        holders = frozenset(rank for box, ranks in boxes.items() if box.meet(cell) for rank in ranks)
        if holders:
            cells.append((cell, holders))
    return cells


def _deal(cells: Sequence[_Cell], world: int) -> list[list[Share]]:
    out: list[list[Share]] = [[] for _ in range(world)]
    load = [0.0] * world
    groups: dict[frozenset[int], list[Share]] = {}
    for cell in cells:
        groups.setdefault(cell.holders, []).append(cell.share)
    for holders in sorted(groups, key=lambda group: (len(group), sorted(group))):
        ranks = sorted(holders)
        quotas = _fill([load[rank] for rank in ranks], sum(part.bytes for part in groups[holders]))
        for rank, part in _cut(groups[holders], ranks, quotas):
            out[rank].append(part)
            load[rank] += part.bytes
    return out


def _fill(load: Sequence[float], amount: float) -> list[float]:
    """How much each vessel takes when `amount` is poured so that the fullest ends as low as possible."""
    order = sorted(load)
    level = 0.0
    for count in range(1, len(order) + 1):
        level = (amount + sum(order[:count])) / count
        if count == len(order) or level <= order[count]:
            break
    return [max(0.0, level - value) for value in load]


def _cut(parts: Sequence[Share], ranks: Sequence[int], quotas: Sequence[float]) -> Iterator[tuple[int, Share]]:
    """Deal the parts in order, cutting one where a rank's quota ends; what rounding leaves passes to the next rank."""
    turn, left = 0, quotas[0]
    for whole in parts:
        rest = whole.box
        while rest.numel:
            dim = next((d for d, n in enumerate(rest.shape) if n > 1), None)
            size = rest.shape[dim] if dim is not None else 1
            row = rest.numel // size * ITEM_BYTES[whole.dtype]
            take = size if turn == len(ranks) - 1 else min(size, max(0, round(left / row)))
            if take:
                head, rest = _split(rest, dim, take)
                yield ranks[turn], Share(whole.name, whole.dtype, whole.shape, head)
                left -= take * row
            if rest.numel:
                turn += 1
                left += quotas[turn]


def _split(box: Box, dim: int | None, take: int) -> tuple[Box, Box]:
    if dim is None:
        return box, Box((0,), (0,))
    offset, shape = box.offset, box.shape
    head = Box(offset, (*shape[:dim], take, *shape[dim + 1 :]))
    tail_at = (*offset[:dim], offset[dim] + take, *offset[dim + 1 :])
    return head, Box(tail_at, (*shape[:dim], shape[dim] - take, *shape[dim + 1 :]))
