"""The engine: what a train step calls. It owns the flat weights, gradients, optimizer state and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.mesh import DATA_AXES, AxisGroups
from meshwright.distributed.piece import Piece, flat_pieces
from meshwright.parallel.compile import compile_errors
from meshwright.parallel.flat import FlatParameters, Run
from meshwright.parallel.norm import agree_any, agree_first, clip_coefficient, differing, digest, reduce_sum
from meshwright.parallel.precision import LossScaler
from meshwright.parallel.replicate import Gradients
from meshwright.parallel.update import FlatOptimizer

__all__ = ["Axes", "Engine", "StepInfo"]


@dataclass(frozen=True)
class Axes:
    """Process groups by what their ranks share; axes of size 1 are left out.

    data: ranks that see different samples. distinct: one group an axis whose ranks hold different elements of the same
    gradient. every: one group an axis; reduced over in turn, they reach the whole world.
    """

    data: dist.ProcessGroup | None = None
    distinct: tuple[dist.ProcessGroup, ...] = ()
    every: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh | None, sharded: bool = False) -> Axes:
        """sharded: ranks along dp_shard hold different ranges of the reduced gradient."""
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {name: mesh.get_group(name) for name in names if mesh is not None and mesh.size(names.index(name)) > 1}
        wide = [name for name in DATA_AXES if name in groups]
        data = AxisGroups(mesh).over(*wide) if mesh is not None and wide else None
        distinct = (groups["dp_shard"],) if sharded else ()
        return cls(data=data, distinct=distinct, every=tuple(groups.values()))

    @property
    def alike(self) -> tuple[dist.ProcessGroup, ...]:
        """One group an axis whose ranks hold the same elements."""
        return tuple(group for group in self.every if group not in self.distinct)


@dataclass(frozen=True)
class StepInfo:
    """What an update did. Tensors are 0-d on the device: reading them waits.

    grad_norm: global norm before clipping, loss scale removed. skipped: whether nothing was changed (the norm was not
    finite on some rank). loss_scale: the scale that this step's loss carried. exhausted: fp16 overflowed although the
    scale cannot go lower, so that skipping will not help.
    """

    grad_norm: torch.Tensor
    skipped: torch.Tensor | bool
    loss_scale: float
    exhausted: bool = False


class Engine:
    """Runs backward, reduction and update of one model. A step is

    engine.zero()
    for each micro-batch: with engine.backward_scope(last=...): (loss * engine.loss_scale / targets).backward()
    engine.finish(wait)
    info = engine.update(lr, clip)
    """

    def __init__(
        self,
        parameters: FlatParameters,
        gradients: Gradients,
        optimizer: FlatOptimizer,
        *,
        scaler: LossScaler | None,
        axes: Axes,
        compiled: str = "off",
    ):
        self.parameters = parameters
        self.gradients = gradients
        self.optimizer = optimizer
        self.scaler = scaler
        self.axes = axes
        self._compiled = compiled
        self._norm: torch.Tensor | None = None
        self._carried = self.loss_scale

    @property
    def model(self) -> nn.Module:
        return self.parameters.model

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss before backward; 1 but in fp16."""
        return self.scaler.scale if self.scaler else 1.0

    @property
    def measure_noise(self) -> bool:
        """Set before the first micro-step: `micro_square_norms` is then there after the last one, until `zero()`."""
        return self.gradients.measure_noise

    @measure_noise.setter
    def measure_noise(self, value: bool) -> None:
        self.gradients.measure_noise = value

    @property
    def micro_square_norms(self) -> list[torch.Tensor]:
        """One 0-d square norm of a part of the gradient, loss scale removed: with several ranks of this rank's part, on
        one rank, and under ZeRO-2, of the first micro-step (`gradients.noise_of_one_micro_step`). Empty without
        `measure_noise` or without parts.

        A part carries the step's division by the global number of targets: times targets / (targets of the part) it is
        the part's mean gradient.
        """
        return [square / self._carried**2 for square in self.gradients.square_norms]

    def zero(self) -> None:
        """Forgets the gradients, and waits for new weights outside of `model.layers`, whose blocks wait for their own.
        Call it before the first micro-step."""
        self.gradients.zero()
        self.parameters.settle_shared()
        self._norm = None
        self._carried = self.loss_scale

    @contextmanager
    def backward_scope(self, last: bool) -> Iterator[None]:
        """Around the one backward of a micro-step; `last` on the last of the step, when buckets are reduced."""
        with self.gradients.scope(last), compile_errors(self._compiled):
            yield

    def finish(self, wait: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Waits for outstanding reductions; the waiting alone is inside `wait()`."""
        self.gradients.finish(wait)

    def grad_norm(self) -> torch.Tensor:
        """L2 norm over all logical elements of the gradient, loss scale removed: 0-d, at least fp32, the same bits on
        every rank. Call it after `finish`."""
        if self._norm is None:
            square = reduce_sum(self.gradients.square(), self.axes.distinct)
            self._norm = square.sqrt() / self._carried
        return self._norm

    def nonfinite_parameter(self) -> str | None:
        """Name of the first parameter, in the order of the model, with a gradient that is not finite on some rank.

        Every rank must call it, after `finish` and before `zero`; it waits for the device.
        """
        place = {id(slot): number for number, slot in enumerate(self.parameters.slots)}
        device = self.parameters.groups[0].device
        bad = torch.full((), len(place), device=device)
        for part in self.parameters.ranges:
            for run in part.runs():
                finite = torch.isfinite(run.of(part.gradient)).all()
                bad = torch.where(finite, bad, bad.clamp(max=place[id(run.slot)]))
        mine = int(bad)
        first = agree_first(mine if mine < len(place) else None, self.axes.every, device)
        return None if first is None else self.parameters.slots[first].name

    def update(self, lr: float, clip: float) -> StepInfo:
        """Norm, unscale, clip to norm `clip` (0: off) and the optimizer, in one pass over the flat buffers.

        A norm that is not finite on any rank leaves weights, moments and averages of all ranks as they are, bit for bit,
        and in fp16 moves the loss scale. Only fp16 waits for the device.
        """
        norm, used = self.grad_norm(), self._carried
        skip = agree_any(~torch.isfinite(norm), self.axes.every)
        if self.scaler:
            overflow = bool(skip)
            exhausted = self.scaler.update(overflow)
            if overflow:
                return StepInfo(norm, True, used, exhausted)
        self.optimizer.step(lr, clip_coefficient(norm, clip) / used, skip)
        return StepInfo(norm, False if self.scaler else skip, used)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model computes with the averaged weights inside; nothing changes where none are kept. Under ZeRO every rank
        must enter and leave it."""
        with self.optimizer.averaged():
            yield

    @contextmanager
    def masters(self) -> Iterator[nn.Module]:
        """The model's parameters are the masters inside, to be filled or overwritten in full precision; working weights
        and averages follow on leaving."""
        with self.parameters.masters():
            yield self.model
        self.optimizer.restart_averages()

    def parameters_state(self) -> list[Piece]:
        """Everything that a checkpoint keeps of this rank, as live views: masters (`model/`), moments
        (`optimizer/exp_avg/`, ...), averages (`ema/`), frozen weights and persistent buffers (`model/`)."""
        pieces = [
            piece
            for _, name, run, buffer in self._held()
            for piece in flat_pieces(name, run.of(buffer), run.slot.shape, run.first)
        ]
        whole = [(name, parameter.detach()) for name, parameter in self.parameters.frozen.items()]
        whole += [(slot.name, slot.parameter.detach()) for slot in self.parameters.slots if not slot.size]
        pieces += [Piece(f"model/{name}", tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in whole]
        first = all(dist.get_rank(group) == 0 for group in self.axes.every)
        for name, tensor in self._buffers():  # statistics of a rank's own batches differ: one rank's are kept
            pieces.append(Piece(f"model/{name}", tensor, tuple(tensor.shape), (0,) * tensor.dim(), owner=first))
        return pieces

    def gradient_state(self) -> list[Piece]:
        """This rank's part of the reduced gradient as live views named `gradient/...`, loss scale included and not clipped.
        There after `finish` until the next `zero`."""
        runs = [(run, part.gradient) for part in self.parameters.ranges for run in part.runs() if run.size]
        return [
            piece
            for run, buffer in runs
            for piece in flat_pieces(f"gradient/{run.slot.name}", run.of(buffer), run.slot.shape, run.first)
        ]

    def _held(self) -> Iterator[tuple[int, str, Run, torch.Tensor]]:
        """(number of its kind, name, run, buffer of its range) of masters, moments and averages on this rank."""
        for number, (kind, buffers) in enumerate(self._kinds()):
            for part, buffer in zip(self.parameters.ranges, buffers, strict=True):
                for run in part.runs():
                    if run.size:
                        yield number, f"{kind}/{run.slot.name}", run, buffer

    def _kinds(self) -> list[tuple[str, list[torch.Tensor]]]:
        kinds = [("model", [part.master for part in self.parameters.ranges])]
        for name in self.optimizer.moments[0] if self.optimizer.moments else ():
            kinds.append((f"optimizer/{name}", [moments[name] for moments in self.optimizer.moments]))
        return [*kinds, ("ema", self.optimizer.averages)] if self.optimizer.averages else kinds

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        kept = self.model.state_dict()
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in kept)

    def extra_state(self) -> dict[str, Any]:
        """JSON values beside the tensors: updates made, and the loss scaler."""
        return {"updates": self.optimizer.updates, "scaler": self.scaler.state() if self.scaler else None}

    def load_extra(self, state: dict[str, Any]) -> None:
        """Takes `extra_state`. A scaler's state is taken where this precision has one; else it starts anew."""
        self.optimizer.updates = int(state["updates"])
        if self.scaler and state.get("scaler"):
            self.scaler.load(state["scaler"])

    def after_load(self) -> None:
        """Call it after the tensors of `parameters_state` were overwritten: working copies follow their masters."""
        self.parameters.refresh()

    def sync_check(self) -> str | None:
        """Name of the first weight, moment or average that is not bitwise the same on every replica, else None.

        Every rank must call it. Weights by their plain name, others as in `parameters_state`.
        """
        self.parameters.settle()
        whole = [(slot.name, slot.of(group.working)) for group, slot in self.parameters.each()]
        whole += [(name, parameter.detach()) for name, parameter in self.parameters.frozen.items()]
        row = differing(torch.stack([digest(tensor) for _, tensor in whole]), self.axes.every)
        if row is not None:
            return whole[row][0]
        held, slots = list(self._held()), self.parameters.slots
        digests = [digest(run.of(buffer)) for _, _, run, buffer in held]
        row = differing(torch.stack(digests), self.axes.alike) if digests else None
        # ranks that hold different ranges agree on one name by its place among all of them
        place = {id(slot): number for number, slot in enumerate(slots)}
        mine = None if row is None else held[row][0] * len(slots) + place[id(held[row][2].slot)]
        first = agree_first(mine, self.axes.every, self.parameters.groups[0].device)
        if first is None:
            return None
        kind, number = divmod(first, len(slots))
        return f"{self._kinds()[kind][0]}/{slots[number].name}".removeprefix("model/")
