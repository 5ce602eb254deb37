"""Between replicas: puts in what sums gradients in fewer bytes, or what lets replicas train apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import SyncConfig
from meshwright.distributed.mesh import subgroup
from meshwright.parallel.buffers import Bucket, master_dtype
from meshwright.parallel.compress import Queue, Reducer, make_reducer
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.local_sgd import LocalSteps
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.precision import LossScaler
from meshwright.parallel.replicate import Gradients
from meshwright.parallel.zero import ShardedGradients, ShardedParameters
from meshwright.spec.slow_links import replica_bytes

__all__ = ["slow_links"]


def slow_links(
    sync: SyncConfig,
    mesh: DeviceMesh | None,
    parameters: FlatParameters,
    gradients: Gradients,
    optimizer: FlatOptimizer,
    scaler: LossScaler | None,
    seed: int,
) -> tuple[LocalSteps | None, str]:
    """The outer loop, where replicas train apart, and what is exchanged in words; None and "" for `every_step` without
    compression. Collective. Changes `gradients` where they are compressed."""
    if sync.plain:
        return None, ""
    assert mesh is not None  # checked: there are at least two replicas
    options: dict[str, Any] = {"seed": seed, "device": parameters.groups[0].device}
    if not sync.local:
        reducer = make_reducer(sync, mesh.get_group("dp_replicate"), _keys(parameters, gradients), whole=_shared, **options)
        gradients.compressed = Queue(reducer)
        return None, _note(sync, parameters, reducer)
    group = mesh.get_group("dp_replicate")
    if sync.overlap:  # a group of its own: what is on its way must not stand before what the steps exchange meanwhile
        axis = (mesh.mesh_dim_names or ()).index("dp_replicate")
        own = subgroup(mesh, "outer", mesh.mesh.movedim(axis, -1).reshape(-1, group.size()).tolist())
        assert own is not None  # the rows hold every rank
        group = own
    reducer = make_reducer(sync, group, parameters.ranges, **options)
    inside = parameters.group if isinstance(parameters, ShardedParameters) else None
    groups = {"together": gradients.group, "inside": inside}
    local = LocalSteps(sync, parameters, gradients, optimizer, scaler, reducer, **groups)
    return local, _note(sync, parameters, reducer)


def _keys(parameters: FlatParameters, gradients: Gradients) -> Sequence[Any]:
    """What gradients are summed by over the replicas: buckets, or pieces of them."""
    if isinstance(gradients, ShardedGradients):
        assert isinstance(parameters, ShardedParameters)
        return parameters.parts
    return gradients.buckets


def _shared(key: Any) -> bool:
    return bool((key.group if isinstance(key, Bucket) else key).shared)


def _note(sync: SyncConfig, parameters: FlatParameters, reducer: Reducer) -> str:
    elements = sum(part.master.numel() for part in parameters.ranges)
    item = master_dtype(parameters.groups[0].dtype).itemsize
    ways = reducer.group.size()
    whole = 0 if sync.local else sum(part.master.numel() for part in parameters.ranges if part.shared)
    sent = replica_bytes(sync, ways, elements, item, whole=whole, matrices=reducer.matrices())
    plain = replica_bytes(SyncConfig(), ways, elements, item)
    how = sync.method + ("" if sync.compress == "none" else f", {sync.compress}") + (", one round late" if sync.overlap else "")
    return f"replicas exchange {_size(sent)} a step and device ({how}); gradients every step would be {_size(plain)}"


def _size(count: float) -> str:
    return f"{count / 1e6:,.3g} MB" if count >= 1e5 else f"{count / 1e3:,.3g} kB"
