"""Process groups of a mesh, by what their ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.mesh import SHARD_AXES, SUMMED_AXES, AxisGroups
from meshwright.parallel.sharing import Domain

__all__ = ["Axes"]


@dataclass(frozen=True)
class Axes:
    """Process groups by what their ranks share; axes of size 1 are left out.

    data: ranks that see different samples, or other positions of the same: each has a part of the gradient. distinct: one
    group an axis whose ranks hold different elements of the same gradient. model: those of them whose ranks hold different
    parts of the model, by name: pp and tp. every: one group an axis; reduced over in turn, they reach the whole world. apart:
    one group an axis of `data` whose ranks hold different pieces of the working weights. context: those of `data` that have
    other positions of the same samples. shards: those over which a ZeRO stage shards, dp_shard and cp as one axis. replicas:
    the axis dp_replicate, whose ranks hold the same pieces of everything.
    """

    data: dist.ProcessGroup | None = None
    distinct: tuple[dist.ProcessGroup, ...] = ()
    every: tuple[dist.ProcessGroup, ...] = ()
    model: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    apart: tuple[dist.ProcessGroup, ...] = ()
    context: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, zero: int = 0) -> Axes:
        """zero: from 1 on, ranks along dp_shard and cp hold other ranges of the reduced gradient; with 3, of the weights."""
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {name: mesh.get_group(name) for name in names if mesh is not None and mesh.size(names.index(name)) > 1}

        def over(*axes: str) -> dist.ProcessGroup | None:
            wide = [name for name in axes if name in groups]
            return AxisGroups(mesh).over(*wide) if mesh is not None and wide else None

        model = {str(name): groups[name] for name in ("pp", "tp") if name in groups}
        shards = over(*SHARD_AXES) if zero else None
        apart = (shards,) if shards is not None else ()
        every = [group for name, group in groups.items() if not apart or name not in SHARD_AXES]
        return cls(
            data=over(*SUMMED_AXES),
            distinct=(*apart, *model.values()),
            every=(*every, *apart),
            model=model,
            apart=apart if zero == 3 else (),
            context=groups.get("cp"),
            shards=shards,
            replicas=groups.get("dp_replicate"),
        )

    def inside(self, groups: Sequence[dist.ProcessGroup]) -> tuple[dist.ProcessGroup, ...]:
        """Those of the groups that stay in this replica."""
        return tuple(group for group in groups if group is not self.replicas)

    @property
    def same_rows(self) -> tuple[dist.ProcessGroup, ...]:
        """One group an axis whose ranks see the same samples."""
        return (*self.model.values(), *((self.context,) if self.context is not None else ()))

    @property
    def alike(self) -> tuple[dist.ProcessGroup, ...]:
        """One group an axis whose ranks hold the same pieces of the optimizer state."""
        return tuple(group for group in self.every if group not in self.distinct)

    @property
    def copies(self) -> tuple[dist.ProcessGroup, ...]:
        """One group an axis whose ranks hold the same working weights."""
        return tuple(group for group in self.every if group not in self.model.values() and group not in self.apart)

    def within(self, domain: Domain) -> tuple[tuple[dist.ProcessGroup, ...], tuple[dist.ProcessGroup, ...]]:
        """`copies` and `alike` of what belongs to a domain."""
        sharded = any(group not in self.model.values() for group in self.distinct)
        weights = domain.replicas if self.apart else domain.data
        states = domain.replicas if sharded else domain.data
        return tuple(filter(None, (weights,))), tuple(filter(None, (states,)))
