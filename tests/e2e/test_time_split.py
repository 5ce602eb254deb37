"""A sleep of 50 ms in the loader, in a collective, or in a save is found in its own column of the time split, and only there.

Steps with and without the sleep alternate in one run, and medians are compared, so that a busy machine moves both alike.
Mutation tried: `clock.waiting()` left out around `engine.finish`, and the save outside its span; both red.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant

pytestmark = pytest.mark.alone

SLEEP = 0.05
PARTS = ("compute", "communication", "data", "checkpoint", "evaluate", "idle")


def splits(folder: Path) -> list[dict[str, float]]:
    return [record["split"] for record in e2e.records(folder)][2:]  # the first steps fill caches


def moved(folder: Path, slow: Callable[[int], bool]) -> dict[str, float]:
    """Seconds that the median of each part is longer in the steps that slept."""
    numbered = list(enumerate(splits(folder), start=3))
    return {
        part: statistics.median(split[part] for step, split in numbered if slow(step))
        - statistics.median(split[part] for step, split in numbered if not slow(step))
        for part in PARTS
    }


EVEN, ODD = lambda step: step % 2 == 0, lambda step: step % 2 == 1
CASES: dict[str, tuple[dict[str, Any], Plant, Callable[[int], bool]]] = {
    # one row a rank and step, made when it is asked for
    "data": (
        {"data": {"prefetch": 0}, "train": {"batch": 2}},
        Plant("sleep", "before rows", every=2, rank=0, value=SLEEP),
        EVEN,
    ),
    # the other rank is late, and this one waits for it in the collective
    "communication": ({}, Plant("sleep", "before loss", every=2, rank=1, value=SLEEP), EVEN),
    "compute": ({}, Plant("sleep", "before loss", every=2, rank=0, value=SLEEP), EVEN),
    "evaluate": (
        {"evaluate": {"every": 1, "rows": 2, "best": False}},
        Plant("sleep", "before evaluate", every=2, value=SLEEP),
        EVEN,
    ),
    # a save comes after the line of its step, so it stands in the next one
    "checkpoint": ({"checkpoint": {"every": 1}}, Plant("sleep", "before stage", every=2, rank=0, value=SLEEP), ODD),
}


@pytest.mark.parametrize("part", CASES)
def test_a_sleep_moves_its_own_column_and_no_other(ranks, tmp_path, part):
    changed, plant, slow = CASES[part]
    values = {"steps": 42, "batch": 4, "noise_scale": False, **changed.pop("train", {})}
    config = e2e.settings(tmp_path / "config.yaml", train=values, **changed)
    e2e.train_in(ranks(2), config, tmp_path / "run", plants=[plant])
    seconds = moved(tmp_path / "run", slow)
    assert seconds.pop(part) == pytest.approx(SLEEP, abs=0.01), seconds
    assert all(abs(other) < 0.01 for other in seconds.values()), seconds


def test_the_parts_are_the_wall_time_and_the_walls_are_the_time_that_passed(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 40}, checkpoint={"every": 5}, evaluate={"every": 10})
    notes = tmp_path / "moments"
    e2e.train_in(ranks(2), config, tmp_path / "run", plants=[Plant("note", "before line", rank=0, path=str(notes))])
    moments = [float(line) for line in notes.read_text().split()]
    walls = []
    for record in e2e.records(tmp_path / "run"):
        split = record["split"]
        walls.append(split["wall"])
        assert sum(split[part] for part in PARTS) == pytest.approx(split["wall"], rel=0.02)
        assert all(split[part] >= 0 for part in PARTS)
    assert sum(walls[1:]) == pytest.approx(moments[-1] - moments[0], rel=0.02)
