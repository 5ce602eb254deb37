"""What the strategies that split the model tell the ones that move its parameters: who holds which block, and with whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.spec.placement import Placement

__all__ = ["Domain", "Sharing"]


@dataclass(frozen=True)
class Domain:
    """The data ranks that hold the same block of some parameters, where not all do; None where this rank is alone.

    data: all of them, over which the gradient is summed. shards: those among which ZeRO cuts the states. replicas: those that
    then hold the same piece. distinct: a group whose ranks hold, together, every element once.
    """

    data: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    distinct: dist.ProcessGroup | None


@dataclass
class Sharing:
    """placements: of parameters, by the name that they have in this rank's model; one that is absent is whole, under its own
    name, and shared with nobody. groups: ranks of each `Placement.shared`. domains: of each `Placement.domain`, the same names
    on every rank.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    domains: dict[str, Domain] = field(default_factory=dict)

    def of(self, name: str, shape: tuple[int, ...]) -> Placement:
        return self.placements.get(name) or Placement.whole(name, shape)
