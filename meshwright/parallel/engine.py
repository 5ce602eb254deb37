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

from meshwright.distributed.piece import Piece
from meshwright.parallel.compile import compile_errors
from meshwright.parallel.flat import FlatParameters
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
    def of(cls, mesh: DeviceMesh | None) -> Axes:
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {name: mesh.get_group(name) for name in names if mesh is not None and mesh.size(names.index(name)) > 1}
        return cls(data=groups.get("dp_replicate"), every=tuple(groups.values()))


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
        one rank of the first of several micro-steps. Empty without `measure_noise` or without parts.

        A part carries the step's division by the global number of targets: times targets / (targets of the part) it is
        the part's mean gradient.
        """
        return [square / self._carried**2 for square in self.gradients.square_norms]

    def zero(self) -> None:
        """Forgets the gradients. Call it before the first micro-step."""
        self.gradients.zero()
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
        flags = [torch.isfinite(slot.of(group.gradient)).all() for group, slot in self.parameters.each()]
        bad = (~torch.stack(flags)).nonzero()
        first = agree_first(int(bad[0, 0]) if bad.numel() else None, self.axes.every, bad.device)
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
        """The model computes with the averaged weights inside; nothing changes where none are kept."""
        with self.optimizer.averaged():
            yield

    @contextmanager
    def masters(self) -> Iterator[nn.Module]:
        """The model's parameters are the masters inside, to be filled or overwritten in full precision; working weights
        and averages follow on leaving."""
        for group, slot in self.parameters.each():
            slot.parameter.data = slot.of(group.master)
        try:
            yield self.model
        finally:
            for group, slot in self.parameters.each():
                slot.parameter.data = slot.of(group.working)
        self.parameters.refresh()
        self.optimizer.restart_averages()

    def parameters_state(self) -> list[Piece]:
        """Everything that a checkpoint keeps of this rank, as live views: masters (`model/`), moments
        (`optimizer/exp_avg/`, ...), averages (`ema/`), frozen weights and persistent buffers (`model/`)."""
        pieces = [Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in self._tensors()]
        first = all(dist.get_rank(group) == 0 for group in self.axes.every)
        for name, tensor in self._buffers():  # statistics of a rank's own batches differ: one rank's are kept
            pieces.append(Piece(f"model/{name}", tensor, tuple(tensor.shape), (0,) * tensor.dim(), owner=first))
        return pieces

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        kinds: list[tuple[str, list[torch.Tensor]]] = [("model", [group.master for group in self.parameters.groups])]
        for name in self.optimizer.moments[0] if self.optimizer.moments else ():
            kinds.append((f"optimizer/{name}", [moments[name] for moments in self.optimizer.moments]))
        if self.optimizer.averages:
            kinds.append(("ema", self.optimizer.averages))
        for kind, buffers in kinds:
            for group, buffer in zip(self.parameters.groups, buffers, strict=True):
                for slot in group.slots:
                    yield f"{kind}/{slot.name}", slot.of(buffer)
        for name, parameter in self.parameters.frozen.items():
            yield f"model/{name}", parameter.detach()

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
        names, digests = [], []
        for name, tensor in [*self._working(), *self._tensors()]:
            names.append(name.removeprefix("model/"))
            digests.append(digest(tensor))
        row = differing(torch.stack(digests), self.axes.every)
        return None if row is None else names[row]

    def _working(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((slot.name, slot.of(group.working)) for group, slot in self.parameters.each() if group.mixed)
