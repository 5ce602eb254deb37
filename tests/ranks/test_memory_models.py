"""Bytes of weights, gradients and optimizer state on a rank where ranks have experts, or positions, of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from meshwright.config.schema import ModelConfig
from meshwright.parallel.apply import Engine
from meshwright.plan.memory import state_bytes
from meshwright.runtime.choose import layout_name
from meshwright.spec.counts import rank_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.verify.cases import Case as Training
from meshwright.verify.cases import run
from tests.parity.models import case_of
from tests.ranks.pool import joined, layout_mesh
from tests.ranks.test_memory import storages

SIZES = {"layers": 3, "width": 256, "heads": 4, "ffn": 768, "vocab": 1024}
"""Large enough that padding is below the 2%."""


@dataclass(frozen=True)
class Case:
    model: str
    layout: Layout
    precision: str = "fp32"


def trained(case: Case) -> Training:
    """A step of the small model of that name, grown to SIZES."""
    small = case_of(case.model, case.precision, steps=1)
    sizes = {**small.config.model.model_dump(), **SIZES, **({"moe_ffn": 256} if case.model == "moe" else {})}
    return replace(small, config=small.config.model_copy(update={"model": ModelConfig(**sizes)}))


def held_by(case: Case) -> dict[str, int]:
    found: dict[str, int] = {}

    def look(step: int, engine: Engine, scale: float) -> None:
        ranges = engine.parameters.ranges
        optimizer = [m for moments in engine.optimizer.moments for m in moments.values()]
        optimizer += [part.master for part in ranges if part.mixed]
        weights, gradients = [part.working for part in ranges], [part.gradient for part in ranges]
        for kind, tensors in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
            found[kind] = sum(storages(tensors).values())

    plan = Plan(layout=case.layout, precision=case.precision, micro_batch=4)
    run(trained(case), plan, layout_mesh(case.layout), joined(), look)
    return found


CASES = [
    Case("decoder", Layout(cp=2)),
    Case("decoder", Layout(cp=2, zero=1)),
    Case("decoder", Layout(cp=2, dp_shard=2, zero=3), "bf16"),
    Case("moe", Layout(dp_replicate=2, ep=2)),
    Case("moe", Layout(dp_shard=2, ep=2, zero=1), "bf16"),
    Case("moe", Layout(dp_shard=4, ep=2, zero=3)),
    Case("moe", Layout(dp_shard=2, ep=2, tp=2, zero=2)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{layout_name(case.layout)}-{case.precision}")
def test_storages_follow_the_formula_within_2_percent(ranks, case):
    # Red when cp does not join the shards of ZeRO (`Layout.shards`), and when experts count as cut over all of them.
    config = trained(case).config
    held = rank_parameters(config.model, "lm", case.layout)
    expected = state_bytes(
        held.total,
        case.precision,
        case.layout,
        moments=config.train.optimizer.moments,
        outside=held.outside,
        block=held.block,
        experts=held.experts,
        expert_block=held.expert_block,
    )
    for found in ranks(case.layout.world).run(held_by, case):
        for kind, size in found.items():
            assert size == pytest.approx(getattr(expected, kind), rel=0.02), kind
