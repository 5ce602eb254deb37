"""SIGKILL of every process of a run, again and again: what is left is always enough to go on as if nothing had happened.

The moments are drawn by committed seeds. Mutations tried, each red: `MetricsWriter` keeping a torn last line; the data
position of a resume late by one row.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant

STORY: dict[str, Any] = {
    "train": {"micro_batch": 2, "ema": 0.9, "ramp": {"start": 6, "increment": 2, "samples": 60}},
    "data": {"workers": 1, "tokenizer": {"vocab": 320}},
    "evaluate": {"every": 5},
    "checkpoint": {"every": 2},
}


def in_prepare(draw: random.Random) -> Plant:
    return Plant(
        "kill", draw.choice(("before chunk", "after chunk", "before journal", "after journal", "before corpus")), nth=1
    )


def in_save(draw: random.Random) -> Plant:
    """The second or third save of a life, so that each life leaves the run further on than it found it."""
    nth, rank = draw.randint(2, 3), draw.randint(0, 1)
    do, at, rank = draw.choice(
        [
            ("kill", "before stage", rank),
            ("kill", "after stage", rank),
            ("kill", "before file", rank),
            ("cut", "after file", rank),
            ("kill", "after file", rank),
            ("kill", "before manifest", 0),
            ("kill", "after manifest", 0),
            ("kill", "after name", 0),
            ("kill", "before prune", 0),
        ]
    )
    return Plant(do, at, nth=nth, rank=rank)


def before_the_rename(draw: random.Random) -> Plant:
    return Plant("kill", "before name", nth=draw.randint(2, 3), rank=0)


def in_resume(draw: random.Random) -> Plant:
    at = draw.choice(("before clean", "after clean", "before lines", "after lines", "before load", "after load"))
    return Plant("kill", at, nth=1, rank=0 if at.endswith(("clean", "lines")) else draw.randint(0, 1))


def in_step(draw: random.Random) -> Plant:
    do, at = draw.choice([("kill", "before step"), ("kill", "before update"), ("kill", "after step"), ("tear", "before line")])
    return Plant(do, at, nth=draw.randint(4, 6), rank=0 if do == "tear" else draw.randint(0, 1))


def drawn(seed: int, *, saves: int, steps: int, resumes: int) -> list[Plant]:
    """One kill in the preparation, then one between the last file and the rename and the others, in any order, but no
    resume before there is a checkpoint."""
    draw = random.Random(seed)
    makers = [in_save] * saves + [in_step] * steps + [in_resume] * resumes + [before_the_rename]
    draw.shuffle(makers)
    first = next(i for i, maker in enumerate(makers) if maker is not in_resume)
    makers.insert(0, makers.pop(first))
    return [in_prepare(draw), *(maker(draw) for maker in makers)]


def killed_again_and_again(ranks, folder: Path, kills: list[Plant], total: int) -> None:
    config = e2e.settings(folder / "config.yaml", e2e.raw(), **{**STORY, "train": {**STORY["train"], "steps": total}})
    e2e.train_in(ranks(2), config, folder / "whole")
    run = folder / "run"
    for kill in kills:
        e2e.train(config, run, "--resume", "latest", plants=[kill]).wait(-9)
    e2e.train_in(ranks(2), config, run, resume=True)
    e2e.assert_same(run, folder / "whole")
    left = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".step"))
    assert not left, "what the dead runs left is tidied up"


def test_five_kills(ranks, tmp_path):
    kills = drawn(54, saves=1, steps=1, resumes=1)
    assert len(kills) == 5 and sum(kill.at.split()[1] in IN_A_SAVE for kill in kills) >= 2
    killed_again_and_again(ranks, tmp_path, kills, total=24)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills(ranks, tmp_path):
    kills = drawn(36, saves=9, steps=6, resumes=3)
    assert len(kills) == 20 and sum(kill.at.split()[1] in IN_A_SAVE for kill in kills) >= 7
    killed_again_and_again(ranks, tmp_path, kills, total=100)


IN_A_SAVE = ("stage", "file", "manifest", "name", "prune")


def test_ranks_that_are_killed_start_again_by_themselves(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", **{**STORY, "data": {}, "train": {**STORY["train"], "steps": 24}})
    e2e.train_in(ranks(2), config, tmp_path / "whole")
    kills = [
        Plant("kill rank", "before update", nth=7, rank=1, start=0),
        Plant("kill rank", "before file", nth=3, rank=0, start=1),
    ]
    said = e2e.train(config, tmp_path / "run", "--max-restarts", 2, plants=kills).wait()
    for start in (1, 2):
        assert f"a rank ended; all ranks start again ({start} of 2)" in said.err
    e2e.assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_without_restarts_left_the_killed_rank_is_named(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml")
    kill = Plant("kill rank", "before update", nth=4, rank=1)
    said = e2e.train(config, tmp_path / "run", plants=[kill]).wait(137)
    assert "rank 1 failed (exit code 137): ended by SIGKILL" in said.err and "Traceback" not in said.err
    assert e2e.steps_done(tmp_path / "run") == 3
