"""Train under one layout, go on under another: a ring of thirteen, and pairs.

A hop loads what lies there, trains three steps and saves. Losses and norms must be those of one uninterrupted process, and
what was loaded, moments included, its state at that step. Mutations tried, each red: `load_extra` left out (the moments'
correction starts anew), `consumed` not carried (other rows), `exp_avg_sq` not loaded, and weights that are
another 1e-4 after the load.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import CheckpointStore
from meshwright.distributed.environment import World
from meshwright.distributed.world import Ranks, init_world
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused
from meshwright.train.context import Context
from meshwright.train.state import TrainState
from meshwright.verify.cases import Trace, opened, run, steps_of
from meshwright.verify.compare import compare_pieces
from meshwright.verify.layouts import CHUNKS
from meshwright.verify.reference import Reference
from tests.parity.models import ROWS, case_of, fill
from tests.ranks.pool import Pools, joined, layout_mesh

HOP = 3
"""Steps of a hop."""


def planned(layout: Layout, schedule: str = "1f1b", micro_batch: int = 4, **changed: Any) -> Plan:
    chunks = CHUNKS[schedule] if layout.pp > 1 else 1
    return Plan(layout, micro_batch, "fp64", schedule=schedule, chunks=chunks, bucket_mib=1, **changed)


RING = [
    planned(Layout()),
    planned(Layout(dp_replicate=2)),
    planned(Layout(dp_shard=4, zero=1)),
    planned(Layout(tp=2)),
    planned(Layout(dp_shard=2, zero=3)),
    planned(Layout(pp=2), "1f1b"),
    planned(Layout(dp_replicate=2, dp_shard=2, zero=2), recompute="full"),
    planned(Layout(tp=2, pp=2), "zero_bubble"),
    planned(Layout(dp_shard=2, zero=3, tp=2, pp=2), "interleaved"),
    planned(Layout(dp_shard=2, zero=3, pp=2), "gpipe"),
    planned(Layout(dp_replicate=2, dp_shard=2, zero=3)),
    planned(Layout(dp_shard=2, zero=1, tp=2), sequence_parallel=False),
    planned(Layout(dp_shard=2, cp=2, zero=3), context="ring"),
]
MODEL = "tied"


@dataclass(frozen=True)
class Hop:
    """root: of the checkpoints. load: the step that is loaded, 0 for none. keep: the checkpoint is saved."""

    root: str
    model: str
    plan: Plan
    load: int
    keep: bool = True


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    apart: float
    """Largest difference of what was loaded, moments included, to one process."""
    read: int
    block: int
    """Bytes that this rank read, and the largest single piece that it allocated for reading."""
    held: int


def hop(job: Hop, known: Reference | None, single: bool = False) -> Result:
    """On every rank: load, train, save. known: the state that must be loaded."""
    if not single:
        return _hop(job, known, joined(), layout_mesh(job.plan.layout))
    with init_world(World(), "cpu") as alone:
        return _hop(job, known, alone, None)


def _hop(job: Hop, known: Reference | None, ranks: Ranks, mesh: Any) -> Result:
    case = replace(case_of(job.model), fill=_elsewhere if job.load else fill)
    group = ranks.checkpoint if ranks.size > 1 else None
    with (
        CheckpointStore(job.root, group=group, rank=ranks.rank, world=ranks.size, keep=1000) as store,
        opened(case, job.plan, mesh, ranks) as context,
    ):
        engine, apart = context.engine, 0.0
        if job.load:
            _restore(context, store, job)
            assert known is not None
            apart = max(worst.value for worst in compare_pieces(engine.parameters_state(), known.state).values())
        results = list(steps_of(context, HOP, single=ranks.size == 1))
        if job.keep:
            context.state.engine = engine.extra_state()
            meta = {"state": context.state.to_dict()}
            store.save(context.state.step, engine.parameters_state(), meta, background=False)
        held = sum(piece.tensor.nbytes for piece in engine.parameters_state())
        return Result(
            [float(result.loss) for result in results],
            [float(result.grad_norm) for result in results],
            apart,
            store.last_load.bytes_read,
            store.last_load.largest,
            held,
        )


def _restore(context: Context, store: CheckpointStore, job: Hop) -> None:
    meta = store.load(Path(job.root) / f"step-{job.load:08d}", context.engine.parameters_state())
    context.engine.after_load()
    context.state = TrainState.from_dict(meta["state"])
    context.engine.load_extra(context.state.engine)


def _elsewhere(model: torch.nn.Module) -> None:
    """Other values than those of the run: what a load leaves out is seen."""
    fill(model)
    for parameter in model.parameters():
        parameter.data.mul_(-0.5)


@functools.cache
def uninterrupted(model: str, hops: int) -> tuple[list[float], list[float], dict[int, Reference]]:
    """Losses, norms, and the state after every hop, of one process."""
    states: dict[int, Reference] = {}

    def look(step: int, engine: Engine, scale: float) -> None:
        if (step + 1) % HOP == 0:
            whole = {piece.name: piece.tensor.clone() for piece in engine.parameters_state()}
            states[step + 1] = Reference(Trace(), state=whole)

    case = replace(case_of(model), steps=hops * HOP)
    with init_world(World(), "cpu") as ranks:
        trace = run(case, Plan(Layout(), ROWS, "fp64", overlap=False), None, ranks, look)
    return trace.losses, trace.norms, states


def go(ranks: Pools, job: Hop, hops: int) -> list[Result]:
    """One hop, compared with the uninterrupted run."""
    losses, norms, states = uninterrupted(job.model, hops)
    known, world = states.get(job.load), job.plan.layout.world
    results = [hop(job, known, True)] if world == 1 else ranks(world).run(hop, job, known, timeout=120.0)
    part = slice(job.load, job.load + HOP)
    largest = max((tensor.nbytes for tensor in states[HOP].state.values()), default=0)
    for result in results:
        assert result.losses == pytest.approx(losses[part], rel=0, abs=1e-9), (job.load, job.plan)
        assert result.norms == pytest.approx(norms[part], rel=0, abs=1e-9), (job.load, job.plan)
        assert result.apart <= 1e-9, (job.load, job.plan)
        if job.load:
            assert 0 < result.read <= result.held + largest, "a rank reads its shard"
            assert result.block <= largest, "and holds one tensor at most beside it"
    return results


def test_a_run_goes_round_the_ring(ranks, tmp_path):
    ring = [*RING, RING[0]]  # and back to where it began
    for number, plan in enumerate(ring):
        go(ranks, Hop(str(tmp_path), MODEL, plan, number * HOP), len(ring))


def test_the_ring_has_thirteen_layouts_of_every_kind():
    layouts = [plan.layout for plan in RING]
    assert len(set(layouts)) == 13 and {layout.world for layout in layouts} == {1, 2, 4, 8}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert len({plan.schedule for plan in RING if plan.layout.pp > 1}) == 4
    assert [refused(plan) for plan in RING if refused(plan)] == []


PAIRS = random.Random(5).sample([(a, b) for a, b in itertools.permutations(range(13), 2)], 20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Folder of a checkpoint of three steps, by the layout that made it."""
    return {number: str(tmp_path_factory.mktemp(f"from-{number}")) for number in range(13)}


def pair(ranks: Pools, saved: dict[int, str], first: int, second: int) -> None:
    """The model with dropout, so that the streams of random numbers are carried too."""
    if not (Path(saved[first]) / f"step-{HOP:08d}").exists():
        go(ranks, Hop(saved[first], "dropout", RING[first], 0), 2)
    go(ranks, Hop(saved[first], "dropout", RING[second], HOP, keep=False), 2)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair(ranks, saved, first, second):
    pair(ranks, saved, first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [each for each in itertools.permutations(range(13), 2) if each not in PAIRS])
def test_every_other_pair(ranks, saved, first, second):
    pair(ranks, saved, first, second)


def scales(root: str, plan: Plan, load: int) -> tuple[list[float], float]:
    """On every rank: three fp16 steps with a scale that grows every second one, saved. Scales, and the one that is next."""
    ranks = joined()
    section = {"initial": 256.0, "interval": 2, "growth": 2.0}
    case = case_of("decoder", "fp16", loss_scale=section)
    with (
        CheckpointStore(root, group=ranks.checkpoint, rank=ranks.rank, world=ranks.size) as store,
        opened(case, plan, layout_mesh(plan.layout), ranks) as context,
    ):
        if load:
            _restore(context, store, Hop(root, "decoder", plan, load))
        used = [result.loss_scale for result in steps_of(context, HOP, single=False)]
        context.state.engine = context.engine.extra_state()
        store.save(context.state.step, context.engine.parameters_state(), {"state": context.state.to_dict()}, background=False)
        return used, context.engine.loss_scale


def test_the_loss_scaler_goes_on_from_layout_to_layout(ranks, tmp_path):
    # 256 256 512 | 512 1024 1024 | 2048: grown after every two good steps, over the border of the hops.
    first, second = (
        replace(plan, precision="fp16") for plan in (planned(Layout(dp_replicate=2)), planned(Layout(dp_shard=4, zero=2)))
    )
    assert ranks(2).run(scales, str(tmp_path), first, 0) == [([256.0, 256.0, 512.0], 512.0)] * 2
    assert ranks(4).run(scales, str(tmp_path), second, HOP) == [([512.0, 1024.0, 1024.0], 2048.0)] * 4
