"""What `meshwright verify` is made of: comparison, coverage, the choice of plans."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import ModelConfig
from meshwright.distributed.piece import Piece
from meshwright.errors import LayoutError
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused
from meshwright.verify.cases import CompiledBlocks
from meshwright.verify.compare import Worst, compare_numbers, compare_pieces, geometry_of, uncovered
from meshwright.verify.cover import pairs_of, pairwise
from meshwright.verify.layouts import describe, factors, layouts, load_plans, plans, select
from tests.parity.models import MODELS, config_of

MODEL = ModelConfig(layers=4)


def piece(values: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], owner: bool = True) -> Piece:
    return Piece("model/w", values, shape, offset, owner)


def test_a_difference_is_a_share_of_the_largest_element_of_the_whole_tensor():
    whole = {"model/w": torch.tensor([[1.0, 2.0], [4.0, -8.0]], dtype=torch.float64)}
    block = torch.tensor([[4.0, -8.5]], dtype=torch.float64)
    assert compare_pieces([piece(block, (1, 0), (2, 2))], whole) == {"weight": Worst(0.5 / 8, "w")}
    assert compare_pieces([piece(block * 2, (1, 0), (2, 2))], whole, "step 1", 0.5)["weight"] == Worst(0.5 / 8, "w, step 1")
    assert compare_pieces([piece(block, (0, 0), (1, 2))], whole)["weight"].value == math.inf, "another shape"
    assert compare_pieces([piece(block * math.nan, (1, 0), (2, 2))], whole)["weight"].value == math.inf
    assert compare_pieces([piece(block, (1, 0), (2, 2), owner=False)], whole) == {}
    assert compare_pieces([piece(block, (1, 0), (2, 2))], {}) == {}


def test_numbers_are_compared_relatively_and_infinity_is_like_infinity():
    assert compare_numbers([2.0, 4.0], [2.0, 5.0]) == Worst(0.2, "step 2")
    assert compare_numbers([math.inf, math.nan], [math.inf, math.nan]).value == 0.0
    assert compare_numbers([math.inf], [1.0]).value == compare_numbers([math.nan], [1.0]).value == math.inf


def test_what_no_rank_holds_is_named():
    # Red when names alone are compared, and when two halves that overlap count as a whole.
    half = torch.zeros(1, 2)
    upper, lower = geometry_of([piece(half, (0, 0), (2, 2))]), geometry_of([piece(half, (1, 0), (2, 2))])
    assert uncovered([upper, lower], ["model/w"]) == []
    assert "2 of 4 elements" in uncovered([upper, upper], ["model/w"])[0]
    assert uncovered([upper, lower], ["model/w", "model/b"]) == ["model/b is held by no rank"]
    assert uncovered([upper, lower], []) == ["model/w is not in the reference"]


@given(st.lists(st.fixed_dictionaries({name: st.integers(0, 2) for name in "abcd"}), min_size=1, max_size=40))
def test_chosen_cases_hold_every_pair_of_all_cases(cases):
    chosen = pairwise(cases)
    union = set().union(*map(pairs_of, cases))
    assert union == set().union(*(pairs_of(cases[index]) for index in chosen)) and len(set(chosen)) == len(chosen)
    assert pairwise(cases) == chosen and pairwise(cases, [0])[0] == 0


def test_a_covering_choice_is_small():
    cases = [dict(zip("abcd", values, strict=True)) for values in itertools.product(range(3), repeat=4)]
    assert len(pairwise(cases)) <= 13, "nine at best, of 81"


@pytest.mark.parametrize("world", [1, 2, 4, 8, 6])
def test_layouts_are_all_that_run(world):
    found = layouts(world)
    assert len(set(found)) == len(found) and all(layout.world == world and not refused(Plan(layout)) for layout in found)
    wanted = {Layout(dp_replicate=world)} | ({Layout(dp_shard=world, zero=2)} if world > 1 else set())
    assert wanted <= set(found)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_chosen_plans_meet_every_layout_and_every_two_choices(world):
    every = plans(world, Plan(micro_batch=64), MODEL, "lm", 64, 16)
    chosen = select(every, 16)
    assert {plan.layout for plan in chosen} == {plan.layout for plan in every}
    union = set().union(*(pairs_of(factors(plan, 16)) for plan in every))
    assert union == set().union(*(pairs_of(factors(plan, 16)) for plan in chosen)) and len(chosen) <= len(every)
    assert all(plan.micro_batch <= 5 for plan in plans(world, Plan(micro_batch=5), MODEL, "lm", 64, 64))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "is nested too deeply"),
        (b'[{"micro_batch": ' + b"1" * 5000 + b"}]", "has a number of too many digits"),
        (b"[\xff]", "is not UTF-8 at byte 1"),
        (b'[{"layot": {}}]', "plan 1: unknown key 'layot'"),
    ],
)
def test_a_file_of_nonsense_is_told_in_plain_words_and_its_name_once(text, words, tmp_path):
    # Red with Python's own words, and with the place in front of what names it already.
    path = tmp_path / "plans.json"
    path.write_bytes(text)
    config = config_of(next(iter(MODELS)))
    with pytest.raises(LayoutError) as caught:
        load_plans(str(path), 2, Plan(Layout(dp_replicate=2)), config.model, "causal_lm", 32)
    assert words in str(caught.value) and str(caught.value).count(str(path)) == 1


def test_a_file_of_plans_says_what_is_wrong_with_each(tmp_path):
    base = Plan(Layout(dp_replicate=2), micro_batch=3, precision="fp64")
    path = tmp_path / "plans.json"
    path.write_text(json.dumps([{"layout": {"dp_shard": 2, "zero": 1}}, {"layout": {"dp_replicate": 2}, "overlap": False}]))
    found = load_plans(str(path), 2, base, MODEL, "lm", 64)
    assert [plan.layout for plan in found] == [Layout(dp_shard=2, zero=1), Layout(dp_replicate=2)]
    assert all(plan.micro_batch == 3 and plan.precision == "fp64" for plan in found) and not found[1].overlap
    path.write_text(
        json.dumps([{"layout": {"dp_replicate": 4}}, {"typo": 1}, {"layout": {"dp_shard": 2}}, 3, {"precision": "fp32"}])
    )
    with pytest.raises(LayoutError) as caught:
        load_plans(str(path), 2, base, MODEL, "lm", 64)
    said = str(caught.value)
    for words in (
        "plan 1: is for 4 ranks, but 2",
        "plan 2: ",
        "'typo'",
        "nothing is sharded",
        "plan 4: is no JSON",
        "precision fp32",
    ):
        assert words in said, said
    for text, words in (("[]", "holds no plan"), ("{", "is not JSON")):
        path.write_text(text)
        with pytest.raises(LayoutError, match=words):
            load_plans(str(path), 2, base, MODEL, "lm", 64)
    with pytest.raises(LayoutError, match="cannot be read"):
        load_plans(str(tmp_path / "none.json"), 2, base, MODEL, "lm", 64)


def test_plans_in_words():
    plan = Plan(Layout(pp=2, dp_shard=2, tp=2, zero=3), micro_batch=2, schedule="zbv", chunks=2, recompute="full")
    assert describe(plan, 8) == ("zero3 pp 2 x dp_shard 2 x tp 2", "zbv x 2, sequence parallel, 2 micro-steps, full recompute")
    assert describe(Plan(), 1) == ("one rank", "")


def test_the_models_of_the_array_are_the_kinds_that_must_be_proven():
    kinds = {name: config_of(name).model for name in MODELS}
    assert {name for name, model in kinds.items() if model.tied} == {"tied", "dropout", "mlm"}
    assert {model.kv_heads or model.heads for model in kinds.values()} >= {1, 2, 4}
    assert kinds["plain"].norm_order == "post" and kinds["dropout"].dropout and not kinds["gqa"].dropout


def test_compiled_blocks_are_forgotten_where_the_next_plan_cannot_run_them(monkeypatch):
    # Red when the way of context parallelism is left out of `compiled_alike`.
    forgotten = []
    monkeypatch.setattr("torch.compiler.reset", lambda: forgotten.append(1))
    blocks, cp = CompiledBlocks(), Layout(cp=2)
    for plan, model, count in (
        (Plan(cp, context="ring"), "a", 0),
        (Plan(cp, context="ring", compile="eager"), "a", 1),
        (Plan(cp, context="ring", compile="eager", recompute="full"), "a", 1),
        (Plan(cp, context="all_to_all"), "a", 1),
        (Plan(cp, context="all_to_all", compile="eager"), "a", 2),
        (Plan(cp, context="all_to_all", compile="eager"), "b", 3),
    ):
        blocks.prepare_for(plan, model)
        assert len(forgotten) == count
