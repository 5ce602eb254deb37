"""Whole weights of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from meshwright.distributed.reduce import gather_json
from meshwright.parallel.engine import Engine
from meshwright.spec.box import Box

__all__ = ["whole_weights"]


def whole_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """(logical name, values in the masters' dtype) of every parameter, one after another, on every rank.

    Collective: every rank goes through all of it. Takes one whole parameter of memory at a time.
    """
    device = engine.parameters.groups[0].device
    names = {placement.name for placement in engine.placements.values()}
    pieces = [piece for piece in engine.parameters_state() if piece.name.removeprefix("model/") in names]
    shapes = {placement.name: list(placement.shape) for placement in engine.placements.values()}
    for group in engine.axes.distinct:
        shapes = dict(pair for other in gather_json(sorted(shapes.items()), group, device) for pair in other)
    for name, shape in sorted(shapes.items()):
        mine = [piece for piece in pieces if piece.name == f"model/{name}"]
        kind = engine.parameters.ranges[0].master.dtype
        whole = torch.full(shape, -torch.inf, dtype=kind, device=device)
        for piece in mine:
            whole[piece.box.inside(Box.whole(shape))] = piece.tensor.to(device, kind)
        for group in engine.axes.distinct:  # several ranks may hold an element, all of them the same
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        yield name, whole
