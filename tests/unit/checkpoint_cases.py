"""Helpers of the checkpoint tests: states split over simulated ranks, saved without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Piece
from meshwright.checkpoint.manifest import MANIFEST, Box, Manifest
from meshwright.checkpoint.pieces import geometry, share
from meshwright.checkpoint.ticket import assemble
from meshwright.checkpoint.writer import Staging, shard_name, write_shard


def save_as(folder: Path, held: Sequence[Sequence[Piece]], meta: dict[str, Any] | None = None, step: int = 1) -> Manifest:
    """What len(held) ranks would write into a checkpoint folder; held[r]: the pieces of rank r."""
    folder.mkdir(parents=True)
    plan, findings = share([geometry(pieces)[0] for pieces in held])
    assert not findings, findings
    world = len(held)
    parts = [write_shard(folder, shard_name(r, world), Staging().fill(plan.ranks[r], held[r])) for r in range(world)]
    manifest = assemble(plan, parts, step=step, serial=step, world=world, meta=meta or {}, tag=None)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


def piece_of(name: str, full: torch.Tensor, box: Box, owner: bool = True) -> Piece:
    """A copy of one block of a full tensor, as a rank would hold it."""
    return Piece(name, full[box.inside(Box.whole(full.shape))].clone(), tuple(full.shape), box.offset, owner)


def whole(name: str, full: torch.Tensor) -> Piece:
    return Piece(name, full, tuple(full.shape), (0,) * full.dim())


def bits(tensor: torch.Tensor) -> bytes:
    """The elements as bytes: equal exactly when every bit is, NaN and minus zero included."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
