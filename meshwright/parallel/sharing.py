"""What the strategies that split the model tell the ones that move its parameters: who holds which block, and with whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.spec.placement import Placement

__all__ = ["Sharing"]


@dataclass
class Sharing:
    """placements: of parameters, by the name that they have in this rank's model; one that is absent is whole, under its own
    name, and shared with nobody. groups: ranks of each `Placement.shared`.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def of(self, name: str, shape: tuple[int, ...]) -> Placement:
        return self.placements.get(name) or Placement.whole(name, shape)
