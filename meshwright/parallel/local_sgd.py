"""Slow links: replicas that train apart for a round of steps and then exchange what moved (local SGD, DiLoCo).

A replica is what `dp_shard`, `cp`, `tp` and `pp` make up; inside it everything is as it always is. Across replicas, after
`warmup` steps in which gradients are summed as usual, no gradient is exchanged: each replica divides its loss by the targets
of its own rows, clips by its own norm, skips and scales its loss for itself, and keeps moments, loss scale and count of updates
for itself. With the weights A in which a round of `every` steps begins, and W[r] at its end on replica r of R:

    d[r] = A - W[r],   D = mean over r of d[r]

    local_sgd (arXiv:1805.09767)          A <- A - D, the mean of the weights
    diloco (arXiv:2311.08105)             m <- momentum m + D;   A <- A - outer_lr (D + momentum m)       (Nesterov)
    W[r] <- A

diloco with overlap: the mean of a round is on its way while the next round trains, and enters A one round late. A replica keeps
its own way meanwhile: after round k, which it began in B[r],

    d[r, k] = B[r] - W[r];   A <- outer step of A with D[k-1] (none after the first round);   W[r] <- B[r] <- A - d[r, k]

That a replica goes on from its own newest steps, before those of others arrive, is the idea of eager updates
(arXiv:2502.12996); there they enter the outer state, which then is another one on each replica. Here A and m are the same
everywhere, and are what is evaluated, saved as `model/`, and exported.

Each rank exchanges the pieces that it updates, so that of N shards each sends 1/N. A, m and what overlap adds (B and D) have
the dtype and the place of the masters (D: of the device): 1, 2 or 4 times g P / N bytes a rank. Moments are not averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.config.schema import SyncConfig
from meshwright.distributed.piece import Piece
from meshwright.parallel.compress import Flight, Reducer, lifted
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.optimizer import FlatOptimizer, exchanged
from meshwright.parallel.precision import LossScaler
from meshwright.parallel.replicate import Gradients

if TYPE_CHECKING:
    from meshwright.parallel.engine import StepInfo

__all__ = ["OWN", "Kinds", "LocalSteps"]

OWN = "replica/"
"""Begins the names, in a checkpoint, of what each replica has for itself; their shapes begin with a dimension of replicas."""

Buffers = list[torch.Tensor]
Kinds = list[tuple[str, Sequence[torch.Tensor | None]]]


class LocalSteps:
    """The outer loop. reducer: over the replicas, for the ranges of `parameters`. together, inside: the groups whose ranks see
    different samples, of the whole run and of this replica."""

    def __init__(
        self,
        config: SyncConfig,
        parameters: FlatParameters,
        gradients: Gradients,
        optimizer: FlatOptimizer,
        scaler: LossScaler | None,
        reducer: Reducer,
        *,
        together: dist.ProcessGroup | None,
        inside: dist.ProcessGroup | None,
    ):
        self.config = config
        self.reducer = reducer
        self.replicas = reducer.group
        self.parameters, self.gradients, self.optimizer, self.scaler = parameters, gradients, optimizer, scaler
        self._together, self._inside = together, inside
        self.steps = 0
        """Updates and skipped ones, of all replicas alike: what rounds are counted by."""
        self.anchors = self._buffers(True)
        self._momenta = self._buffers(config.method == "diloco" and config.outer_momentum > 0)
        self._begins = self._buffers(config.overlap)
        self._coming = [torch.zeros_like(each, device=self._device) for each in self._buffers(config.overlap)]
        """Sums over the replicas of what moved in the round before: being made, or there."""
        self._flights: list[Flight] = []
        self._late = False
        """Whether there was a round before."""
        self._counters = torch.zeros(4, dtype=torch.float64)
        self._take_weights()

    def _buffers(self, kept: bool) -> Buffers:
        return [part.buffer() for part in self.parameters.ranges] if kept else []

    @property
    def _device(self) -> torch.device:
        return self.parameters.groups[0].device

    # ---- a step

    @property
    def apart(self) -> bool:
        """Whether the present step is one that each replica takes for itself."""
        return self.steps >= self.config.warmup

    def begin(self) -> None:
        """Before the first backward of a step."""
        apart = self.apart
        self.gradients.join(self._inside if apart else self._together, None if apart else self.replicas)

    def after(self, info: StepInfo) -> StepInfo:
        """After the update of this replica, or what it skipped: exchanges at the end of a round. Returns what the replicas say
        together: the mean of their norms, skipped if all have, exhausted if one is."""
        apart = self.apart
        self.steps += 1
        if not apart:
            if self.apart:  # from the next step on
                self._take_weights()
            return info
        done = (self.steps - self.config.warmup) % self.config.every
        if not done:
            self._exchange_late() if self.config.overlap else self._exchange()
        elif done == self.config.every // 2 and self.reducer.messages > 1:
            for flight in self._flights:
                flight.advance()
        return self._agreed(info)

    def _agreed(self, info: StepInfo) -> StepInfo:
        from meshwright.parallel.engine import StepInfo

        norm = info.grad_norm
        flags = [torch.as_tensor(flag, device=norm.device).to(norm.dtype) for flag in (info.skipped, info.exhausted)]
        told = torch.stack([norm, *flags])
        dist.all_reduce(told, group=self.replicas)
        ways = self.replicas.size()
        exhausted = self.scaler is not None and bool(told[2] > 0)
        return StepInfo(told[0] / ways, told[1] == ways, info.loss_scale, exhausted)

    # ---- the end of a round

    def _exchange(self) -> None:
        self.parameters.settle()
        flights, moved = [], []
        for part, anchor in zip(self.parameters.ranges, self.anchors, strict=True):
            torch.sub(anchor, part.master, out=part.master)
            moved.append(part.master.to(self._device))  # a copy only where masters are in host memory
            flights.append(self.reducer.start(part, moved[-1]))
        for number, part in enumerate(self.parameters.ranges):
            flights[number].wait()
            self._outer_step(number, moved[number])
            part.master.copy_(self.anchors[number])
            self._publish(part)

    def _exchange_late(self) -> None:
        self.parameters.settle()
        self.arrive()
        for number, part in enumerate(self.parameters.ranges):
            begin, anchor, coming = self._begins[number], self.anchors[number], self._coming[number]
            torch.sub(begin, part.master, out=part.master)
            if self._late:
                self._outer_step(number, coming)
            torch.sub(anchor, part.master, out=begin)
            coming.copy_(part.master)
            self._flights.append(self.reducer.start(part, coming))
            part.master.copy_(begin)
            self._publish(part)
        self._late = True

    def _outer_step(self, number: int, total: torch.Tensor) -> None:
        """total: sum over the replicas of what moved; overwritten."""
        anchor = self.anchors[number]
        mean = total.div_(self.replicas.size()).to(anchor.device)
        if self.config.method == "local_sgd":
            anchor.sub_(mean)
            return
        if self._momenta:
            momentum = self._momenta[number]
            momentum.mul_(self.config.outer_momentum).add_(mean)
            mean.add_(momentum, alpha=self.config.outer_momentum)
        anchor.sub_(mean, alpha=self.config.outer_lr)

    def arrive(self) -> None:
        """Waits for the sums that are on their way."""
        for flight in self._flights:
            flight.wait()
        self._flights = []

    def _publish(self, part: Any) -> None:
        if part.mixed:
            part.working.copy_(part.master)
        self.parameters.publish(part)

    # ---- weights from elsewhere

    def restart(self) -> None:
        """The weights were given new values: all begins with them."""
        self.arrive()
        self._take_weights()
        for buffer in [*self._momenta, *self._coming]:
            buffer.zero_()
        self._late = False

    def _take_weights(self) -> None:
        self.parameters.settle()
        for buffers in filter(None, (self.anchors, self._begins)):
            for part, buffer in zip(self.parameters.ranges, buffers, strict=True):
                buffer.copy_(part.master)

    def evaluated(self) -> AbstractContextManager[None]:
        """The model computes with the weights that all replicas have in common inside."""
        return exchanged(self.parameters, self.anchors if self.apart else [])

    # ---- checkpoints

    def kinds(self, own: Kinds) -> Kinds:
        """own: masters and moments of this replica. All that a checkpoint keeps, a buffer a range; waits for what is on its
        way."""
        self.arrive()
        if not self.apart:
            self._take_weights()
        kinds: Kinds = [(OWN + name, buffers) for name, buffers in own]
        kinds += [(f"{OWN}begin", self._begins)] if self._begins else []
        kinds.append(("model", self.anchors))
        kinds += [("outer/momentum", self._momenta)] if self._momenta else []
        return [*kinds, ("outer/coming", self._coming)] if self._coming else kinds

    def pieces(self) -> list[Piece]:
        """What a checkpoint keeps beside them: updates and loss scale of this replica, and the reducer's."""
        scaler = self.scaler
        told = [scaler.scale, scaler.good, scaler.tries] if scaler else [1.0, 0, 0]
        self._counters = torch.tensor([self.optimizer.updates, *told], dtype=torch.float64)
        mine = Piece(f"{OWN}counters", self._counters, (4,), (0,))
        return [lifted(mine, self.replicas), *self.reducer.pieces()]

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "late": self._late}

    def load(self, state: dict[str, Any]) -> None:
        """After the tensors of the last `kinds` and `pieces` were overwritten."""
        self.steps, self._late = int(state["steps"]), bool(state["late"])
        updates, scale, good, tries = self._counters.tolist()
        self.optimizer.updates = int(updates)
        if self.scaler:
            self.scaler.load({"scale": scale, "good": good, "tries": tries})
