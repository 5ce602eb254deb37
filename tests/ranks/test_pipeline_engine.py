"""Pipelines beside data parallelism and ZeRO, through the engine: one process again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import OptimizerConfig
from meshwright.parallel import apply
from meshwright.parallel.apply import Engine
from meshwright.parallel.axes import Axes
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.pipeline import cut
from meshwright.parallel.sharing import Sharing
from meshwright.spec.box import Box
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.pipelines import CLIP, FAULTS, LR, Job, forward_of, make_batches, make_model, objective_of, oracle
from tests.ranks.pool import layout_mesh
from tests.ranks.test_pipeline import LIMITS, SHAPES

OPTIMIZER = OptimizerConfig(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, no_decay=[])
BUCKET_BYTES = 3000
"""Several buckets a chunk."""

LAYOUTS = {
    "dp2 pp2": Layout(pp=2, dp_replicate=2),
    "zero1 pp2": Layout(pp=2, dp_shard=2, zero=1),
    "zero2 pp2": Layout(pp=2, dp_shard=2, zero=2),
    "pp4": Layout(pp=4),
}


@dataclass
class Held:
    """Losses, norms, evaluation sums, and (kind, name, box, values) of everything that a rank keeps."""

    losses: list[float]
    norms: list[float]
    sums: list[float]
    pieces: list[tuple[str, str, Box, torch.Tensor]]
    differs: str | None


def assemble(job: Job, layout: Layout, overlap: bool = True) -> Engine:
    plan = Plan(
        layout, schedule=job.schedule, chunks=job.chunks, compile=job.compile, precision="fp64", bucket_mib=1, overlap=overlap
    )
    model, mesh, sharing = make_model(job), layout_mesh(layout), Sharing()
    stages = cut(model, plan, mesh)
    stages.share(sharing)
    compile_blocks(model, plan.compile)
    axes = Axes.of(mesh, layout.zero)
    with mock.patch.object(apply, "MIB", BUCKET_BYTES):
        parameters, gradients = apply._data_parallel(
            model,
            plan,
            mesh,
            axes,
            dtype=torch.float64,
            device=torch.device("cpu"),
            no_decay=OPTIMIZER.no_decay,
            table=None,
            sharing=sharing,
            unit=stages.unit,
        )
    optimizer = FlatOptimizer(OPTIMIZER, parameters, 0.0)
    return Engine(parameters, gradients, optimizer, scaler=None, axes=axes, compiled=plan.compile, runner=stages.runner())


def train(job: Job, layout: Layout, overlap: bool = True) -> Held:
    """job.micros: of every data rank; data rank d of D has the micro-batches d, d + D, ... of the step."""
    with FAULTS[job.fault]():
        engine = assemble(job, layout, overlap)
        mesh, data = layout_mesh(layout), layout.dp
        place = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")
        out = Held([], [], [], [], None)
        whole = replace(job, micros=job.micros * data)
        for step in range(job.steps):
            batches = make_batches(whole, step)
            targets = max(1, sum(batch.targets() for batch in batches))
            total = torch.zeros((), dtype=torch.float64)

            def taken(number: int, parts: Any, total=total) -> None:
                total += parts.loss_sum.detach()

            engine.zero()
            engine.run(job.micros, forward_of(job, batches[place::data]), 1 / targets, taken, nullcontext)
            engine.finish()
            dist.all_reduce(total)
            out.losses.append(float(total) / targets)
            if step == 0:
                out.pieces += pieces(engine.gradient_state())
            out.norms.append(float(engine.update(LR, CLIP).grad_norm))
        out.pieces += pieces([piece for piece in engine.parameters_state() if piece.name.startswith("model/")])
        out.differs = engine.sync_check()
        engine.model.eval()
        held_out, objective, sums = make_batches(whole, 99), objective_of(job), []
        with torch.no_grad():
            engine.evaluate(
                job.micros,
                lambda view, number: objective.evaluate(view, held_out[place::data][number]),
                lambda number, values: sums.append(values.clone()),
            )
        mine = torch.stack(sums).sum(0)
        if engine.axes.data is not None:
            dist.all_reduce(mine, group=engine.axes.data)
        out.sums = mine.tolist()
        return out


def pieces(found: Any) -> list[tuple[str, str, Box, torch.Tensor]]:
    return [(*piece.name.split("/", 1), piece.box, piece.tensor.clone()) for piece in found]


def measure(ranks, job: Job, layout: Layout, overlap: bool = True) -> dict[str, float]:
    found: list[Held] = ranks(layout.world).run(train, job, layout, overlap)
    plain = Job(job.name, micros=job.micros * layout.dp, steps=job.steps, dropout=job.dropout, layers=job.layers)
    expected = oracle(plain)
    wanted = {"gradient": expected.gradients, "model": expected.weights}
    seen = {kind: {name: torch.zeros_like(values) for name, values in each.items()} for kind, each in wanted.items()}
    worst = {"gradient": 0.0, "model": 0.0}
    for held in found:
        assert held.differs is None
        for kind, name, box, values in held.pieces:
            place = box.inside(Box.whole(wanted[kind][name].shape))
            seen[kind][name][place] = 1
            scale = wanted[kind][name].abs().max().clamp(min=1e-3)
            worst[kind] = max(worst[kind], float((values - wanted[kind][name][place]).abs().max() / scale))
    assert all(bool(mask.all()) for each in seen.values() for mask in each.values()), "an element is held nowhere"

    def numbers(kind: str) -> float:
        pairs = ((a, b) for held in found for a, b in zip(getattr(held, kind), getattr(expected, kind), strict=True))
        return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)

    return {
        "loss": numbers("losses"),
        "norm": numbers("norms"),
        "sums": numbers("sums"),
        "gradients": worst["gradient"],
        "weights": worst["model"],
    }


def check(ranks, job: Job, layout: Layout, overlap: bool = True) -> None:
    found = measure(ranks, job, layout, overlap)
    assert all(found[key] <= limit for key, limit in LIMITS.items()), found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_is_one_process(ranks, shape, layout):
    layers = 9 if layout == "pp4" and "chunks" in SHAPES[shape] else 5
    check(ranks, Job("tied", layers=layers, dropout=0.1, **SHAPES[shape]), LAYOUTS[layout])


@pytest.mark.parametrize("name", ["decoder", "mlm", "classifier", "plain"])
def test_every_model(ranks, name):
    check(ranks, Job(name, **SHAPES["zbv"]), LAYOUTS["zero2 pp2"])
    check(ranks, Job(name, **SHAPES["interleaved"]), LAYOUTS["zero1 pp2"], overlap=False)


# the same faults as beside the stand-in
@pytest.mark.parametrize(
    ("fault", "shape", "layout", "seen"),
    [
        ("gradient lost", "1f1b", "zero1 pp2", "gradients"),
        ("tie not summed", "1f1b", "dp2 pp2", "gradients"),
        ("tie counted twice", "zero_bubble", "zero2 pp2", "norm"),
        ("weights skipped", "zbv", "zero2 pp2", "gradients"),
    ],
)
def test_faults_are_seen(ranks, fault, shape, layout, seen):
    found = measure(ranks, Job("tied", fault=fault, steps=1, **SHAPES[shape]), LAYOUTS[layout])
    assert found[seen] > 1e-3, found
