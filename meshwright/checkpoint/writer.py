"""The writing half: copy a rank's share to host memory, then put it into one safetensors file with digests."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.checkpoint.pieces import Piece, Share
from meshwright.compat import save_tensors

__all__ = ["Staged", "Staging", "file_sha256", "shard_name", "sync_folder", "write_shard"]

_BLOCK = 16 << 20


@dataclass(frozen=True)
class Staged:
    """One block in host memory."""

    share: Share
    tensor: torch.Tensor


class Staging:
    """Host memory that holds a rank's share while it is written; kept and used again by the next save.

    Pinned when a piece lies on an accelerator. It grows to the largest share seen and is never smaller than that.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        return self._buffer.numel()

    def fill(self, shares: Sequence[Share], pieces: Sequence[Piece]) -> list[Staged]:
        """Copy every share out of the piece that holds it. Returns when the copies are complete, so that the pieces may
        change at once.
        """
        devices = {piece.tensor.device for piece in pieces if piece.tensor.device.type != "cpu"}
        total = sum(share.bytes for share in shares)
        if self._buffer.numel() < total or (devices and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one before the new one is taken
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=bool(devices))
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        staged, at = [], 0
        # Widest elements first, so that every block starts at a multiple of its element size.
        for share in sorted(shares, key=lambda share: (-ITEM_BYTES[share.dtype], share.name, share.box)):
            piece = next(p for p in by_name[share.name] if p.owner and p.box.meet(share.box) == share.box)
            flat = self._buffer[at : at + share.bytes].view(piece.tensor.dtype)
            target = flat.view(share.box.shape)
            target.copy_(piece.tensor.detach()[share.box.inside(piece.box)], non_blocking=True)
            staged.append(Staged(share, target))
            at += share.bytes
        for device in devices:
            torch.accelerator.synchronize(device)
        return staged


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def write_shard(folder: Path, name: str, staged: Sequence[Staged]) -> dict[str, Any]:
    """Write and flush one shard file. Returns its part of the manifest as JSON: `file`, `bytes`, `sha256`, `slices`.

    A rank without a share writes no file. Raises OSError or safetensors' SafetensorError when the disk refuses.
    """
    if not staged:
        return {"file": None, "slices": []}
    slices = [
        {
            "name": s.share.name,
            "offset": s.share.box.offset,
            "shape": s.share.box.shape,
            "key": s.share.key,
            "crc32": crc32(s.tensor),
        }
        for s in staged
    ]
    path = folder / name
    save_tensors({s.share.key: s.tensor for s in staged}, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(folder)
    return {"file": name, "bytes": path.stat().st_size, "sha256": file_sha256(path), "slices": slices}


def crc32(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements in row-major order, as they lie in a file."""
    data = tensor.contiguous().reshape(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a renamed or new file is only on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
