"""Which block of a logical parameter a rank's own parameter is, and with whom it shares it. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.box import Box

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """name, shape: of the logical parameter, under which checkpoints and initial values know it. box: the block that this
    rank's parameter is.

    shared: name of the group of ranks that hold the very same block, each with only its own share of the gradient, which is
    therefore summed over them beside the data ranks; empty where every holder computes all of it or there is one. counted:
    whether this rank's copy counts in sums over the whole model, such as the gradient norm; true on one holder of a block.
    domain: name of the data ranks that hold the very same block, and over which its gradient is summed; empty: all data ranks.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    shared: str = ""
    counted: bool = True
    domain: str = ""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Placement:
        return cls(name, tuple(shape), Box.whole(shape))
