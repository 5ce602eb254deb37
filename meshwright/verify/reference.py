"""What one device computes: kept in host memory by one rank, given to the others a few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.distributed.reduce import broadcast_json
from meshwright.distributed.world import Ranks
from meshwright.parallel.apply import Engine
from meshwright.verify.cases import Case, Trace, alone, run

__all__ = ["Reference", "reference", "shared_in_turn"]

TURN_BYTES = 64 * 2**20
"""Tensors are passed round in portions of about this size (or one larger tensor)."""


@dataclass
class Reference:
    """gradients[step][name], of the first few steps and without the loss scale; state: name -> tensor after the last step.

    Names as in `Engine.gradient_state` and `Engine.parameters_state`; all tensors whole, on the CPU.
    """

    trace: Trace
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def reference(case: Case, ranks: Ranks, micro_batch: int, gradients: int, kinds: tuple[str, ...] | None = None) -> Reference:
    """Train the case in this process alone. gradients: of how many of the first steps gradients are kept. kinds: what is kept
    of the state, by the first part of its names; None: everything."""
    made = Reference(Trace())

    def look(step: int, engine: Engine, scale: float) -> None:
        if step < gradients:
            made.gradients.append({piece.name: _kept(piece.tensor) / scale for piece in engine.gradient_state()})
        if step == case.steps - 1:
            kept = [p for p in engine.parameters_state() if kinds is None or p.name.partition("/")[0] in kinds]
            made.state = {piece.name: _kept(piece.tensor) for piece in kept}

    made.trace = run(case, alone(case.config, micro_batch), None, ranks, look)
    return made


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, floating numbers in at least fp32."""
    wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wide, copy=True)


def shared_in_turn(tensors: Mapping[str, torch.Tensor] | None, ranks: Ranks) -> Iterator[dict[str, torch.Tensor]]:
    """The first rank's tensors, on every rank, a portion at a time. Collective; others pass None.

    So a rank holds one portion beside its own, however large the model is.
    """
    facts = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (tensors or {}).items()]
    facts = broadcast_json(facts, ranks.control)
    portion: list[tuple[str, torch.dtype, list[int]]] = []
    size = 0
    for number, (name, kind, shape) in enumerate(facts):
        dtype = getattr(torch, kind)
        portion.append((name, dtype, shape))
        size += torch.Size(shape).numel() * dtype.itemsize
        if size >= TURN_BYTES or number == len(facts) - 1:
            yield _pass(portion, tensors, ranks)
            portion, size = [], 0


def _pass(
    portion: list[tuple[str, torch.dtype, list[int]]], tensors: Mapping[str, torch.Tensor] | None, ranks: Ranks
) -> dict[str, torch.Tensor]:
    out = {}
    for name, dtype, shape in portion:
        tensor = torch.empty(shape, dtype=dtype) if tensors is None else tensors[name].contiguous()
        dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=0, group=ranks.control)
        out[name] = tensor
    return out
