"""A layout as torch's DeviceMesh with named axes, and the groups that span several of its axes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import Finding, LayoutError
from meshwright.spec.layout import Layout

__all__ = ["DATA_AXES", "SHARD_AXES", "SUMMED_AXES", "AxisGroups", "build_mesh", "coordinate", "data_rank", "subgroup"]

DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes along which ranks see different samples, outermost first."""
SUMMED_AXES = (*DATA_AXES, "cp")
"""The axes along which ranks see different samples, or different positions of them: gradients are summed over all of these."""
SHARD_AXES = ("dp_shard", "cp")
"""The axes that ZeRO shards over, as one."""


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of `layout` over the whole world, all five axes named, sizes of 1 included. Collective: every rank calls it.

    Raises LayoutError if the layout does not use exactly the ranks that are there.
    """
    world = dist.get_world_size()
    if layout.world != world:
        what = f"{' * '.join(f'{name} {size}' for name, size in layout.axes)} = {layout.world} ranks, but {world} were started"
        raise LayoutError(findings=[Finding("layout", what, f"Start {layout.world} with --nproc, or change the layout")])
    names, sizes = zip(*layout.axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def coordinate(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's index along every named axis."""
    return {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()}


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(index, size) of this rank among those that see different samples."""
    index, size = 0, 1
    for name in DATA_AXES:
        ways = _ways(mesh, name)
        index = index * ways + mesh.get_local_rank(name)
        size *= ways
    return index, size


def _ways(mesh: DeviceMesh, name: str) -> int:
    """Ranks along an axis, without making a submesh, which takes milliseconds."""
    return mesh.size((mesh.mesh_dim_names or ()).index(name))


_made: WeakKeyDictionary[DeviceMesh, tuple[object, dict[Hashable, dist.ProcessGroup | None]]] = WeakKeyDictionary()


def subgroup(
    mesh: DeviceMesh, purpose: Hashable, rows: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """The group of this rank among `rows`, disjoint lists of global ranks; None where it is in none of them. Collective.

    Made once a mesh and purpose and kept: a group holds threads (gloo) or device memory (NCCL) until the process ends, and
    many layouts may be tried in one process. timeout: of its collectives, when it is made; default: torch's.
    """
    world, kept = _made.setdefault(mesh, (dist.group.WORLD, {}))
    if world is not dist.group.WORLD:  # an equal mesh over a default group that is gone
        world, kept = _made[mesh] = (dist.group.WORLD, {})
    key = (purpose, tuple(map(tuple, rows)))
    if key not in kept:
        kept[key], _ = dist.new_subgroups_by_enumeration([list(row) for row in rows], timeout=timeout)
    return kept[key]


class AxisGroups:
    """Process groups over several axes of one mesh at once, made on first use and kept with this object.

    Collective: every rank asks for the same axes in the same order.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self._made: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @property
    def data(self) -> dist.ProcessGroup:
        """Ranks that see different samples and are alike otherwise."""
        return self.over(*DATA_AXES)

    def over(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `axes` only. Axes of size 1 cost nothing."""
        names = self.mesh.mesh_dim_names or ()
        unknown = [axis for axis in axes if axis not in names]
        if unknown or not axes:
            raise ValueError(f"axes {axes} are not among {names}")
        wide = tuple(name for name in names if name in axes and _ways(self.mesh, name) > 1)
        if len(wide) < 2:
            return self.mesh.get_group(wide[0] if wide else axes[0])
        if wide not in self._made:
            self._made[wide] = self._make(wide, names)
        return self._made[wide]

    def _make(self, wide: tuple[str, ...], names: tuple[str, ...]) -> dist.ProcessGroup:
        if self.mesh.mesh.numel() == dist.get_world_size() and all(_ways(self.mesh, n) == 1 for n in names if n not in wide):
            return dist.group.WORLD  # type: ignore[return-value]  # the default group exists: the mesh is made over it
        inside = [names.index(name) for name in wide]
        outside = [index for index in range(len(names)) if index not in inside]
        ranks = self.mesh.mesh.permute(*outside, *inside)
        rows = ranks.reshape(-1, math.prod(_ways(self.mesh, name) for name in wide)).tolist()
        group = subgroup(self.mesh, wide, rows)
        assert group is not None  # the rows hold every rank
        return group
