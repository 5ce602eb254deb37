"""Experts on several ranks: where they lie, what a planted imbalance does, what is counted, what a resume brings."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.models.moe import MoE
from meshwright.parallel.expert import expert_rows
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.verify.cases import opened, steps_of
from tests.parity.cells import Cell, limits_of, run_cell
from tests.parity.models import case_of
from tests.ranks.pool import joined, layout_mesh
from tests.ranks.test_resume_ring import Hop, go, planned

EP2, EP4 = Layout(dp_replicate=2, ep=2), Layout(dp_shard=4, zero=1, ep=4)


def test_who_shares_experts_with_whom():
    # 8 data ranks as 2 x 4. Red when ep ranks are taken with a stride.
    rows = expert_rows(range(10, 18), 4, 2)
    assert rows["ep"] == [[10, 11], [12, 13], [14, 15], [16, 17]]
    assert rows["data"] == [[10, 12, 14, 16], [11, 13, 15, 17]]
    assert rows["shards"] == [[10, 12], [11, 13], [14, 16], [15, 17]]
    assert rows["replicas"] == [[10, 14], [11, 15], [12, 16], [13, 17]]
    wide = expert_rows(range(8), 2, 4)  # experts over two dp_shard groups: nobody shares a piece
    assert wide["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and wide["data"] == wide["replicas"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all(len(row) == 1 for row in wide["shards"])


def collectives(favourite: int | None, layout: Layout) -> tuple[list[str], torch.Tensor, list[float], int]:
    """On every rank: what it called in a step and on how many ranks, load by expert, losses, dropped. favourite: the expert
    that all tokens choose first; the last one is chosen by none."""
    called: list[str] = []
    case = case_of("moe", steps=2)

    def watched(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            group = options.get("group")
            called.append(f"{name} {0 if group is None else group.size()}")
            return real(*args, **options)

        return mock.patch.object(dist, name, call)

    with opened(case, Plan(layout, micro_batch=4, precision="fp64"), layout_mesh(layout), joined()) as context:
        layers = [module for module in context.engine.model.modules() if isinstance(module, MoE)]
        with contextlib.ExitStack() as stack:
            for name in ("all_to_all_single", "all_reduce", "broadcast"):
                stack.enter_context(watched(name))
            if favourite is not None:
                for layer in layers:
                    layer.router.bias = torch.zeros(8, dtype=torch.float64)
                    layer.router.bias[favourite], layer.router.bias[7] = 10.0, -10.0
            losses = [float(result.loss) for result in steps_of(context, 2, single=False)]
        counts = context.engine.balance.counts()
        return called, counts[:, :-1], losses, int(counts[:, -1].sum())


@pytest.mark.parametrize("layout", [EP2, EP4], ids=["ep2", "ep4-zero1"])
def test_a_planted_imbalance_changes_no_collective_and_loses_no_token(ranks, layout):
    # Red when rows that came are taken to lie by expert, then by rank.
    plain = ranks(layout.world).run(collectives, None, layout)
    planted = ranks(layout.world).run(collectives, 0, layout)
    assert [rank[0] for rank in plain] == [rank[0] for rank in planted]
    assert all(rank[0] == plain[0][0] for rank in plain) and "all_to_all_single" in plain[0][0][0] + plain[0][0][5]
    total = int(plain[0][1][0].sum())
    at_home = ranks(layout.world).run(collectives, 0, replace(layout, ep=1))[0][2]
    for _, load, losses, dropped in planted:
        assert (load[:, 0] == total // 2).all() and not load[:, 7].any(), "all chose it, and none the last"
        assert (load.sum(1) == total).all() and dropped == 0
        assert losses == pytest.approx(at_home, rel=1e-12, abs=0)


@pytest.mark.parametrize("layout", ["data", "ep2", "ep2-tp2", "ep2-pp2", "ep2-zero3"])
def test_biases_and_capacity_are_those_of_one_device(ranks, layout):
    # Loads of 3 micro-steps and 2 or 4 data ranks move the biases, which are compared as weights are; blocks run twice.
    # Red when a rank moves them by its own loads.
    cell = Cell("moe-bias", layout, "1f1b" if "pp" in layout else "", accumulation=3, recompute="full")
    assert run_cell(ranks, cell).over(limits_of(cell)) == []


def overflown(layout: Layout) -> tuple[bool, bool, bool, list[torch.Tensor]]:
    """On every rank: skipped, and whether weights and biases stayed, after an infinite gradient of one expert of one rank; the
    biases of the step after."""
    case = case_of("moe-bias", "fp16", loss_scale={"initial": 64.0})
    with opened(case, Plan(layout, micro_batch=4, precision="fp16"), layout_mesh(layout), joined()) as context:
        engine = context.engine
        layers = [module for module in engine.model.modules() if isinstance(module, MoE)]
        before = [piece.tensor.clone() for piece in engine.parameters_state()]
        hook: Any = None
        if dist.get_rank() == layout.world - 1:
            hook = layers[0].experts.down.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
        bad = next(steps_of(context, 1, single=False))
        if hook is not None:
            hook.remove()
        same = all(torch.equal(a, piece.tensor) for a, piece in zip(before, engine.parameters_state(), strict=True))
        good = next(steps_of(context, 1, single=False))
        return bool(bad.skipped), same, bool(good.skipped), [layer.router.bias.clone() for layer in layers]


@pytest.mark.parametrize("layout", [EP2, replace(EP2, tp=2)], ids=["ep2", "ep2-tp2"])
def test_an_infinite_gradient_of_one_expert_skips_the_step_everywhere(ranks, layout):
    # Red when the norm leaves out other ranks' experts, and when biases move in a step that is skipped.
    found = ranks(layout.world).run(overflown, layout)
    for skipped, same, again, biases in found:
        assert (skipped, same, again) == (True, True, False)
        assert all(torch.equal(a, b) for a, b in zip(biases, found[0][3], strict=True)) and any(bias.any() for bias in biases)


RING = [
    planned(Layout()),
    planned(EP2),
    planned(Layout(dp_shard=4, zero=3, ep=2)),
    planned(Layout(tp=2)),
    planned(Layout(dp_replicate=2, ep=2, pp=2), "1f1b"),
    planned(Layout(dp_shard=2, zero=2)),
    planned(EP4),
    planned(Layout(dp_replicate=2, ep=2, tp=2)),
    planned(Layout()),
]


def test_a_run_of_experts_goes_round_a_ring(ranks, tmp_path: Path):
    # Red when a rank names its experts from 0 on in a checkpoint, and when biases are not kept.
    for number, plan in enumerate(RING):
        go(ranks, Hop(str(tmp_path), "moe-bias", plan, number * 3), len(RING))


def out_of_step(layout: Layout) -> tuple[str | None, str | None]:
    case = case_of("moe")
    with opened(case, Plan(layout, micro_batch=4, precision="fp64"), layout_mesh(layout), joined()) as context:
        next(steps_of(context, 1, single=False))
        before = context.engine.sync_check()
        if dist.get_rank() == 0:
            group, slot = next(each for each in context.engine.parameters.each() if "1.mlp.experts.up" in each[1].name)
            slot.of(group.working)[0, 0, 0] += 1.0
        return before, context.engine.sync_check()


def test_a_copy_of_an_expert_that_differs_is_named(ranks):
    # Red when experts are compared over all data ranks (other experts differ).
    assert ranks(4).run(out_of_step, Layout(dp_replicate=4, ep=2)) == [(None, "layers.1.mlp.experts.up")] * 4
