"""The block of a logical tensor that one rank holds: what the engine offers and a checkpoint stores or fills."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.spec.box import Box

__all__ = ["Piece", "flat_pieces"]


@dataclass(frozen=True)
class Piece:
    """The block of the logical tensor `name` (global `shape`) that starts at `offset` and lies in `tensor` on this rank.

    A tensor that every rank holds whole is passed whole by every rank. `owner=False` says that this rank's copy must not
    be the one that is written (it is still filled by a load).
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool = True

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.tensor.shape))


def flat_pieces(name: str, flat: torch.Tensor, shape: Sequence[int], start: int, *, owner: bool = True) -> list[Piece]:
    """Pieces for a run of elements of a logical tensor: `flat` [n] holds the elements start .. start+n in row-major order.

    A run that begins or ends inside a row is no block, so it becomes a few (at most 2 x dimensions - 1), each a view of
    `flat`: what sharded optimizer states need.
    """
    if flat.dim() != 1 or start < 0 or start + flat.numel() > math.prod(shape):
        raise ValueError(f"{name}: {flat.numel()} elements from {start} do not lie in a tensor of shape {list(shape)}")
    pieces, done = [], 0
    for box in _runs(tuple(shape), start, start + flat.numel()):
        view = flat[done : done + box.numel].view(box.shape)
        pieces.append(Piece(name, view, tuple(shape), box.offset, owner))
        done += box.numel
    return pieces


def _runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Blocks, in row-major order, that make up the elements start .. stop."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _row(shape, last, 0, stop - last * row)


def _row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in _runs(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))
