"""Whether what several ranks hold in common is the same on all of them, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.distributed.reduce import gather_json
from meshwright.parallel.norm import agree_least, differing, digest

__all__ = ["Copy", "first_difference"]


@dataclass(frozen=True)
class Copy:
    """values: what a rank holds of a tensor. order: sorts the copies of all ranks. label: what a user knows it by. block: the
    elements that they are, the same text on two ranks where they hold the same ones. shared: with ranks of other stages or of
    the tensor group, domain: see `Placement`."""

    order: tuple[int, ...]
    label: str
    block: str
    values: torch.Tensor
    shared: bool
    domain: str = ""


def first_difference(
    alike: Sequence[tuple[Sequence[Copy], Sequence[dist.ProcessGroup]]],
    model: Sequence[tuple[dist.ProcessGroup, bool]],
    every: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> str | None:
    """Label of the first copy that differs on some rank, the same answer everywhere; None where there is none. Collective.

    alike: copies, and the groups whose ranks hold the same ones in the same order. model: groups whose ranks hold other
    things, some of which may be common to several (found by their block), and whether only what is shared is.
    """
    found: list[list[object]] = []
    digests: dict[str, tuple[Copy, list[int]]] = {}
    for copies, groups in alike:
        if copies:
            stacked = torch.stack([digest(copy.values).to(device) for copy in copies])
            row = differing(stacked, groups)
            found += [] if row is None else [[*copies[row].order, copies[row].label]]
            digests.update({copy.block: (copy, mine) for copy, mine in zip(copies, stacked.tolist(), strict=True)})
    for group, only_shared in model:
        mine = {block: value for block, (copy, value) in digests.items() if copy.shared or not only_shared}
        for theirs in gather_json(mine, group, device):
            apart = (digests[block][0] for block, value in theirs.items() if block in mine and mine[block] != value)
            found += [[*copy.order, copy.label] for copy in apart]
    first = agree_least(min(found, default=None), every, device)
    return None if first is None else str(first[-1])
