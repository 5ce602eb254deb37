"""The product under ZeRO: `--plan`, data order, held-out figures, averages and resume are those of one rank.

Mutations tried, each red: the loader's rank taken along dp_replicate alone; loss and held-out sums reduced over it alone.
"""

from __future__ import annotations

import pytest

from meshwright.errors import LayoutError
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.e2e import helpers as e2e
from tests.e2e.test_train_parity import assert_close, furthest

LAYOUTS = [
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=4, zero=2),
    Layout(dp_replicate=2, dp_shard=2, zero=1),
    Layout(dp_replicate=2, dp_shard=2, zero=2),
]


@pytest.mark.slow  # the resumes below train under four of them
def test_every_layout_trains_as_one_rank_does(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"ema": 0.9}, evaluate={"every": 10}, precision="fp64")
    e2e.train_in(ranks(1), config, tmp_path / "one")
    for number, layout in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        e2e.train_in(ranks(layout.world), config, folder, plan=Plan(layout, micro_batch=2, precision="fp64", bucket_mib=1))
        assert_close(folder, tmp_path / "one", 1e-9)
        # measured twice in 20 steps; so early the estimate itself may still be negative, and then no figure is shown
        assert e2e.state(e2e.newest(folder))["noise"]["updates"] == 2, layout


def test_a_run_changes_its_layout_at_each_resume(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"ema": 0.9}, evaluate={"every": 10}, precision="fp64")
    e2e.train_in(ranks(1), config, tmp_path / "one")
    total = len(e2e.column(tmp_path / "one", "loss"))
    hops = [Layout(dp_replicate=2), LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], Layout(dp_replicate=4)]
    for number, layout in enumerate(hops, 1):
        e2e.train_in(
            ranks(layout.world),
            config,
            tmp_path / "run",
            f"--train.schedule.total={total}",
            f"--train.steps={total * number // len(hops)}",
            plan=Plan(layout, micro_batch=2, precision="fp64"),
            resume=number > 1,
        )
    assert furthest(tmp_path / "run", tmp_path / "one", "loss") <= 1e-9
    assert e2e.largest_difference(tmp_path / "run", tmp_path / "one") <= 1e-9


def test_the_command_takes_a_plan_with_zero_and_says_so(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 6})
    Plan(LAYOUTS[0], micro_batch=2, reason="by hand").save(tmp_path / "plan.json")
    said = e2e.train(config, tmp_path / "run", "--plan", tmp_path / "plan.json", nproc=2).wait().out
    assert "2 data-parallel ranks x" in said and "ZeRO-1 over 2" in said and "(by hand)" in said
    assert len(e2e.column(tmp_path / "run", "loss")) == 6


def test_a_plan_that_cannot_run_is_refused_before_anything_is_written(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml")
    with pytest.raises(LayoutError, match="nothing is sharded with zero: 0"):
        e2e.train_in(ranks(2), config, tmp_path / "run", plan=Plan(Layout(dp_shard=2)))
    assert not (tmp_path / "run" / "plan.json").exists()
