"""Any nn.Module through data parallelism and ZeRO: what one process of plain torch computes, to fp64 rounding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.parallel import apply
from meshwright.parallel.apply import Engine, parallelize
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.foreign_models import (
    CLIP,
    DECAY,
    EPS,
    KINDS,
    LR,
    ROWS,
    STEPS,
    Trained,
    made,
    oracle,
    rows_of,
)
from tests.ranks.pool import layout_mesh
from tests.ranks.replicas import _copy, whole_gradients

LAYOUTS = {
    "data": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "zero3": Layout(dp_shard=2, zero=3),
    "data4": Layout(dp_replicate=4),
    "zero1-4": Layout(dp_shard=4, zero=1),
    "zero2-4": Layout(dp_shard=4, zero=2),
    "zero3-4": Layout(dp_shard=4, zero=3),
    "hybrid3": Layout(dp_replicate=2, dp_shard=2, zero=3),
}


@dataclass(frozen=True)
class Job:
    kind: str
    layout: str
    accumulation: int = 1
    recompute: str = "none"
    precision: str = "fp64"
    batch_norm: str = "synchronised"
    gather: str = "twice"
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)


def engine_of(job: Job) -> Engine:
    layout = LAYOUTS[job.layout]
    plan = Plan(layout, precision=job.precision, recompute=job.recompute, bucket_mib=1, gather=job.gather)
    with mock.patch.object(apply, "MIB", 600):  # several buckets
        return parallelize(
            made(KINDS[job.kind]),
            plan=plan,
            mesh=layout_mesh(layout),
            table=None,
            optimizer=OptimizerConfig(weight_decay=DECAY, eps=EPS),
            device=torch.device("cpu"),
            batch_norm=job.batch_norm,  # type: ignore[arg-type]
            **job.options,
        )


def one_step(engine: Engine, job: Job, step: int) -> float:
    """Rows are dealt in runs. Returns the loss of all ranks."""
    kind, rank, world = KINDS[job.kind], dist.get_rank(), dist.get_world_size()
    mine = {name: values.tensor_split(world)[rank] for name, values in rows_of(kind, step).items()}
    parts = [{name: values.tensor_split(job.accumulation)[i] for name, values in mine.items()} for i in range(job.accumulation)]
    total = torch.zeros((), dtype=torch.float64)

    def forward(model: nn.Module, i: int) -> SimpleNamespace:
        return SimpleNamespace(loss_sum=kind.loss(model, parts[i]))

    engine.zero()
    engine.run(len(parts), forward, engine.loss_scale / ROWS, lambda _, taken: total.add_(taken.loss_sum.detach().double()))
    engine.finish()
    dist.all_reduce(total)
    return float(total) / ROWS


def train(job: Job) -> tuple[Trained, list[str], str | None]:
    """And the names of unused parameters, and of a weight that differs between ranks."""
    engine, out = engine_of(job), Trained()
    unused: list[str] = []
    for step in range(job.steps):
        out.losses.append(one_step(engine, job, step))
        if step == 0:
            out.gradients = whole_gradients(engine)
            unused = engine.unused_parameters()
        out.norms.append(float(engine.update(LR, CLIP).grad_norm))
    state = _copy(engine)
    out.weights = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
    out.buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    return out, unused, engine.sync_check()


expected = functools.cache(lambda kind: oracle(KINDS[kind]))


def difference(ours: Trained, reference: Trained, buffers: bool = True) -> float:
    """Largest of loss, norm, first gradient over its largest element, weights, and buffers."""
    worst = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours.losses, reference.losses, strict=True)]
    worst += [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours.norms, reference.norms, strict=True)]
    assert ours.gradients.keys() == reference.gradients.keys()
    largest = max(float(value.abs().max()) for value in reference.gradients.values())
    worst += [float((ours.gradients[n] - g).abs().max()) / largest for n, g in reference.gradients.items()]
    worst += [float((ours.weights[n] - w).abs().max()) for n, w in reference.weights.items()]
    if buffers:
        worst += [float((ours.buffers[n] - b).abs().max()) for n, b in reference.buffers.items() if b.numel()]
    return max(worst)


def check(ranks: Any, job: Job, tolerance: float = 1e-11) -> list[tuple[Trained, list[str], str | None]]:
    found = ranks(LAYOUTS[job.layout].world).run(train, job)
    for trained, _, apart in found:
        assert difference(trained, expected(job.kind)) < tolerance
        assert apart is None
    return found


LARGE = pytest.mark.slow
EVERY = [
    pytest.param(kind, layout, marks=() if layout in ("zero1", "zero3") or kind in ("signals", "odd") else LARGE)
    for kind in KINDS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("kind", "layout"), EVERY)
def test_any_module_equals_plain_torch(ranks, kind, layout):
    check(ranks, Job(kind, layout))
