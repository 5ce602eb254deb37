"""fp16: an infinite gradient on any one rank skips the step on every rank, halves the scale on all and changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.distributed.piece import Piece
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.verify.cases import opened, steps_of
from meshwright.verify.layouts import CHUNKS
from tests.parity.models import case_of
from tests.ranks.pool import joined, layout_mesh

LAYOUTS = [
    (Layout(dp_replicate=2), ""),
    (Layout(dp_shard=2, zero=1), ""),
    (Layout(dp_replicate=2, dp_shard=2, zero=2), ""),
    (Layout(dp_shard=2, zero=3), ""),
    (Layout(tp=2), ""),
    (Layout(pp=2), "1f1b"),
    (Layout(pp=2), "zbv"),
    (Layout(tp=2, pp=2), "zero_bubble"),
    (Layout(dp_shard=2, zero=3, pp=2), "interleaved"),
    (Layout(dp_shard=2, zero=3, tp=2, pp=2), "1f1b"),
]


def copies(engine: Engine) -> list[Piece]:
    return [Piece(p.name, p.tensor.clone(), p.shape, p.offset) for p in engine.parameters_state()]


def overflow_on_each(plan: Plan) -> list[tuple[int, list[bool], list[float], bool, bool, int]]:
    """On every rank, for each victim in turn: (victim, skipped, scales, bits unchanged, changed by the good step, updates)."""
    case, out = case_of("tied", "fp16", loss_scale={"initial": 1024.0}), []
    with opened(case, plan, layout_mesh(plan.layout), joined()) as context:
        engine = context.engine
        for victim in range(dist.get_world_size()):
            before = copies(engine)
            hook: Any = None
            if dist.get_rank() == victim:
                # every stage has one, and no schedule puts its gradient off
                parameter = next(slot.parameter for slot in engine.parameters.slots if "norm" in slot.name)
                hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
            bad = next(steps_of(context, 1, single=False))
            if hook is not None:
                hook.remove()
            same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(before, copies(engine), strict=True))
            good = next(steps_of(context, 1, single=False))
            moved = any(not torch.equal(a.tensor, b.tensor) for a, b in zip(before, copies(engine), strict=True))
            skipped = [bool(bad.skipped), bool(good.skipped)]
            scales = [bad.loss_scale, good.loss_scale]
            out.append((victim, skipped, scales, same, moved, int(engine.extra_state()["updates"])))
    return out


@pytest.mark.parametrize(("layout", "schedule"), LAYOUTS, ids=lambda value: str(value))
def test_an_infinite_gradient_on_any_rank_skips_the_step_on_all(ranks, layout, schedule):
    # Red when ranks decide by their own norm (`agree_any` replaced by its argument and `reduce_sum` by its value).
    chunks = CHUNKS[schedule] if schedule else 1
    plan = Plan(layout, micro_batch=4, precision="fp16", schedule=schedule or "1f1b", chunks=chunks)
    scale = 1024.0
    expected = []
    for victim in range(layout.world):
        expected.append((victim, [True, False], [scale, scale / 2], True, True, victim + 1))
        scale /= 2
    assert ranks(layout.world).run(overflow_on_each, plan) == [expected] * layout.world
