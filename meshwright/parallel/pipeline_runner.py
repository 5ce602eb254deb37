"""Runs the micro-batches of a step through this rank's stages, by the action list of a schedule.

What a micro-batch leaves in a stage is dropped as soon as its backward has used it. Of an output that was sent only its place
in the graph is kept, not its values. Messages pass while something else is computed; only waiting for one that is late is
inside `wait()`.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.distributed import device as devices
from meshwright.models.trunk import Hidden
from meshwright.parallel.inputs import scalar_loss
from meshwright.parallel.links import Links, Mail
from meshwright.parallel.runner import Forward, Taken, Waiting
from meshwright.parallel.split_backward import Deferral, Factors
from meshwright.spec.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT,
    Action,
    forward_actions,
    peer,
    pipeline_actions,
    rank_of,
    receipts,
    stage_of,
    with_messages,
)

if TYPE_CHECKING:
    from meshwright.parallel.engine import Engine

__all__ = ["Pipeline"]

OPEN_EVENTS = 4096
"""Spans that a clock keeps until the device has reached them; with more the oldest are left out."""


class Pipeline:
    """A runner of `Engine`: every rank calls its methods with the same count.

    All micro-batches of a call have the shape of the first. spans: layers of every stage. group: the ranks of this pipeline.
    deferral: attached to this rank's blocks where backward is split; without it an action I is a whole backward, and W empty.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        schedule: str,
        ranks: int,
        chunks: int,
        spans: Sequence[tuple[int, int]],
        links: Links,
        group: dist.ProcessGroup,
        deferral: Deferral | None,
    ):
        self.model = model
        self.schedule, self.ranks, self.chunks = schedule, ranks, chunks
        self.spans = tuple(spans)
        self.links = links
        self.group = group
        self.deferral = deferral
        self.rank = links.rank
        self.held = stage_of(schedule, ranks, chunks)[self.rank]
        self.clock = StageClock(links.device)
        self._lists: dict[tuple[bool, int], tuple[tuple[Action, ...], dict[Action, tuple[Action, ...]]]] = {}

    @property
    def final(self) -> int:
        return len(self.spans) - 1

    def train(
        self, engine: Engine, count: int, forward: Forward, factor: float, taken: Taken, wait: Waiting = nullcontext
    ) -> None:
        """Forward and backward of micro-batches 0 .. count.

        forward(model, i): with a stage in place of the model; it returns where that is the last one (`LossParts`), and ends
        at the call of the model where it is not. taken(i, parts): on the rank of the last stage.
        """
        self.clock.next_step()
        actions, told = self._actions(count, training=True)
        _Step(self, engine, count, forward, factor, taken, wait, told).run(actions)

    def evaluate(self, engine: Engine, count: int, forward: Forward, taken: Taken) -> None:
        """Forward alone; `taken` gets the result of every batch on every rank, which must be a tensor of one shape for all."""
        mine: list[torch.Tensor] = []
        actions, told = self._actions(count, training=False)
        step = _Step(self, engine, count, forward, 1.0, lambda number, result: mine.append(result), nullcontext, told)
        with torch.no_grad():
            step.run(actions)
        results = self._broadcast(torch.stack(mine) if mine else None)
        for number in range(count):
            taken(number, results[number])

    @property
    def seconds(self) -> dict[int, float]:
        """Of a micro-batch in each stage of this rank, forward and backward, mean over the training steps so far. Waits for
        the device."""
        return {stage: self.clock.of(stage) for stage in self.held}

    def stage_seconds(self) -> list[float]:
        """`seconds` of every stage of the pipeline. All its ranks call it, after a step."""
        device = self.links.device
        found = torch.zeros(len(self.spans), dtype=torch.float64, device=device)
        for stage, seconds in self.seconds.items():
            found[stage] = seconds
        dist.all_reduce(found, group=self.group)
        return found.tolist()

    def measured(self) -> dict[str, Any]:
        """All ranks of the pipeline call it."""
        return {"split": [stop - start for start, stop in self.spans], "seconds": self.stage_seconds()}

    def _actions(self, count: int, *, training: bool) -> tuple[tuple[Action, ...], dict[Action, tuple[Action, ...]]]:
        """What this rank does, and its `receipts`."""
        key = (training, count)
        if key not in self._lists:
            make = pipeline_actions if training else forward_actions
            shape = (self.schedule, self.ranks, self.chunks)
            computed = make(self.schedule, self.ranks, count, self.chunks)
            self._lists[key] = with_messages(computed, *shape)[self.rank], receipts(computed, *shape)[self.rank]
        return self._lists[key]

    def _broadcast(self, results: torch.Tensor | None) -> torch.Tensor:
        """From the rank of the last stage, in fp64 [count, length]; the length is not known elsewhere."""
        source, device = rank_of(self.schedule, self.ranks, self.final), self.links.device
        shape = torch.zeros(2, dtype=torch.int64, device=device)
        if results is not None:
            shape.copy_(torch.tensor(results.shape))
        dist.broadcast(shape, group=self.group, group_src=source)
        values = torch.empty(shape.tolist(), dtype=torch.float64, device=device) if results is None else results.double()
        dist.broadcast(values, group=self.group, group_src=source)
        return values


class _Reached(BaseException):
    """A stage has given its hidden states: what follows the call of the model is the last stage's to do. No `Exception`, so
    that nothing on the way takes it for a failure."""

    def __init__(self, output: torch.Tensor):
        self.output = output


class _Stage:
    """Stands in for the model in a loss function."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor | None, span: tuple[int, int], last: bool):
        self._model, self._hidden, self._last = model, hidden, last
        self.span = span

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, hidden=self._hidden, span=self.span, **kwargs)
        if not self._last:
            raise _Reached(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Probe:
    """Stands in for the model to see what it would be called with."""

    def __init__(self, model: nn.Module):
        self._model = model

    def __call__(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Step:
    """One walk through the action list. Dictionaries are by (stage, micro-batch) and hold what waits for a later action."""

    def __init__(
        self,
        runner: Pipeline,
        engine: Engine,
        count: int,
        forward: Forward,
        factor: float,
        taken: Taken,
        wait: Waiting,
        told: Mapping[Action, Sequence[Action]],
    ):
        self.runner, self.engine, self.count = runner, engine, count
        self.forward, self.factor, self.taken = forward, factor, taken
        self.mail = Mail(runner.links, wait, told)
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor | GradientEdge | None] = {}
        self.beside: dict[tuple[int, int], torch.Tensor] = {}
        """What is learned beside the loss, of stages before the last."""
        self.made: dict[Action, torch.Tensor] = {}
        """What the next action sends, or the neighbouring stage on this rank takes."""
        self.factors: dict[tuple[int, int], list[Factors]] = {}

    def run(self, actions: Sequence[Action]) -> None:
        do: dict[str, Callable[[Action], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT: self._backward if self.runner.deferral is None else self._input,
            WEIGHT: self._nothing if self.runner.deferral is None else self._weight,
            SEND_ACTIVATION: self._send,
            SEND_GRADIENT: self._send,
            RECEIVE_ACTIVATION: self._receive,
            RECEIVE_GRADIENT: self._receive,
        }
        for action in actions:
            do[action.kind](action)
        self.mail.finish()

    # ---- messages ----

    def _send(self, action: Action) -> None:
        self.mail.send(action, self.made.pop(action), self._peer(action))

    def _receive(self, action: Action) -> None:
        self.mail.post(action, torch.empty(self.shape, dtype=self.dtype, device=self.runner.links.device), self._peer(action))

    def _peer(self, action: Action) -> int:
        return peer(action, self.runner.schedule, self.runner.ranks)

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Of hidden states: rows, positions that are here, width."""
        probe: Any = _Probe(self.runner.model)
        try:
            self.forward(probe, 0)
        except _Reached as reached:
            rows, positions = reached.output.shape
            model: Any = self.runner.model
            if getattr(model, "context", None) is not None:
                positions = model.context.share(positions)
            if hasattr(model, "split"):
                here = model.split(torch.empty(1, positions, 1, device=reached.output.device))
                positions = here.shape[1]
            return rows, positions, model.config.width
        raise RuntimeError("the loss function does not call the model")

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return next(self.runner.model.parameters()).dtype

    # ---- what is computed ----

    def _forward(self, action: Action) -> None:
        stage, micro = unit = action[1:]
        runner = self.runner
        hidden = self._hidden(stage, micro) if stage else None
        if hidden is not None and torch.is_grad_enabled():
            self.inputs[unit] = hidden.requires_grad_()
        last = stage == runner.final
        part: Any = _Stage(runner.model, hidden, runner.spans[stage], last)
        with runner.clock.span(stage, FORWARD) if torch.is_grad_enabled() else nullcontext():  # evaluation is no step
            try:
                output = self.forward(part, micro)
            except _Reached as reached:
                output = reached.output
        if last:
            self.taken(micro, output)
            if torch.is_grad_enabled():
                self.outputs[unit] = scalar_loss(output)
            return
        if isinstance(output, Hidden):
            output, beside = output
            if beside is not None:
                self.beside[unit] = beside
        self.made[Action(SEND_ACTIVATION, stage, micro)] = output.detach().contiguous()
        if torch.is_grad_enabled():
            self.outputs[unit] = get_gradient_edge(output) if output.requires_grad else None

    def _hidden(self, stage: int, micro: int) -> torch.Tensor:
        local = self.made.pop(Action(SEND_ACTIVATION, stage - 1, micro), None)
        return self.mail.take(Action(RECEIVE_ACTIVATION, stage, micro)) if local is None else local

    def _gradient(self, stage: int, micro: int) -> torch.Tensor:
        """Of the output of a stage."""
        local = self.made.pop(Action(SEND_GRADIENT, stage + 1, micro), None)
        return self.mail.take(Action(RECEIVE_GRADIENT, stage, micro)) if local is None else local

    def _backward(self, action: Action) -> None:
        self._run_backward(action, "whole")

    def _input(self, action: Action) -> None:
        assert self.runner.deferral is not None
        with self.runner.deferral.collect() as kept:
            self._run_backward(action, "input")
        self.factors[action[1:]] = kept

    def _run_backward(self, action: Action, part: str) -> None:
        stage, micro = unit = action[1:]
        output = self.outputs.pop(unit)
        if stage == self.runner.final:
            assert isinstance(output, torch.Tensor)
            output, gradient = output * self.factor, None
        else:
            gradient = self._gradient(stage, micro)
        beside = self.beside.pop(unit, None)
        with self._scope(action, part), self.runner.clock.span(stage, BACKWARD):
            if beside is not None:
                torch.autograd.backward((output, beside * self.factor), (gradient, None))  # type: ignore[arg-type]  # one is an edge
            elif output is not None:  # a first stage in which nothing is trained has no graph
                torch.autograd.backward(output, gradient)
        if stage:
            hidden = self.inputs.pop(unit)
            self.made[Action(SEND_GRADIENT, stage, micro)] = (
                torch.zeros_like(hidden) if hidden.grad is None else hidden.grad.contiguous()
            )

    def _weight(self, action: Action) -> None:
        kept = self.factors.pop(action[1:])
        with self._scope(action, "weight"), self.runner.clock.span(action.stage, WEIGHT):
            while kept:
                for parameter, gradient in kept.pop(0).weight_gradients():
                    assert isinstance(parameter, nn.Parameter)
                    self.engine.gradients.deliver(parameter, gradient)

    def _nothing(self, action: Action) -> None:
        pass

    def _scope(self, action: Action, part: str) -> Any:
        chunk = self.runner.held.index(action.stage)
        return self.engine.backward_scope(last=action.micro == self.count - 1, chunk=chunk, part=part)


@dataclass
class StageClock:
    """Mean seconds of each kind of action in each stage: by the host's clock on a CPU, by events of the device's queue
    elsewhere, which are read when they are over, so that nothing waits. The first step counts where there is no other one: it
    compiles, tunes and allocates."""

    device: torch.device
    _first: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)
    _sums: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)
    _open: deque[tuple[bool, tuple[int, str], torch.Event, torch.Event]] = field(
        default_factory=lambda: deque(maxlen=OPEN_EVENTS)
    )
    """Of spans that the device may not have reached, in its order."""
    _steps: int = 0

    @contextmanager
    def span(self, stage: int, kind: str) -> Iterator[None]:
        start = devices.event(self.device, timing=True)
        began = time.perf_counter()
        if start is not None:
            start.record()
        yield
        if start is None:
            self._add(self._steps <= 1, (stage, kind), time.perf_counter() - began)
            return
        stop = devices.event(self.device, timing=True)
        assert stop is not None
        stop.record()
        self._open.append((self._steps <= 1, (stage, kind), start, stop))

    def next_step(self) -> None:
        self._read()
        self._steps += 1

    def of(self, stage: int) -> float:
        """Seconds of one micro-batch, all kinds; 0 before any."""
        devices.synchronize(self.device)
        self._read()
        return sum(total / count for (at, _), (total, count) in (self._first | self._sums).items() if at == stage)

    def _read(self) -> None:
        while self._open and self._open[0][-1].query():
            first, key, start, stop = self._open.popleft()
            self._add(first, key, start.elapsed_time(stop) / 1e3)

    def _add(self, first: bool, key: tuple[int, str], seconds: float) -> None:
        sums = self._first if first else self._sums
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + seconds, count + 1)
