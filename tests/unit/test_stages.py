"""Splitting layers over pipeline stages.

`stage_splits.txt` holds the layers of each stage of every shipped recipe. After a wanted change write it anew with
`python -m tests.unit.test_stages`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.recipes import recipe, recipes
from meshwright.config.schema import ModelConfig
from meshwright.observe.flops import flops_per_token
from meshwright.spec.stages import balance, check_split, layer_costs, rebalance, spans

costs = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7)
extra = st.floats(0.0, 20.0)


def stage_costs(split, layers, first, last):
    out = [sum(layers[a:b]) for a, b in spans(split)]
    out[0] += first
    out[-1] += last
    return out


# a table without `last`, or with a stage of no layers, is red
@settings(max_examples=60, deadline=None)
@given(costs, extra, extra, st.data())
def test_no_split_has_a_cheaper_dearest_stage(layers, first, last, data):
    stages = data.draw(st.integers(1, len(layers)))
    split = balance(layers, first, last, stages)
    assert sum(split) == len(layers) and len(split) == stages and min(split) >= 1
    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(layers)))) for cut in cuts]
    best = min(max(stage_costs(other, layers, first, last)) for other in every)
    assert max(stage_costs(split, layers, first, last)) == pytest.approx(best, rel=1e-9)


def test_known_splits():
    assert balance([1.0] * 5, 0.0, 0.0, 2) == (3, 2)
    assert balance([1.0] * 8, 0.0, 0.0, 4) == (2, 2, 2, 2)
    assert balance([1.0] * 10, 0.0, 0.0, 4) == (3, 3, 2, 2)
    assert balance([1.0] * 16, 0.0, 2.0, 4) == (5, 5, 4, 2), "the head is worth two layers"
    assert balance([1.0] * 4, 0.0, 50.0, 3) == (2, 1, 1), "the head alone is the dearest: the rest is kept alike"
    assert balance([1.0] * 3, 9.0, 9.0, 1) == (3,)
    assert spans((3, 2)) == ((0, 3), (3, 5))


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="3 layers are no 4 stages"):
        balance([1.0] * 3, 0.0, 0.0, 4)
    (finding,) = check_split((), 3, 4)
    assert finding.where == "layout.pp" and "4 stages for 3 layers" in finding.what and "<= 3" in finding.fix


def test_a_split_that_does_not_fit_is_refused_with_all_findings():
    assert check_split((), 8, 4) == [] and check_split((3, 3, 1, 1), 8, 4) == []
    wrong = check_split((4, 0, 5), 8, 4)
    assert [finding.where for finding in wrong] == ["plan.split"] * 3
    assert "[4, 0, 5] has 3 stages, the layout has 4" in wrong[0].what
    assert "without a layer" in wrong[1].what
    assert "9 layers, the model 8" in wrong[2].what and wrong[2].fix == "e.g. [2, 2, 2, 2]"


MODELS = {
    "decoder": (ModelConfig(arch="decoder", layers=3, width=48, heads=4, kv_heads=2, ffn=96, vocab=500), "lm"),
    "window": (ModelConfig(arch="decoder", layers=2, width=48, heads=4, ffn=96, vocab=500, sliding_window=9), "lm"),
    "encoder": (ModelConfig(arch="encoder", layers=2, width=32, heads=4, ffn=64, vocab=90, head_transform=True), "mlm"),
    "classifier": (
        ModelConfig(arch="encoder", layers=2, width=32, heads=4, ffn=64, vocab=90, classes=5, pooler=True),
        "classify",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_the_operations_of_the_flop_count(name):
    config, task = MODELS[name]
    found = layer_costs(config, task, 24)
    assert len(found.layers) == config.layers and found.first == 0
    assert sum(found.layers) + found.last == pytest.approx(24 * flops_per_token(config, 24, task), rel=1e-12)


def test_costs_that_are_not_known():
    config, _ = MODELS["decoder"]
    with pytest.raises(ValueError, match="'mine'"):
        layer_costs(config.model_copy(update={"arch": "mine"}), "lm", 8)
    with pytest.raises(ValueError, match="vocabulary"):
        layer_costs(config.model_copy(update={"vocab": None}), "lm", 8)


def test_rebalance_moves_layers_away_from_the_head():
    assert rebalance([4.0, 4.0, 4.0, 7.0], (4, 4, 4, 4)) == (5, 5, 5, 1)
    assert rebalance([4.0, 4.0, 4.0, 4.0], (4, 4, 4, 4)) == (4, 4, 4, 4)
    assert rebalance([2.0, 8.0], (4, 4)) == (7, 1)
    assert rebalance([4.0, 8.0, 4.0], (4, 4, 4)) == (5, 2, 5), "the device in the middle is slow"
    assert rebalance([1.0, 1.0, 30.0], (1, 1, 1)) == (1, 1, 1)


# with `layer` the stage's own time everywhere (the head's seconds taken for layers') the last example above is red
@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.floats(0.05, 2.0), st.floats(0.0, 9.0), st.floats(0.0, 9.0))
def test_rebalance_is_never_worse_and_settles(split, layer, first, last):
    def measured(split):
        return stage_costs(split, [layer] * sum(split), first, last)

    after = rebalance(measured(split), split)
    assert sum(after) == sum(split) and min(after) >= 1
    if len(split) > 2:  # else what is a layer's is not known, and the guess may be too cheap
        assert max(measured(after)) <= max(measured(split)) + 1e-9
        best = balance([layer] * sum(split), first, last, len(split))
        assert max(measured(after)) == pytest.approx(max(measured(best)))
        assert max(measured(rebalance(measured(after), after))) == pytest.approx(max(measured(after)))


def test_seconds_that_are_none_are_refused():
    for seconds in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="measured seconds of 2 stages"):
            rebalance(seconds, (1, 1))


# ---- on record ------------------------------------------------------------------------------------------------------------

SNAPSHOT = Path(__file__).with_name("stage_splits.txt")


def records() -> Iterator[str]:
    """One line a recipe and number of stages, for rows of the longest sequence up to 4096."""
    for name in recipes():
        config = ModelConfig.model_validate({"vocab": 8192, **recipe(name)})
        task = "mlm" if config.arch == "encoder" else "lm"
        costs = layer_costs(config, task, min(config.max_len, 4096))
        for stages in (2, 4, 8):
            if config.layers >= stages:
                split = balance(costs.layers, costs.first, costs.last, stages)
                yield f"{name} {stages}: {' '.join(map(str, split))}"


def test_the_stages_of_every_recipe_are_those_on_record():
    # Red when the head is left out of the balance.
    assert list(records()) == SNAPSHOT.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in records()), encoding="utf-8")
