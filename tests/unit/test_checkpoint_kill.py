"""Killed while saving: whatever the moment, a restart finds a whole checkpoint, never older than the last one that was
complete.
"""

from __future__ import annotations

import multiprocessing.process
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import CheckpointStore
from tests.ranks.pool import _context
from tests.unit import checkpoint_crash as crash


def child(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    process = _context().Process(target=target, args=args)  # the server that has torch loaded already
    process.start()
    return process


def survivor(root: Path, rows: int = crash.ROWS) -> int:
    """The mark of the checkpoint that a restart takes, after checking it and that the folder is tidy."""
    with CheckpointStore(root, keep=1) as store:
        newest = store.newest()
        assert newest is not None, "no whole checkpoint is left"
        pieces = crash.state(0, rows)
        meta = store.load(newest, pieces)
    assert crash.mark_of(pieces) == meta["mark"]
    strange = [p.name for p in root.iterdir() if p.name != ".lock" and not p.name.startswith("step-")]
    assert not strange, strange
    return int(meta["mark"])


def last_complete(root: Path) -> int:
    return int((root.parent / "done").read_text().split()[-1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one whole checkpoint, marked 1."""
    root = tmp_path / "checkpoints"
    with CheckpointStore(root, keep=1) as store:
        store.save(1, crash.state(1), {"mark": 1}).wait()
    crash.note(root, 1)
    return root


def sweep(root: Path, tmp_path: Path, first: int, stride: int) -> None:
    operation, code = first - stride, None
    while code != 0:
        operation += stride
        assert operation < 200, "the saves never end"
        trial = tmp_path / f"trial{operation}" / "checkpoints"
        shutil.copytree(root, trial)
        shutil.copy(root.parent / "done", trial.parent / "done")
        process = child(crash.three_saves, trial, operation)
        process.join(30)
        code = process.exitcode
        assert code in (0, -9)
        again = child(crash.open_only, trial, 1 + operation % 4)
        again.join(30)
        assert again.exitcode in (0, -9)
        complete = last_complete(trial)
        assert complete <= survivor(trial) <= complete + 1
    assert operation > 40, "the hooks were not reached"


def test_killed_at_file_operations_and_again_in_the_restart(root: Path, tmp_path: Path) -> None:
    # Mutations tried: `clean` removing complete partial folders too (killed between the two renames of a replaced step, no
    # checkpoint was left); the older checkpoints removed before the new one is written.
    sweep(root, tmp_path, first=2, stride=4)


@pytest.mark.slow
def test_killed_at_every_file_operation_and_again_in_the_restart(root: Path, tmp_path: Path) -> None:
    sweep(root, tmp_path, first=1, stride=1)


def test_killed_between_the_last_byte_and_the_name(root: Path) -> None:
    process = child(crash.die_before_publishing, root, 2)
    process.join(30)
    assert process.exitcode == -9
    assert sorted(p.name for p in root.iterdir() if "step" in p.name) == [".step-00000002.partial", "step-00000001"]
    lines: list[str] = []
    assert CheckpointStore(root, write=False, report=lines.append).newest() == root / "step-00000001"
    assert ".step-00000002.partial" in lines[0]
    assert survivor(root) == 2, "it is complete, so the restart gives it its name"


def kill_at_random(root: Path, kills: int, seed: int) -> None:
    rows = 25_000  # 26 MB
    moments = random.Random(seed)
    for kill in range(kills):
        before = last_complete(root)
        process = child(crash.save_for_ever, root, rows)
        end = time.monotonic() + 30
        while last_complete(root) == before:  # at least one save a life, so that the state moves on
            assert time.monotonic() < end and process.is_alive(), f"kill {kill}: the restart did not save"
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.3))
        assert process.is_alive()
        process.kill()
        process.join()
        complete = last_complete(root)
        assert complete <= survivor(root, rows) <= complete + 1


@pytest.fixture
def big_root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    root.mkdir()
    crash.note(root, 0)
    return root


def test_killed_at_random_moments(big_root: Path) -> None:
    kill_at_random(big_root, kills=5, seed=20)


@pytest.mark.slow
def test_killed_at_many_random_moments(big_root: Path) -> None:
    kill_at_random(big_root, kills=20, seed=21)
