"""The block of a logical tensor that one rank holds: what the engine offers and a checkpoint stores or fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.spec.box import Box

__all__ = ["Piece"]


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
