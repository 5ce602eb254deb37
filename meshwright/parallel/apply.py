"""`parallelize`: the one ordered list of what is done to a model, and where each strategy has its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import LossScaleConfig, OptimizerConfig, SyncConfig
from meshwright.errors import Finding, LayoutError
from meshwright.models.trunk import Trunk
from meshwright.parallel.axes import Axes
from meshwright.parallel.balance import Balance
from meshwright.parallel.batch_norm import place_batch_norms
from meshwright.parallel.blocks import find_blocks
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.context import split_positions
from meshwright.parallel.engine import Engine, StepInfo
from meshwright.parallel.expert import split_experts
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.foreign import StudiedParameters
from meshwright.parallel.fp8 import multiply_in_fp8
from meshwright.parallel.graphs import replay_blocks
from meshwright.parallel.inputs import cast_buffers, cast_inputs
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.pipeline import cut
from meshwright.parallel.precision import LossScaler, working_dtype
from meshwright.parallel.recompute import recompute_blocks
from meshwright.parallel.replicate import Gradients
from meshwright.parallel.slow_links import slow_links
from meshwright.parallel.tensor import split_tensors
from meshwright.parallel.zero import ShardedGradients, ShardedParameters, StreamedGradients
from meshwright.parallel.zero3 import GatheredGradients, GatheredParameters
from meshwright.spec.parameters import Table
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused
from meshwright.spec.slow_links import sync_findings

__all__ = ["Engine", "StepInfo", "parallelize"]

MIB = 2**20


def parallelize(
    model: nn.Module,
    *,
    plan: Plan,
    mesh: DeviceMesh | None,
    table: Table | None,
    optimizer: OptimizerConfig,
    device: torch.device,
    loss_scale: LossScaleConfig | None = None,
    ema: float = 0.0,
    batch_norm: Literal["synchronised", "local"] = "synchronised",
    sync: SyncConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    label: Callable[[nn.Parameter, str], int] | None = None,
    make_optimizer: Callable[[FlatParameters], FlatOptimizer] | None = None,
) -> Engine:
    """Prepares `model` in place for training by `plan` on `mesh` and returns the engine that runs its steps.

    model: filled, on any device; or on meta, to be filled inside `engine.masters()`. mesh: with the axes of the layout;
    None for one process without a process group. table: where the model declares ties; None: ties are what the model
    shares. loss_scale: fp16 only. ema: decay of the averaged weights, 0 for none. batch_norm: whether a BatchNorm takes its
    statistics from the rows of all data ranks or from those of its own. A model that is not one of ours gets floating inputs in
    the dtype of its weights. sync: what crosses the replicas, and when; None: gradients, every step. seed: of what PowerSGD
    starts from. dtype: of the working weights, where it is not the plan's (a module that casts for itself keeps its own).
    label, make_optimizer: for a caller with groups of parameters and an optimizer of its own (`parallel.own_optimizer`), which
    then counts, not `optimizer`.
    Raises LayoutError for a layout that is not available, and for a mesh that is not the layout's.

    The order is the correctness rule. A pipeline stage comes first: what is not here needs nothing else. Tensor parallelism
    goes next, since it changes which block of a parameter exists here, then expert parallelism, which takes whole experts of
    what is left; then ties across stages, of whatever blocks those are. Context parallelism changes no parameter, only which
    positions there are and how attention sees the others; its exchanges are inside of blocks. Then the linear layers of blocks
    become those of fp8. Recompute wraps blocks as they then are; compilation sees the recomputed block. Data parallelism
    comes after all that, since it moves the parameters into its buffers and hooks them: whatever replaced a parameter later
    would be trained by nobody. Recordings are of blocks as they are then, over parameters that stay where they are.
    """
    sync = sync or SyncConfig()
    _check(plan, mesh, sync)
    stages = cut(model, plan, mesh)
    sharing = split_tensors(model, plan, mesh)
    split_experts(model, plan, mesh, sharing)
    stages.share(sharing)
    context = split_positions(model, plan, mesh)
    normed = place_batch_norms(model, mesh, batch_norm == "synchronised")
    eight = multiply_in_fp8(model, plan, device)
    recompute_blocks(model, plan)
    compile_blocks(model, plan.compile, whole=plan.layout.ep == 1)
    axes = Axes.of(mesh, plan.layout.zero)
    blocks = find_blocks(model)
    unit = stages.unit if blocks.declared else blocks.unit
    options: dict[str, Any] = {"device": device, "no_decay": optimizer.no_decay, "table": table, "offload": plan.offload}
    options |= {"dtype": dtype or working_dtype(plan.precision), "sharing": sharing, "unit": unit}
    options |= {} if label is None else {"label": label}
    parameters, gradients = _data_parallel(model, plan, axes, **options)
    replay_blocks(model, plan, device)
    if not isinstance(model, Trunk):
        cast_inputs(model, options["dtype"])
        cast_buffers(model, parameters.persistent, options["dtype"])
    moments = make_optimizer(parameters) if make_optimizer else FlatOptimizer(optimizer, parameters, ema)
    scaler = LossScaler(loss_scale or LossScaleConfig()) if plan.precision == "fp16" else None
    local, exchanged = slow_links(sync, mesh, parameters, gradients, moments, scaler, seed)
    return Engine(
        parameters,
        gradients,
        moments,
        scaler=scaler,
        axes=axes,
        runner=stages.runner(),
        notes=[note for note in (stages.note, "" if context is None else context.note, normed, exchanged, eight) if note],
        compiled=plan.compile,
        local=local,
        balance=Balance.of(model, axes.data, axes.model.get("pp")),
    )


def _data_parallel(model: nn.Module, plan: Plan, axes: Axes, **options: Any) -> tuple[FlatParameters, Gradients]:
    """Replicated (zero 0), or with optimizer states (1), gradients (2) and weights (3) sharded over dp_shard and cp."""
    buckets: dict[str, Any] = {"bucket_bytes": plan.bucket_mib * MIB, "overlap": plan.overlap}
    if not plan.layout.zero:
        replicated = FlatParameters(model, **options)
        return replicated, Gradients(replicated, axes.data, **buckets)
    shards, replicas = axes.shards, axes.replicas
    assert shards is not None and axes.data is not None  # checked: there are at least two to shard over
    if plan.layout.zero == 3:
        options |= {"once": plan.gather == "once", **buckets}
        if isinstance(model, Trunk):
            gathered = GatheredParameters(model, shards, **options)
        else:
            gathered = StudiedParameters(model, shards, data=axes.data, compiled=plan.compile != "off", **options)
        return gathered, GatheredGradients(gathered, axes.data, replicas, **buckets)
    sharded = ShardedParameters(model, shards, **buckets, **options)
    kind = ShardedGradients if plan.layout.zero == 1 else StreamedGradients
    return sharded, kind(sharded, axes.data, replicas, **buckets)


def _check(plan: Plan, mesh: DeviceMesh | None, sync: SyncConfig) -> None:
    findings, layout = [*refused(plan), *sync_findings(sync, plan.layout)], plan.layout
    named = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    ranks = 1 if mesh is None else mesh.size()
    wrong = [key for key, size in layout.axes if named.get(key, 1) != size]
    if not findings and (wrong or ranks != layout.world):
        what = f"is for {layout.world} ranks as {dict(layout.axes)}, the mesh has {ranks} as {named}"
        findings.append(Finding("layout", what, "Make the mesh from the layout"))
    if findings:
        raise LayoutError(findings=findings)
