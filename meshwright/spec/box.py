"""Blocks of a tensor, as integers: what a rank holds, what a file holds, and what both share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box"]


@dataclass(frozen=True, order=True)
class Box:
    """A block of a tensor: `shape[d]` elements from `offset[d]` on in every dimension d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The block that both cover, or None when they share no element."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Index that picks this block out of a tensor that holds `outer`."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offset, self.shape, outer.offset, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        return len(self.offset) == len(self.shape) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(self.offset, self.shape, shape, strict=True)
        )
