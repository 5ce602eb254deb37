"""One user's module under training: its engine, its optimizers, and the step that is going on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.compat import BatchNorm, count_step
from meshwright.distributed.reduce import gather_json, max_scalars
from meshwright.distributed.world import Ranks
from meshwright.errors import ConfigError, Finding, MeshwrightError, NumericsError
from meshwright.parallel.batch_norm import batch_norms, count_rows
from meshwright.parallel.engine import Engine, StepInfo
from meshwright.parallel.own_optimizer import OwnOptimizer
from meshwright.runtime.adopted import AdoptedModule
from meshwright.runtime.batches import Split, rows_of, split_rows
from meshwright.runtime.given_optimizer import ParallelOptimizer
from meshwright.runtime.losses import Window, check_len, terms_of, weights_of
from meshwright.runtime.pipelined import even_parts, guess_weight, tell
from meshwright.runtime.user_loader import Share, UserLoader

__all__ = ["Cast", "StepResult", "Training"]

Cast = Callable[[], AbstractContextManager[object]]
"""The context in which a module computes: autocast, or nothing."""


@dataclass(frozen=True)
class StepResult:
    """What a step did. loss: fp64 [], over the whole global batch. losses: the same of each of several losses. grad_norm:
    before clipping. skipped: nothing was updated: fp16 overflowed, or nothing in the batch had a weight. weight: of the first
    loss, over all ranks. lr: of every group of every optimizer."""

    loss: torch.Tensor
    losses: dict[str, torch.Tensor]
    grad_norm: torch.Tensor
    skipped: bool | torch.Tensor
    loss_scale: float
    weight: float
    lr: tuple[float, ...]


@dataclass
class _Parts:
    """What `Engine.run` takes from a forward."""

    loss_sum: torch.Tensor


@dataclass
class _Open:
    """The step that is going on. inside: a micro-batch, which `ends` the step or not. done: of them. last: whether the last one
    is among those. stepped: optimizers whose `step` was called. weights: known once gradients are reduced and divided."""

    window: Window
    inside: bool = False
    ends: bool = True
    done: int = 0
    last: bool = False
    stepped: set[int] = field(default_factory=set)
    weights: dict[str, float] | None = None
    clip: float = 0.0


@dataclass(eq=False)
class Training:
    """split, rows_at_once: how `step` cuts a batch into micro-batches of so many rows; None: into `accumulate` parts. loaders:
    of the run. accumulate: micro-batches a step. weight: constant weight of a step, where each micro-batch weighs 1 by
    definition. stop: raise where a loss or gradient is not finite. members: parameters of each optimizer, where they are
    others than it holds.
    """

    model: nn.Module
    engine: Engine
    own: OwnOptimizer
    ranks: Ranks
    cast: Cast = nullcontext
    loaders: Sequence[UserLoader] = ()
    split: Split = split_rows
    rows_at_once: int | None = None
    accumulate: int = 1
    clip: float = 0.0
    stop: bool = True
    weight: float | None = None
    optimizers: tuple[ParallelOptimizer, ...] = ()
    steps: int = 0
    updates: int = 0
    skipped: int = 0
    result: StepResult | None = None
    _open: _Open | None = None
    _guess: float | None = None
    _doubt: tuple[int, torch.Tensor] | None = None
    _members: list[list[torch.Tensor]] = field(default_factory=list)
    _norms: list[BatchNorm] = field(default_factory=list)
    members: list[list[torch.Tensor]] | None = None
    alone: bool = True
    """Whether no other module is under training in the run: then backward may go wherever the loss leads."""

    def __post_init__(self) -> None:
        self._norms = list(batch_norms(self.model).values())
        self._members = self.members or [
            [p for g in o.param_groups for p in g["params"] if p.requires_grad] for o in self.own.labels.optimizers
        ]

    @property
    def known_as(self) -> tuple[nn.Module, ...]:
        """What a script may have in hand for the model."""
        return (self.model, self.model.adopted.origin) if isinstance(self.model, AdoptedModule) else (self.model,)

    @property
    def loader(self) -> UserLoader | None:
        """The one that handed out a batch last, whichever module it was given with."""
        return max(self.loaders, key=lambda each: each.handed, default=None)

    @property
    def counts(self) -> bool:
        """Whether this rank's rows count: ranks with parts of one model, or other positions, have the same."""
        return all(group.rank() == 0 for group in self.engine.axes.same_rows)

    @property
    def pipelined(self) -> bool:
        return "pp" in self.engine.axes.model

    @property
    def ready(self) -> bool:
        """Whether the micro-batches of the step are all done, so that it can be updated."""
        return self._open is not None and self._open.last and not self._open.inside

    def begin(self, planned: int | None = None, known: dict[str, float] | None = None) -> None:
        """Opens a step, unless one is open. Call it before the first forward."""
        if self._open is not None:
            return
        self._raise_doubt()
        self.engine.zero()
        guess = self.weight if self.weight is not None else self._guess
        device = self.engine.parameters.groups[0].device
        window = Window(self.ranks, device, self.counts, guess, planned or self.accumulate, known, alone=self.pipelined)
        self._open = _Open(window)
        if isinstance(self.model, AdoptedModule):
            self.model.begin(self.steps)

    # ---- a whole step

    def step(
        self, batch: Any, loss_fn: Callable[..., Any], weight_fn: Callable[[Any], Any] | None, active: Sequence[int]
    ) -> Any:
        """Forward, backward and update of one batch of this rank."""
        if self._open is not None:
            raise MeshwrightError("run.step in the middle of a step of your own loop: call run.update() first")
        micro = self._micro_batches(batch)
        weights = [None if weight_fn is None or empty else weight_fn(part) for part, empty in micro]
        if weight_fn is len:
            check_len(batch)
        given = [weight for weight, (_, empty) in zip(weights, micro, strict=True) if not empty]
        known = self._known(given) if weight_fn is not None else None
        self._choose(active)
        self.begin(planned=len(micro), known=known)
        window = self._window.window
        if self.pipelined and known is None and window.guess is None:
            guess_weight(window, batch, all(empty for _, empty in micro))

        def forward(model: nn.Module, i: int) -> _Parts:
            part, empty = micro[i]
            count_rows(self._norms, not empty)
            with self.cast(), self._called(model, i) as called:
                output = loss_fn(called, part)
            weight = weights[i] if weight_fn is not None and not empty else (0.0 if weight_fn is not None else None)
            return _Parts(window.add(terms_of(output, weight), empty=empty, rows=rows_of(part)))

        self.engine.run(len(micro), forward, self.engine.loss_scale, lambda i, parts: None)
        count_rows(self._norms, True)
        if self.pipelined:
            tell(window, self.engine)
        self._window.last = True
        self._window.done = len(micro)
        return self.update(self.clip)

    def _called(self, model: nn.Module, micro: int) -> AbstractContextManager[nn.Module]:
        """What the user's function is given for the model that the engine runs."""
        if isinstance(self.model, AdoptedModule):
            return self.model.through(model, self.steps, micro)
        return nullcontext(model)

    def _micro_batches(self, batch: Any) -> list[tuple[Any, bool]]:
        """(batch, whether it stands in for no rows), the same number on every rank."""
        empty = any(each.stands_in(batch) for each in self.loaders)
        count = self.accumulate
        if self.pipelined:
            return even_parts(batch, empty, self.rows_at_once, count, self.split, self.ranks)
        if self.rows_at_once is not None:
            rows = rows_of(batch)
            if rows is None:
                split_rows(batch, 2)  # which says why it cannot be cut
            count = max(1, math.ceil((rows or 0) / self.rows_at_once))
            if self.ranks.size > 1:
                count = int(max_scalars([count], self.ranks.control)[0])
        if count == 1:
            return [(batch, empty)]
        parts = self.split(batch, count)
        return [(parts[0], True) if empty or rows_of(part) == 0 else (part, False) for part in parts]

    def _known(self, weights: Sequence[Any]) -> dict[str, float]:
        """Sum over micro-batches and ranks of what `weight_fn` gave."""
        mine: dict[str, float] = {}
        for given in weights:
            for name, value in weights_of(given).items():
                mine[name] = mine.get(name, 0.0) + value
        if self.ranks.size == 1:
            return mine
        every = gather_json(mine if self.counts else {}, self.ranks.control)  # a rank with nothing but stand-ins has no names
        names = sorted({name for given in every for name in given})
        return {name: math.fsum(given.get(name, 0.0) for given in every) for name in names}

    def _choose(self, active: Sequence[int]) -> None:
        """Which optimizers the step is for; backward goes to their parameters alone where there are others."""
        every = tuple(range(len(self.own.labels.optimizers)))
        self.own.active = tuple(active)
        whole = self.own.active == every and self.alone
        if self.pipelined and not whole:
            fix = "Step all optimizers together, or use pp: 1"
            what = "trains one module, all of it in each step"
            raise ConfigError(findings=[Finding("plan.layout.pp", f"a pipeline {what}", fix)])
        self.engine.reach = None if whole else [p for number in active for p in self._members[number]]

    @property
    def _window(self) -> _Open:
        if self._open is None:
            raise MeshwrightError("there is no micro-batch to update from: use `with run.micro_batch(): run.backward(loss)`")
        return self._open

    # ---- the user's own loop

    @contextmanager
    def micro_batch(self, last: bool | None, active: Sequence[int]) -> Iterator[None]:
        """Around forward and backward of one micro-batch; `last`: of the step."""
        if self.pipelined:
            fix = "Use run.step(batch, loss_fn)"
            raise ConfigError(findings=[Finding("plan.layout.pp", "a pipeline runs the micro-batches of a step itself", fix)])
        self._choose(active)
        self.begin()
        state = self._window
        if state.inside or state.last:
            raise MeshwrightError("a micro-batch inside another, or after the last one of the step: call run.update() first")
        state.inside, before = True, state.done
        state.ends = self.due() if last is None else last
        count_rows(self._norms, self.loader is None or not self.loader.share.empty)
        try:
            with self.cast(), self._called(self.engine.model, state.done):
                yield
        finally:
            state.inside = False
            count_rows(self._norms, True)
        if state.done == before:
            raise MeshwrightError("a micro-batch without run.backward(loss)")

    def due(self) -> bool:
        """Whether the next micro-batch is the last of its step: by their number, or at the end of an epoch."""
        done = 0 if self._open is None else self._open.done
        ended = self.loader is not None and self.loader.share.last
        return done + 1 >= self.accumulate or ended

    def backward(self, output: Any, weight: Any = None, last: bool | None = None) -> None:
        """Backward of the micro-batch that is going on. output, weight: see `losses.terms_of`."""
        state = self._window
        empty, rows = False, None
        if self.loader is not None and isinstance(self.loader.share, Share) and self.weight is None:
            empty, rows = self.loader.share.empty, self.loader.share.rows
        with torch.autocast(self.ranks.device.type, enabled=False):
            start = state.window.add(terms_of(output, weight), empty=empty, rows=rows)
            last = state.ends if last is None else last
            with self.engine.backward_scope(last=last):
                (start * self.engine.loss_scale).backward(inputs=self.engine.reach)
        state.done += 1
        state.last = last

    # ---- the end of a step

    def finish(self) -> dict[str, float]:
        """Reduced gradients that are divided as they should be; the weight of each loss. Once a step."""
        state = self._window
        if not state.last:
            done, planned = state.done, state.window.planned
            fix = "say run.micro_batch(last=True), or ask run.ready before run.update()"
            raise MeshwrightError(f"the step is not complete: {done} of {planned} micro-batches; {fix}")
        if state.weights is None:
            self.engine.finish()
            if self.weight is not None:
                state.weights = dict.fromkeys(state.window.names, self.weight)
            else:
                factor, state.weights = state.window.close()
                self.engine.divide(factor)
                first = next(iter(state.weights.values()))
                self._guess = first or self._guess
        return state.weights

    def clip_to(self, norm: float) -> torch.Tensor:
        """The norm before clipping, fp32 or wider []. The update will clip."""
        self.finish()
        self._window.clip = norm
        return self.engine.grad_norm()

    def update(self, clip: float | None = None) -> StepResult:
        """Ends the step. Raises NumericsError where loss or gradients are not finite and the policy is to stop."""
        weights = self.finish()
        state, self._open = self._window, None
        self.steps += 1
        loss, losses = self._losses(state.window, weights)
        lr = tuple(float(group["lr"]) for group in self.own.labels.groups)
        weight = next(iter(weights.values()))
        if not any(weights.values()):
            self.skipped += 1
            zero = torch.zeros((), dtype=torch.float64)
            self.result = StepResult(zero, losses, zero, True, self.engine.loss_scale, 0.0, lr)
            return self.result
        info = self.engine.update(0.0, state.clip if clip is None else clip)
        self.engine.parameters.settle()  # the user may call any part of the model next
        for number in self.own.active:
            count_step(self.own.labels.optimizers[number])
            count_step(self.optimizers[number])
        self._judge(info, loss)
        self.result = StepResult(loss, losses, info.grad_norm.double(), info.skipped, info.loss_scale, weight, lr)
        return self.result

    def step_of(self, number: int) -> StepResult | None:
        """The user called `step` of optimizer `number`: the step ends when all that it is for were called."""
        state = self._window
        if number not in self.own.active:
            raise MeshwrightError("step() of an optimizer that the micro-batches were not for")
        state.stepped.add(number)
        return self.update() if state.stepped >= set(self.own.active) else None

    def _losses(self, window: Window, weights: dict[str, float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums = window.sums()
        if self.engine.axes.context is not None and self.engine.axes.context.rank():
            sums.zero_()  # the same rows, which the first of them counts
        if (pipeline := self.engine.axes.model.get("pp")) is not None:
            dist.all_reduce(sums, group=pipeline)
        if self.engine.axes.data is not None:
            dist.all_reduce(sums, group=self.engine.axes.data)
        losses = {name: sums[i] / weights[name] if weights[name] else sums[i] for i, name in enumerate(window.names)}
        return torch.stack(list(losses.values())).sum(), losses

    def _judge(self, info: StepInfo, loss: torch.Tensor) -> None:
        if info.skipped is True:  # fp16 has waited for the device, and tries again with a smaller scale
            self.skipped += 1
            if info.exhausted and self.stop:
                what = f"fp16 overflows at loss scale {info.loss_scale:g}, which cannot go lower"
                raise NumericsError(f"step {self.steps}: {what}. Use bf16, or a smaller learning rate")
            return
        self.updates += 1
        if not self.stop or not isinstance(info.skipped, torch.Tensor):
            return
        if info.skipped.device.type != "cpu":
            self._doubt = (self.steps, info.skipped)  # looked at when the next step begins: the device need not be waited for
        elif bool(info.skipped):
            self._raise_not_finite(self.steps, loss, self.engine.nonfinite_parameter())

    def _raise_doubt(self) -> None:
        doubt, self._doubt = self._doubt, None
        if doubt is not None and bool(doubt[1]):
            self._raise_not_finite(doubt[0], None if self.result is None else self.result.loss, None)

    def _raise_not_finite(self, step: int, loss: torch.Tensor | None, name: str | None) -> None:
        value = "" if loss is None else f" (loss {float(loss):g})"
        where = "" if name is None else f"; the first parameter whose gradient is not finite is {name}"
        raise NumericsError(f"step {step}: loss or gradients are not finite{value}{where}. Nothing was updated")
