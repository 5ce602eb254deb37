"""The engine: what a train step calls. It owns the flat weights, gradients, optimizer state and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed.piece import Piece
from meshwright.parallel.axes import Axes
from meshwright.parallel.balance import Balance
from meshwright.parallel.buffers import Run
from meshwright.parallel.compile import compile_errors
from meshwright.parallel.compress import lifted
from meshwright.parallel.consistency import Copy, first_difference
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.local_sgd import OWN, Kinds, LocalSteps
from meshwright.parallel.norm import agree_any, agree_least, clip_coefficient, reduce_sum
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.precision import LossScaler
from meshwright.parallel.replicate import Gradients
from meshwright.parallel.runner import Forward, Runner, SerialRunner, Taken, Waiting
from meshwright.spec.placement import Placement

__all__ = ["Engine", "StepInfo"]


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
    engine.run(count, forward, engine.loss_scale / targets, taken, wait)
    engine.finish(wait)
    info = engine.update(lr, clip)

    runner: runs the micro-batches; None: one after another, each on the whole model. local: where replicas train apart.
    balance: of a model of experts.
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
        runner: Runner | None = None,
        notes: Sequence[str] = (),
        local: LocalSteps | None = None,
        balance: Balance | None = None,
    ):
        self.parameters = parameters
        self.gradients = gradients
        self.optimizer = optimizer
        self.scaler = scaler
        self.axes = axes
        self.runner = runner or SerialRunner()
        self.local = local
        self.balance = balance
        self.notes = tuple(notes)
        """What is done otherwise than the plan says, for the log."""
        self._compiled = compiled
        self.reach: list[torch.Tensor] | None = None
        """Parameters that backward gives gradients to; None: all that the loss depends on."""
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
    def apart(self) -> bool:
        """Whether each replica takes the present step for itself: by the targets of its own rows, see `parallel.local_sgd`."""
        return self.local is not None and self.local.apart

    @property
    def measure_noise(self) -> bool:
        """Set before the first micro-step: `micro_square_norms` is then there after the last one, until `zero()`. It stays off
        where experts are dealt to data ranks: no rank has the gradient of its own rows alone."""
        return self.gradients.measure_noise

    @measure_noise.setter
    def measure_noise(self, value: bool) -> None:
        self.gradients.measure_noise = value and not self.parameters.sharing.domains  # other ranks' rows are in a domain's

    @property
    def micro_square_norms(self) -> list[torch.Tensor]:
        """One 0-d square norm of a part of the gradient, loss scale removed and summed over the parts of the model: with
        several data ranks of this one's part, on one rank, and from ZeRO-2 on, of the first micro-step
        (`gradients.noise_of_one_micro_step`). There after `finish`; empty without `measure_noise` or without parts, nan where
        some rank of a split model has none.

        A part carries the step's division by the global number of targets: times targets / (targets of the part) it is
        the part's mean gradient.
        """
        return [square / self._carried**2 for square in self.gradients.square_norms]

    def zero(self) -> None:
        """Forgets the gradients, and waits for new weights outside of `model.layers`, whose blocks wait for their own.
        Call it before the first micro-step."""
        if self.local is not None:
            self.local.begin()
        self.gradients.zero()
        self.parameters.settle_shared()
        if self.balance is not None:
            self.balance.start()
        self._norm = None
        self._carried = self.loss_scale
        if self.gradients.compressed is not None:
            self.gradients.compressed.reducer.scale = self._carried

    def run(self, count: int, forward: Forward, factor: float, taken: Taken, wait: Waiting = nullcontext) -> None:
        """Forward and backward of the step's micro-batches 0 .. count. Every rank calls it with the same count.

        forward(model, i): the loss of micro-batch i as something with `loss_sum`, which is multiplied by `factor` before
        backward. taken(i, parts): what forward gave, on ranks that get it, for detached use. Waiting for ranks of other
        parts of the model is inside `wait()`.
        """
        self.runner.train(self, count, forward, factor, taken, wait)

    def evaluate(self, count: int, forward: Forward, taken: Taken) -> None:
        """Forward of `count` batches, with gradients switched off by the caller. Every rank calls it with the same count."""
        self.runner.evaluate(self, count, forward, taken)

    @contextmanager
    def backward_scope(self, last: bool, chunk: int = 0, part: str = "whole") -> Iterator[None]:
        """Around the one backward of a micro-batch (of a chunk, of a part: see `Gradients.scope`); `last` on the last of the
        step, when buckets are reduced."""
        with self.gradients.scope(last, chunk, part), compile_errors(self._compiled):
            yield

    def finish(self, wait: Waiting = nullcontext) -> None:
        """Waits for outstanding reductions; the waiting alone is inside `wait()`."""
        self.gradients.finish(wait)
        if self.measure_noise and self.axes.model:
            # Whether it could be measured depends on what a rank holds and on how its backward ran. All take part all the same:
            # one rank's nan makes it nan everywhere.
            device = self.parameters.groups[0].device
            mine = self.gradients.square_norms or [torch.full((), math.nan, dtype=torch.float64, device=device)]
            self.gradients.square_norms = [reduce_sum(mine[0].double(), self.axes.model.values())]

    def divide(self, factor: float) -> None:
        """The step's gradients are `factor` times what they should be: norm and update take that off. Call it on every rank,
        with the same number, before either."""
        self._carried *= factor

    def grad_norm(self) -> torch.Tensor:
        """L2 norm over all logical elements of the gradient, loss scale removed: 0-d, at least fp32, the same bits on
        every rank. Call it after `finish`."""
        if self._norm is None:
            square = self._square()
            self._norm = square.sqrt() / self._carried
        return self._norm

    def _square(self) -> torch.Tensor:
        """Of the whole gradient; what belongs to a domain is summed over the ranks that hold it once, the rest likewise."""
        domains, model = self.parameters.sharing.domains, self.axes.model.values()
        if not domains:
            return reduce_sum(self.gradients.square(), self.axes.distinct)
        data = [group for group in self.axes.distinct if group not in model]
        total = reduce_sum(self.gradients.square(domain=""), data)
        for name in sorted(domains):
            distinct = domains[name].distinct
            total = total + reduce_sum(self.gradients.square(domain=name), () if distinct is None else (distinct,))
        return reduce_sum(total, model)

    def nonfinite_parameter(self) -> str | None:
        """Name of the first parameter, in the order of the model, with a gradient that is not finite on some rank.

        Every rank must call it, after `finish` and before `zero`; it waits for the device.
        """
        slots, device = self.parameters.slots, self.parameters.groups[0].device
        place = {id(slot): number for number, slot in enumerate(slots)}
        bad = torch.full((), len(slots), device=device)
        for part in self.parameters.ranges:
            for run in part.runs():
                finite = torch.isfinite(run.of(part.gradient)).all()
                bad = torch.where(finite, bad, bad.clamp(max=place[id(run.slot)]))
        mine = int(bad)
        named = [*self.parameters.place(slots[mine]), slots[mine].placement.name] if mine < len(slots) else None
        first = agree_least(named, self.axes.every, device)
        return None if first is None else str(first[-1])

    def unused_parameters(self) -> list[str]:
        """Names of the parameters of this rank's model that got no gradient in the step on any rank with the same weights:
        they count as a gradient of zeros, so that AdamW decays them and their moments as one device would.

        Every rank must call it, after `finish` and before `zero`; it waits for the device.
        """
        slots = self.parameters.slots
        reached = torch.tensor([id(slot) in self.gradients.reached for slot in slots], dtype=torch.int32)
        reached = reached.to(self.parameters.groups[0].device)
        if self.axes.data is not None:
            dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self.axes.data)
        return [slot.name for slot, flag in zip(slots, reached.tolist(), strict=True) if not flag]

    def update(self, lr: float, clip: float, empty: bool = False) -> StepInfo:
        """Norm, unscale, clip to norm `clip` (0: off) and the optimizer, in one pass over the flat buffers.

        A norm that is not finite on any rank (of this replica, where they train apart) leaves weights, moments and averages of
        all those ranks as they are, bit for bit, and in fp16 moves the loss scale. Only fp16 waits for the device. empty: this
        replica had no target in a step that it takes for itself, and updates nothing.
        """
        info = StepInfo(self.grad_norm(), True, self.loss_scale) if empty else self._update(lr, clip)
        return info if self.local is None else self.local.after(info)

    def _update(self, lr: float, clip: float) -> StepInfo:
        norm, used, scale = self.grad_norm(), self._carried, self.loss_scale
        # a copy that does not count is updated all the same
        finite = torch.isfinite(norm) & torch.isfinite(self.gradients.square(counted=False))
        skip = agree_any(~finite, self.axes.inside(self.axes.every) if self.apart else self.axes.every)
        if self.gradients.compressed is not None:
            self.gradients.compressed.settle(skip)
        if self.scaler:
            overflow = bool(skip)
            exhausted = self.scaler.update(overflow)
            if overflow:
                return StepInfo(norm, True, scale, exhausted)
        self.optimizer.step(lr, clip_coefficient(norm, clip) / used, skip)
        if self.balance is not None:
            self.balance.update(skip)
        return StepInfo(norm, False if self.scaler else skip, scale)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model computes with the averaged weights inside, or with those that replicas which train apart have in common;
        nothing changes where none are kept. Under ZeRO every rank must enter and leave it."""
        with self.optimizer.averaged() if self.local is None else self.local.evaluated():
            yield

    @contextmanager
    def masters(self) -> Iterator[nn.Module]:
        """The model's parameters are the masters inside, to be filled or overwritten in full precision; working weights
        and averages follow on leaving."""
        with self.parameters.masters():
            yield self.model
        self._restart()

    def fill(self, values: Callable[[str, Placement], torch.Tensor]) -> None:
        """New values for every parameter (see `FlatParameters.fill`), one at a time; averages start from them. Buffers are
        left to the caller."""
        self.parameters.fill(values)
        self._restart()

    def _restart(self) -> None:
        self.optimizer.restart_averages()
        if self.local is not None:
            self.local.restart()

    @property
    def placements(self) -> dict[str, Placement]:
        """Which block of which logical tensor each parameter is, by every name that this rank's model has for it."""
        return self.parameters.placements

    def parameters_state(self) -> list[Piece]:
        """Everything that a checkpoint keeps of this rank, as live views: masters (`model/`), moments
        (`optimizer/exp_avg/`, ...), averages (`ema/`), frozen weights and persistent buffers (`model/`). Where replicas train
        apart `model/` is what they have in common, and what is a replica's own has its name behind `replica/`."""
        pieces = [piece for _, kind, run, buffer in self._held() for piece in run.pieces(kind, buffer)]
        replicas = self.axes.replicas
        if replicas is not None:
            pieces = [lifted(piece, replicas) if piece.name.startswith(OWN) else piece for piece in pieces]
        if self.local is not None:
            pieces += self.local.pieces()
        if self.gradients.compressed is not None:
            pieces += self.gradients.compressed.reducer.pieces()
        whole = [(name, parameter.detach()) for name, parameter in self.parameters.frozen.items()]
        whole += [(slot.name, slot.parameter.detach()) for slot in self.parameters.slots if not slot.size]
        for name, tensor in whole:
            placement = self.placements[name]
            inside = tensor[tuple(slice(0, size) for size in placement.box.shape)]  # beyond it there is padding
            pieces.append(Piece(f"model/{placement.name}", inside, placement.shape, placement.box.offset))
        alike = [
            group for group in self.axes.every if group is not self.axes.model.get("pp")
        ]  # stages have buffers of their own
        first = all(dist.get_rank(group) == 0 for group in alike)
        for name, tensor in self._buffers():  # statistics of a rank's own batches differ: one rank's are kept
            pieces.append(Piece(f"model/{name}", tensor, tuple(tensor.shape), (0,) * tensor.dim(), owner=first))
        return pieces

    def gradient_state(self) -> list[Piece]:
        """This rank's part of the reduced gradient as live views named `gradient/...`, loss scale included and not clipped.
        There after `finish` until the next `zero`."""
        parts = self.parameters.ranges
        return [piece for part in parts for run in part.runs() for piece in run.pieces("gradient", part.gradient)]

    def _held(self) -> Iterator[tuple[int, str, Run, torch.Tensor]]:
        """(number of its kind, kind, run, buffer of its range) of masters, moments and averages on this rank."""
        for number, (kind, buffers) in enumerate(self._kinds()):
            for part, buffer in zip(self.parameters.ranges, buffers, strict=True):
                for run in part.runs() if buffer is not None else ():
                    if run.size and buffer is not None:
                        yield number, kind, run, buffer

    def _kinds(self) -> Kinds:
        """With a buffer a range, or None where the range has none of the kind."""
        kinds: Kinds = [("model", [part.master for part in self.parameters.ranges])]
        names = dict.fromkeys(name for moments in self.optimizer.moments for name in moments)
        kinds += [(f"optimizer/{name}", [moments.get(name) for moments in self.optimizer.moments]) for name in names]
        if self.local is not None:
            return self.local.kinds(kinds)
        return [*kinds, ("ema", self.optimizer.averages)] if self.optimizer.averages else kinds

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in self.parameters.persistent)

    def extra_state(self) -> dict[str, Any]:
        """JSON values beside the tensors: updates made, and the loss scaler."""
        state = {"updates": self.optimizer.updates, "scaler": self.scaler.state() if self.scaler else None}
        return state if self.local is None else {**state, "rounds": self.local.state()}

    def load_extra(self, state: dict[str, Any]) -> None:
        """Takes `extra_state`. A scaler's state is taken where this precision has one; else it starts anew."""
        self.optimizer.updates = int(state["updates"])
        if self.scaler and state.get("scaler"):
            self.scaler.load(state["scaler"])
        if self.local is not None:
            self.local.load(state["rounds"])

    def after_load(self) -> None:
        """Call it after the tensors of `parameters_state` were overwritten: working copies follow their masters."""
        self.parameters.refresh()

    def sync_check(self) -> str | None:
        """Name of the first weight, moment or average that is not bitwise the same wherever it is held, else None: on data
        ranks, and on ranks of other parts of the model that share it or hold it too. What is a replica's own may differ.

        Every rank must call it. Weights by their plain name, others as in `parameters_state`.
        """
        self.parameters.settle()
        working = [self._copy(0, "", run, values) for run, values in self.parameters.working()]
        working += [
            Copy((0, 3, 0, 0), name, f"frozen {name} {self.placements[name].box}", parameter.detach(), shared=False)
            for name, parameter in self.parameters.frozen.items()
        ]
        held = [self._copy(number + 1, kind, run, run.of(buffer)) for number, kind, run, buffer in self._held()]
        alike = []
        for name, domain in (("", None), *sorted(self.parameters.sharing.domains.items())):
            copies, same = (self.axes.copies, self.axes.alike) if domain is None else self.axes.within(domain)
            there = [each for each in held if each.domain == name]
            own = [each for each in there if each.label.startswith(OWN)]
            alike += [
                ([each for each in working if each.domain == name], copies if self.local is None else self.axes.inside(copies)),
                (own, self.axes.inside(same)),
                ([each for each in there if not each.label.startswith(OWN)], same),
            ]
        return first_difference(
            alike,
            [(group, name == "pp") for name, group in self.axes.model.items()],
            self.axes.every,
            self.parameters.groups[0].device,
        )

    def _copy(self, number: int, kind: str, run: Run, values: torch.Tensor) -> Copy:
        placement = run.slot.placement
        return Copy(
            order=(number, *self.parameters.place(run.slot)),
            label=f"{kind}/{placement.name}".removeprefix("model/").removeprefix("/"),
            block=f"{kind}/{placement.name} {placement.box} {run.first}+{run.size}",
            values=values,
            shared=bool(placement.shared),
            domain=placement.domain,
        )
