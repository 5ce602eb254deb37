"""Differences between what the ranks hold and what one device has, piece by piece.

A difference of a tensor is the largest |theirs - reference| over the largest |element| of the whole reference tensor: what a
rounding error is a share of. Tensors that are zero everywhere are compared as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.checkpoint.pieces import Geometry, geometry, share
from meshwright.distributed.piece import Piece
from meshwright.spec.box import Box

__all__ = ["KINDS", "TOLERANCES", "Worst", "compare_numbers", "compare_pieces", "geometry_of", "kind_of", "uncovered"]

KINDS = ("loss", "norm", "gradient", "weight", "moment", "average")

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 6e-2, "fp16": 1e-2}
"""Largest difference that is taken for rounding, by precision.

fp64 and fp32 have room for some 2^18 and 2^7 roundings of the largest element. In bf16 (8 bits) and fp16 (11 bits) activations
and their gradients are rounded after every operation on both sides, at other places where a sum is split, so that a gradient
differs by several roundings: the limits are 16 of 2^-8, and 20 of 2^-11. A missing sum, a wrong scale or a tie that is counted
twice is an error of 0.3 and more.
"""


@dataclass(frozen=True)
class Worst:
    """The largest difference so far, and where: "layers.0.mlp.up.weight, step 1"."""

    value: float = 0.0
    where: str = ""

    def max(self, other: Worst) -> Worst:
        return other if _rank(other.value) > _rank(self.value) else self


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def kind_of(name: str) -> str:
    """Of a piece of the engine, by the first part of its name."""
    return {"gradient": "gradient", "model": "weight", "optimizer": "moment", "ema": "average"}[name.partition("/")[0]]


def compare_numbers(ours: Sequence[float], reference: Sequence[float]) -> Worst:
    """Largest relative difference of two rows of numbers, one a step."""
    worst = Worst()
    for step, (a, b) in enumerate(zip(ours, reference, strict=True), 1):
        same = a == b or (math.isnan(a) and math.isnan(b))  # both may be infinite, as in a step that fp16 skips
        worst = worst.max(Worst(0.0 if same else _relative(abs(a - b), abs(b)), f"step {step}"))
    return worst


def compare_pieces(
    pieces: Iterable[Piece], reference: Mapping[str, torch.Tensor], when: str = "", factor: float = 1.0
) -> dict[str, Worst]:
    """Largest difference of each kind between this rank's blocks times `factor` and the same blocks of whole tensors.

    Blocks without a reference, and copies that no checkpoint would take (`Piece.owner`), are passed over: whether everything
    is there is asked by `uncovered`. A block of another shape counts as infinitely different.
    """
    found: dict[str, Worst] = {}
    for piece in pieces:
        whole = reference.get(piece.name)
        if whole is None or not piece.owner:
            continue
        value = _difference(piece, whole, factor)
        where = piece.name.partition("/")[2] + (f", {when}" if when else "")
        kind = kind_of(piece.name)
        found[kind] = found.get(kind, Worst()).max(Worst(value, where))
    return found


def _difference(piece: Piece, whole: torch.Tensor, factor: float) -> float:
    if tuple(whole.shape) != tuple(piece.shape) or not piece.box.fits(piece.shape):
        return math.inf
    if not piece.tensor.numel():
        return 0.0
    block = whole[piece.box.inside(Box.whole(piece.shape))]
    if not whole.is_floating_point():
        return 0.0 if torch.equal(piece.tensor.cpu(), block.cpu()) else math.inf
    wide = torch.promote_types(torch.promote_types(whole.dtype, piece.tensor.dtype), torch.float32)
    gap = (piece.tensor.detach().to(wide) * factor - block.to(piece.tensor.device, wide)).abs().max()
    return _relative(float(gap), float(whole.abs().max()))


def _relative(gap: float, size: float) -> float:
    if math.isnan(gap) or math.isinf(size):
        return math.inf
    return gap / size if size else gap


def uncovered(held: Sequence[Sequence[Any]], names: Iterable[str]) -> list[str]:
    """What no rank holds of the tensors `names`, and what is held beside them. held[r]: `geometry` of rank r as JSON."""
    ranks = [[Geometry.from_json(entry) for entry in rank] for rank in held]
    _, findings = share(ranks)
    known, there = set(names), {entry.name for rank in ranks for entry in rank}
    missing = [f"{name} is held by no rank" for name in sorted(known - there)]
    return [*map(str, findings), *missing, *(f"{name} is not in the reference" for name in sorted(there - known))]


def geometry_of(pieces: Iterable[Piece]) -> list[list[object]]:
    """What `uncovered` wants of this rank."""
    found, findings = geometry(pieces)
    assert not findings, findings  # names and boxes of our own
    return [entry.to_json() for entry in found]
