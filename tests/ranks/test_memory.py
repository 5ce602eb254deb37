"""Bytes of weights, gradients and optimizer state on a rank, counted in storages, at rest and at their peak."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.parallel import zero
from meshwright.parallel.apply import Engine, parallelize
from meshwright.parallel.zero3 import GatheredParameters, GatheredPart
from meshwright.plan.memory import BUCKETS_IN_FLIGHT, state_bytes
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.pool import layout_mesh

WIDTH, BLOCKS, OUT = 1024, 12, 97
BUCKET_MIB = 8
"""So that there are as many buckets as in a model of a usual size."""
BLOCK, OUTSIDE = WIDTH * WIDTH + WIDTH, OUT * WIDTH
PARAMETERS = BLOCKS * BLOCK + OUTSIDE


class Wide(nn.Module):
    """12.7 M parameters; the last matrix is ragged over any number of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@dataclass(frozen=True)
class Case:
    layout: Layout
    precision: str
    ema: float = 0.0
    gather: str = "twice"
    offload: str = "none"


@dataclass
class Held:
    """Bytes by kind at rest, and the most that existed of whole gathered weights and of staged gradients."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    gathered: int = 0
    staging: int = 0
    unknown: int = 0


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()}


def held_by(case: Case) -> Held:
    with torch.device("meta"):
        model = Wide()
    gc.collect()
    made = parallelize(
        model,
        plan=Plan(
            layout=case.layout, precision=case.precision, bucket_mib=BUCKET_MIB, gather=case.gather, offload=case.offload
        ),
        mesh=layout_mesh(case.layout),
        table=None,
        optimizer=OptimizerConfig(),
        device=torch.device("cpu"),
        ema=case.ema,
    )
    made.fill(lambda name, placement: torch.full(placement.box.shape, 1e-3))
    out = Held()
    with Watched(made, out):
        for _ in range(2):
            step(made)
    weights = [part.working for part in made.parameters.ranges]
    gradients = [part.gradient for part in made.parameters.ranges]
    optimizer = [m for moments in made.optimizer.moments for m in moments.values()] + made.optimizer.averages
    optimizer += [part.master for part in made.parameters.ranges if part.mixed]
    for kind, tensors in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        setattr(out, kind, sum(storages(tensors).values()))
    known = storages([*weights, *gradients, *optimizer])
    out.unknown = sum(size for place, size in alive().items() if place not in known)
    if case.offload != "none":  # on a CPU one memory is both
        out.host, out.optimizer = out.optimizer, 0
    if case.offload == "parameters":
        out.host, out.weights = out.host + out.weights, 0
    return out


def alive() -> dict[int, int]:
    """Storages of over a MiB of all tensors that Python knows."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # a compiler's fake tensors have no memory
    tensors = [each for each in gc.get_objects() if type(each) in plain and each.device.type == "cpu"]
    return {place: size for place, size in storages(tensors).items() if size > 2**20}


def step(made: Engine) -> None:
    made.zero()
    for last in (False, True):
        loss = made.model(torch.ones(1, WIDTH, dtype=made.parameters.groups[0].dtype)).sum()
        with made.backward_scope(last=last):
            loss.backward()
    made.finish()
    made.update(1e-3, 1.0)
    made.parameters.settle()


class Watched:
    """Notes the most staged and gathered at one time."""

    def __init__(self, engine: Engine, out: Held) -> None:
        staged = weakref.WeakSet[torch.Tensor]()
        self.patches: list[Any] = []
        stage, gather = zero.StreamedGradients._stage, GatheredPart.gather

        def stages(gradients: Any, bucket: Any) -> torch.Tensor:
            buffer = stage(gradients, bucket)
            staged.add(buffer)
            out.staging = max(out.staging, sum(each.nbytes for each in staged))
            return buffer

        def gathers(part: GatheredPart) -> None:
            gather(part)
            assert isinstance(engine.parameters, GatheredParameters)
            there = sum(each.whole_weights.untyped_storage().nbytes() for each in engine.parameters.parts)
            out.gathered = max(out.gathered, there)

        self.patches = [
            mock.patch.object(zero.StreamedGradients, "_stage", stages),
            mock.patch.object(GatheredPart, "gather", gathers),
        ]

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


CASES = [
    Case(Layout(dp_replicate=2), "bf16"),
    Case(Layout(dp_replicate=2), "fp32", offload="optimizer"),
    Case(Layout(dp_shard=2, zero=1), "fp32"),
    Case(Layout(dp_shard=2, zero=1), "bf16"),
    Case(Layout(dp_shard=2, zero=2), "bf16", ema=0.9),
    Case(Layout(dp_shard=2, zero=2), "fp32"),
    Case(Layout(dp_shard=2, zero=3), "fp32"),
    Case(Layout(dp_shard=2, zero=3), "bf16", ema=0.9),
    Case(Layout(dp_shard=2, zero=3), "bf16", gather="once"),
    Case(Layout(dp_shard=2, zero=3), "bf16", offload="parameters"),
    Case(Layout(dp_shard=2, zero=3), "fp32", offload="optimizer"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"zero{c.layout.zero}-{c.precision}-{c.gather}-{c.offload}")
def test_storages_follow_the_formula_within_2_percent(ranks, case):
    # Storages that nobody accounts for fail too: it was red while hooks kept the buffers of engines before alive.
    expected = state_bytes(
        PARAMETERS,
        case.precision,
        case.layout,
        ema=case.ema > 0,
        bucket_bytes=BUCKET_MIB * 2**20,
        largest=WIDTH * WIDTH,
        outside=OUTSIDE,
        block=BLOCK,
        gather=case.gather,
        offload=case.offload,
    )
    for held in ranks(case.layout.world).run(held_by, case):
        for kind in ("weights", "gradients", "optimizer", "host", "gathered"):
            assert getattr(held, kind) == pytest.approx(getattr(expected, kind), rel=0.02), kind
        if case.layout.zero == 3:
            assert held.staging == pytest.approx(expected.staging, rel=0.02)
        else:
            assert 0.3 * expected.staging <= held.staging <= expected.staging
        # windows of an offloaded update are the only other large tensors
        assert held.unknown <= (4 * 4 * 2**22 if case.offload != "none" else 0)


def test_the_formula_and_the_engine_mean_the_same_number_of_buckets():
    assert BUCKETS_IN_FLIGHT == zero.LAG + 2
