"""From a step's device scalars to metrics.jsonl, sinks and the progress line; and what happens when a number is not finite.

On an accelerator the numbers of step k are read after step k + 1 was queued, so that the device never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshwright.errors import NumericsError
from meshwright.observe.clock import Split

if TYPE_CHECKING:
    from meshwright.train.context import Context
    from meshwright.train.step import Agreed, StepResult

__all__ = ["Recorder", "Sink"]


class Sink(Protocol):
    """Takes the finished line of a step: the metrics file, TensorBoard, the progress line."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Pending:
    counters: dict[str, Any]
    result: StepResult
    split: Split
    finish: Callable[[dict[str, Any], Split], dict[str, Any]]


class Recorder:
    """sinks: only on the lead rank; the others keep the policy on numbers that are not finite, and write nothing.

    deferred: read a step's numbers one step late. Off where the next learning rate depends on them (fp16, `skip`).
    """

    def __init__(self, sinks: list[Sink], *, deferred: bool, on_nonfinite: str, must_know_skips: bool):
        self.must_know_skips = must_know_skips
        self._sinks = sinks
        self._deferred = deferred and not must_know_skips
        self._stop_on_nonfinite = on_nonfinite == "stop"
        self._pending: _Pending | None = None

    def record(self, run: Context, agreed: Agreed, result: StepResult, lr: float, held_out: dict[str, float], split: Split) -> None:
        """Take the numbers of the step that `run.state` has just counted."""
        state = run.state
        counters: dict[str, Any] = {
            "step": state.step,
            "lr": lr,
            "tokens": state.tokens,
            "samples": state.consumed - state.dropped,
            "batch": agreed.rows,
            "targets": agreed.targets,
            "updates": state.updates,
            "skipped": state.skipped,
            "step_tokens": agreed.tokens,
            **held_out,
        }
        previous, self._pending = self._pending, _Pending(counters, result, split, run.figures)
        if previous is not None:
            self._write(previous)
        if not self._deferred:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. A checkpoint must not be published before the lines of its steps stand."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(pending)

    def _write(self, pending: _Pending) -> None:
        result = pending.result
        loss, norm = torch.stack([result.loss.double(), result.grad_norm.double()]).tolist()
        record = {"loss": loss, "grad_norm": norm, "loss_scale": result.loss_scale, **pending.counters}
        for sink in self._sinks:
            sink.write(pending.finish(record, pending.split))
        overflow = result.loss_scale != 1.0 and math.isfinite(loss)  # fp16's own business: the scale goes down and it tries again
        if self._stop_on_nonfinite and not overflow and not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"loss {loss}, gradient norm {norm}"
            raise NumericsError(
                f"step {record['step']}: {what} is not finite; the weights are those before this step. "
                "Lower train.lr, look at the data of this step, or set train.on_nonfinite: skip"
            )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()
        for sink in self._sinks:
            sink.close()
