"""Refused plans: each with its reason, and each in docs/parallelism.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.config.schema import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import REFUSALS, refused, refused_for

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
MODEL = ModelConfig(layers=6, width=64, heads=4, kv_heads=2, ffn=128, vocab=256)


def documented() -> list[tuple[str, str]]:
    section = PAGE.read_text(encoding="utf-8").split("## Refused")[1]
    return re.findall(r"^\| `([a-z_.]+)`.*? \| (.*) \|$", section, flags=re.MULTILINE)


def test_the_page_lists_exactly_what_is_refused():
    # Red when a refusal is added, dropped or reworded on one side only.
    assert documented() == [(refusal.key, refusal.why) for refusal in REFUSALS]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(Layout(dp_replicate=8)),
        Plan(Layout(dp_shard=2, zero=1)),
        Plan(Layout(dp_replicate=2, dp_shard=4, zero=2)),
        Plan(Layout(dp_replicate=2, dp_shard=2, zero=3, tp=2, pp=2), gather="once"),
        Plan(Layout(tp=2), sequence_parallel=False),
        Plan(Layout(cp=4)),
        Plan(Layout(cp=2, zero=3, tp=2, pp=2), context="ring"),
        Plan(Layout(pp=2), schedule="interleaved", chunks=3, split=(1, 1, 1, 1, 1, 1)),
        Plan(Layout(pp=2), schedule="zbv", chunks=2),
        Plan(Layout(pp=2), schedule="zero_bubble", chunks=2),
        Plan(Layout(dp_shard=2, zero=3), offload="parameters", recompute="full", recompute_every=2),
        Plan(Layout(dp_replicate=2, dp_shard=2, zero=2), graphs=True, offload="optimizer", compile="inductor"),
        Plan(Layout(dp_replicate=2, dp_shard=2, zero=3, pp=2), precision="fp8", schedule="1f1b"),
    ],
)
def test_plans_that_run_are_not_refused(plan):
    assert refused_for(plan, MODEL, "lm", 64) == []


REFUSED = {
    "layout.ep": Plan(Layout(ep=2)),
    "layout.zero": Plan(Layout(dp_replicate=2, zero=3)),
    "layout.dp_shard": Plan(Layout(dp_shard=2)),
    "gather": Plan(Layout(dp_shard=2, zero=2), gather="once"),
    "context": Plan(context="ring"),
    "sequence_parallel": Plan(sequence_parallel=False),
    "schedule": Plan(schedule="zbv"),
    "split": Plan(split=(3, 3)),
    "recompute_every": Plan(recompute_every=2),
    "offload_activations": Plan(offload_activations=True, recompute="selective"),
    "offload": Plan(Layout(dp_shard=2, zero=2), offload="parameters"),
    "precision": Plan(Layout(tp=2), precision="fp8"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_each_reason_is_found_with_its_value(key):
    found = [finding for finding in refused(REFUSED[key]) if finding.where == f"plan.{key}"]
    assert len(found) == 1 and found[0].fix
    assert found[0].what.endswith(next(refusal.why for refusal in REFUSALS if refusal.key == key))


def test_chunks_must_suit_the_schedule():
    pipeline = Plan(Layout(pp=2))
    for schedule, chunks, why in (
        ("1f1b", 2, "one stage a rank"),
        ("gpipe", 2, "one stage a rank"),
        ("interleaved", 1, "at least two"),
        ("zbv", 1, "two stages a rank"),
        ("zbv", 3, "two stages a rank"),
    ):
        (found,) = refused(replace(pipeline, schedule=schedule, chunks=chunks))
        assert found.where == "plan.chunks" and why in found.what
    assert {refusal.key for refusal in REFUSALS} == {*REFUSED, "chunks", "graphs"}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(Layout(tp=2), graphs=True), "exchange something"),
        (Plan(Layout(pp=2), graphs=True), "exchange something"),
        (Plan(Layout(cp=2), graphs=True), "exchange something"),
        (Plan(Layout(dp_replicate=2, ep=2), graphs=True), "exchange something"),
        (Plan(Layout(dp_shard=2, zero=3), graphs=True), "exchange something"),
        (Plan(graphs=True, recompute="selective"), "neither recomputed"),
        (Plan(graphs=True, offload_activations=True), "neither recomputed"),
    ],
)
def test_blocks_are_not_recorded_where_more_than_launches_is_needed(plan, why):
    (found,) = refused(plan)
    assert found.where == "plan.graphs" and why in found.what and found.fix
    assert not refused(replace(plan, graphs=False))


def test_only_our_own_dense_models_are_recorded():
    experts = MODEL.model_copy(update={"experts": 4, "experts_per_token": 2})
    for model in (experts, MODEL.model_copy(update={"arch": "mine"})):
        (found,) = refused_for(Plan(graphs=True), model, "lm", 64)
        assert found.where == "plan.graphs" and "own models without experts" in found.what


def test_fp8_is_not_split_and_puts_nothing_off():
    # Red without either refusal, and with cp or ep left out of the first.
    for layout in (Layout(tp=2), Layout(cp=2), Layout(dp_replicate=2, ep=2)):
        (found,) = refused(Plan(layout, precision="fp8"))
        assert found.where == "plan.precision" and "whole rows and matrices" in found.what
    for schedule, chunks in (("zero_bubble", 1), ("zbv", 2)):
        (found,) = refused(Plan(Layout(pp=2), precision="fp8", schedule=schedule, chunks=chunks))
        assert found.where == "plan.precision" and "put off" in found.what


def test_every_reason_at_once():
    found = refused(Plan(Layout(ep=2, zero=3), split=(3, 3), chunks=2))
    assert [finding.where for finding in found] == ["plan.layout.ep", "plan.layout.zero", "plan.split", "plan.chunks"]


def test_what_does_not_divide_is_named_with_the_nearest_that_does():
    heads = refused_for(Plan(Layout(tp=8)), MODEL, "lm", 64)
    assert "4 query heads" in heads[0].what and "tp: 4" in heads[0].fix
    (length,) = refused_for(Plan(Layout(tp=2)), MODEL, "lm", 63)
    assert length.where == "plan.sequence_parallel" and "63 tokens" in length.what and "tp 2" in length.what
    (layers,) = refused_for(Plan(Layout(pp=8)), MODEL, "lm", 64)
    assert "8 stages for 6 layers" in layers.what
    (mine,) = refused_for(Plan(Layout(pp=2)), MODEL.model_copy(update={"arch": "mine"}), "lm", 64)
    assert "'mine'" in mine.what
