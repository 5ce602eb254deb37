"""Operations, bytes and refusals of a model of experts, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from meshwright.config.schema import ModelConfig
from meshwright.observe.flops import MatmulWeights, flops_per_token, matmul_weights
from meshwright.plan.memory import StateBytes, state_bytes
from meshwright.spec.counts import RankParameters, rank_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused, refused_for
from meshwright.spec.sharding import nearest_divisors
from meshwright.spec.stages import layer_costs
from meshwright.verify.layouts import layouts, plans

MODEL = ModelConfig(layers=4, width=64, heads=4, kv_heads=2, ffn=128, moe_ffn=32, experts=6, experts_per_token=2, vocab=256)


def test_operations_by_hand():
    # a layer: q, out 64*64 each, k and v 64*32 each = 12,288; router 6*64 = 384; an expert 3*32*64 = 6,144, two of them
    # Red when all six experts multiply.
    layer = 12_288 + 384 + 2 * 6_144
    assert matmul_weights(MODEL) == MatmulWeights(blocks=4 * layer, head=256 * 64)
    assert flops_per_token(MODEL, 100) == 6 * (4 * layer + 256 * 64) + 12 * 4 * 64 * 50
    assert layer_costs(MODEL, "lm", 100).layers == (6.0 * layer * 100 + 12 * 64 * 100 * 100 / 2,) * 4


def test_parameters_of_the_fullest_rank_by_hand():
    # experts of a layer 6 * 6,144 = 36,864; the rest of it 12,288 + 384 + 2 norms of 64; ends 2 * 16,384, and the last norm of
    # 64, which is taken to be spread over the layers
    rest = 12_288 + 384 + 128 + 16
    assert rank_parameters(MODEL, "lm", Layout(dp_replicate=3, ep=3)) == RankParameters(
        4 * (rest + 12_288) + 32_768, 32_768, rest + 12_288, 4 * 12_288, 12_288
    )
    halved = rank_parameters(MODEL, "lm", Layout(dp_replicate=2, ep=2, tp=2))
    assert (halved.experts, halved.expert_block, halved.block) == (4 * 9_216, 9_216, rest // 2 + 9_216)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # of 1000 parameters 600 are experts'. bf16: 2 bytes, gradients 4, masters and two moments 12
        (Layout(dp_replicate=4, ep=2), StateBytes(2000, 4000, 12000)),
        (Layout(dp_shard=4, zero=1, ep=2), StateBytes(2000, 4000, 12 * (100 + 300))),
        (Layout(dp_shard=4, zero=1, ep=4), StateBytes(2000, 4000, 12 * (100 + 600))),
        (Layout(dp_shard=4, zero=2, ep=2), StateBytes(2000, 4 * 400, 12 * 400, 40)),
        (Layout(dp_shard=4, zero=3, ep=2), StateBytes(2 * 400, 4 * 400, 12 * 400, 4 * 500, 2 * 500)),
        (Layout(dp_shard=4, zero=3, ep=4), StateBytes(2 * 700, 4 * 700, 12 * 700, 4 * 500, 2 * (500 - 300))),
    ],
)
def test_bytes_of_a_thousand_parameters_by_hand(layout, expected):
    # outside 100, a block 200, of which 150 are experts'. Red when experts are cut among all of dp_shard.
    found = state_bytes(1000, "bf16", layout, bucket_bytes=10, outside=100, block=200, experts=600, expert_block=150)
    assert found == expected


def test_what_does_not_divide_is_named_with_the_nearest_that_does():
    def said(layout: Layout, model: ModelConfig = MODEL) -> str:
        (finding,) = refused_for(Plan(layout), model, "lm", 64)
        return str(finding)

    assert "6 experts (model.experts) do not divide by 4. Use ep: 2" in said(Layout(dp_replicate=4, ep=4))
    assert "12 ranks, but only 6 experts: a rank would have none. Use ep: 6" in said(Layout(dp_replicate=12, ep=12))
    assert "model.experts is 0" in said(Layout(dp_replicate=2, ep=2), ModelConfig(vocab=9))
    (finding,) = refused(Plan(Layout(dp_replicate=6, ep=4)))
    assert "4, but experts live on data ranks" in finding.what and finding.fix == "Of 6 data ranks, use ep: 3 or 6"
    (finding,) = refused(Plan(Layout(dp_replicate=3, dp_shard=4, zero=1, ep=6)))
    assert finding.fix == "Use ep: 4, or a multiple of 4"
    assert any("split" in str(found) and "cp: 1" in str(found) for found in refused_for(Plan(Layout(cp=2)), MODEL, "lm", 64))
    (finding,) = refused_for(Plan(Layout(dp_replicate=2, ep=2)), MODEL.model_copy(update={"arch": "mine"}), "lm", 64)
    assert "ep 2" in finding.what and "'mine'" in finding.what
    assert nearest_divisors(5, 12, 6) == "3 or 6" and nearest_divisors(7, 6) == "6"


def test_verify_deals_experts_in_every_way():
    assert {layout.ep for layout in layouts(4)} == {1} and {layout.ep for layout in layouts(8, 6)} == {1, 2}
    assert {(layout.dp, layout.ep) for layout in layouts(4, 8)} >= {(4, 4), (4, 2), (2, 2)}
    tried = plans(4, Plan(), MODEL, "lm", 64, 8)
    assert tried and all(not refused_for(plan, MODEL, "lm", 64) for plan in tried)
    assert {plan.layout.ep for plan in tried if plan.layout.zero == 3 and plan.layout.tp == 1} == {1, 2}
    assert all(math.gcd(6, plan.layout.dp) % plan.layout.ep == 0 for plan in tried)
