"""Which stored slices make up a wanted block: a pure function of the manifest, for any splitting into any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.checkpoint.manifest import Box, Manifest

__all__ = ["Read", "plan_reads"]


@dataclass(frozen=True)
class Read:
    """Copy `source` (an index into the entry `key` of `file`) to `target` (an index into the wanted block)."""

    file: str
    key: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    box: Box


def plan_reads(manifest: Manifest, name: str, offset: Sequence[int], shape: Sequence[int]) -> list[Read]:
    """Reads that fill the block of `shape` at `offset` of the logical tensor `name`, each element exactly once.

    The manifest has been checked to cover every tensor once, so the reads cover the block. Raises KeyError for a name
    that is not there, ValueError for a block outside the tensor.
    """
    entry = manifest.tensors[name]
    wanted = Box(tuple(offset), tuple(shape))
    if not wanted.fits(entry.shape):
        raise ValueError(f"{name}: a block of shape {list(shape)} at {list(offset)} is outside the shape {list(entry.shape)}")
    reads = []
    for part in entry.slices if wanted.numel else ():
        common = part.box.meet(wanted)
        if common is not None:
            reads.append(Read(part.file, part.key, common.inside(part.box), common.inside(wanted), common))
    return reads
