"""A process that saves checkpoints and is killed: at a chosen file operation, or whenever the test likes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import CheckpointStore, Piece, writer

ROWS = 512


def state(mark: int, rows: int = ROWS) -> list[Piece]:
    """Tensors in which every element tells which save it belongs to."""
    first = torch.full((rows, 256), float(mark))
    second = torch.full((rows,), mark)
    return [Piece("a", first, (rows, 256), (0, 0)), Piece("b", second, (rows,), (0,))]


def mark_of(pieces: list[Piece]) -> int:
    """The save that all elements belong to; -1 when they are mixed."""
    values = {int(v) for piece in pieces for v in piece.tensor.unique()}
    return values.pop() if len(values) == 1 else -1


def note(root: Path, mark: int) -> None:
    """Remember, beside the folder, that a save was complete when its call returned."""
    with open(root.parent / "done", "a", encoding="utf-8") as file:
        file.write(f"{mark}\n")


def crash_at(operation: int) -> None:
    """SIGKILL this process at the n-th of the moments just before and just after each file operation of a save."""
    count = 0

    def moment() -> None:
        nonlocal count
        count += 1
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moment()
            result = function(*args, **kwargs)
            moment()
            return result

        return call

    for module, name in ((os, "rename"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree"), (writer, "save_tensors")):
        setattr(module, name, wrapped(getattr(module, name)))


def three_saves(root: Path, operation: int) -> None:
    """Saves marked 2, 3, 4: a new step, the same step again, the next step. Only one checkpoint is kept."""
    crash_at(operation)
    with CheckpointStore(root, keep=1) as store:
        for mark, step in ((2, 2), (3, 2), (4, 3)):
            store.save(step, state(mark), {"mark": mark}, background=False)
            note(root, mark)
    os._exit(0)


def open_only(root: Path, operation: int) -> None:
    """A restart that is itself killed while it tidies up."""
    crash_at(operation)
    CheckpointStore(root, keep=1).newest()
    os._exit(0)


def die_before_publishing(root: Path, mark: int) -> None:
    store = CheckpointStore(root, keep=1, before_publish=lambda partial: os.kill(os.getpid(), signal.SIGKILL))
    store.save(mark, state(mark), {"mark": mark})
    store.wait()


def save_for_ever(root: Path, rows: int) -> None:
    """What a run does, without the training: save, in the background, change the tensors, save again."""
    store = CheckpointStore(root, keep=1)
    newest = store.newest()
    step = int(newest.name[5:]) if newest else 0
    pieces = state(step, rows)
    if newest:
        store.load(newest, pieces)
        if mark_of(pieces) != step:
            os._exit(3)
    while True:
        step += 1
        for piece in pieces:
            piece.tensor.fill_(step)
        ticket = store.save(step, pieces, {"mark": step})
        for piece in pieces:
            piece.tensor.fill_(-1)
        ticket.wait()
        note(root, step)
        time.sleep(0.01)
