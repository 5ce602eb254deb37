"""Who runs the micro-batches of a step: here one after another; a pipeline brings a runner of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from meshwright.parallel.inputs import scalar_loss

if TYPE_CHECKING:
    from meshwright.parallel.engine import Engine

__all__ = ["Forward", "Runner", "SerialRunner", "Taken", "Waiting"]

Forward = Callable[[nn.Module, int], Any]
"""(model, number of the micro-batch) to its `LossParts`, or whatever `Taken` takes in evaluation."""
Taken = Callable[[int, Any], None]
"""(number of the micro-batch, what `Forward` gave), on ranks that get it. For detached use."""
Waiting = Callable[[], AbstractContextManager[object]]


class Runner(Protocol):
    """Every rank calls the same method with the same count."""

    def train(self, engine: Engine, count: int, forward: Forward, factor: float, taken: Taken, wait: Waiting) -> None:
        """Forward and backward of micro-batches 0 .. count; only waiting for other ranks is inside `wait()`."""
        ...

    def evaluate(self, engine: Engine, count: int, forward: Forward, taken: Taken) -> None:
        """Forward alone; the caller has switched gradients off."""
        ...

    def measured(self) -> dict[str, Any] | None:
        """`split` (layers) and `seconds` (of a micro-batch) of the stages of a pipeline, after a step; None without one."""
        ...


class SerialRunner:
    """The whole model is on every rank."""

    def train(self, engine: Engine, count: int, forward: Forward, factor: float, taken: Taken, wait: Waiting) -> None:
        for number in range(count):
            parts = forward(engine.model, number)
            loss = scalar_loss(parts)
            taken(number, parts)
            with engine.backward_scope(last=number == count - 1):
                (loss * factor).backward(inputs=engine.reach)

    def evaluate(self, engine: Engine, count: int, forward: Forward, taken: Taken) -> None:
        for number in range(count):
            taken(number, forward(engine.model, number))

    def measured(self) -> dict[str, Any] | None:
        return None
