"""From a step's device scalars to metrics.jsonl, sinks and the progress line; and what happens when a number is not finite.

On an accelerator the numbers of step k set out for the host at its end and are read after step k + 1 was queued, so that the
device never waits for the host.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright.distributed.device import fetch
from meshwright.errors import DeviceError, Finding, NumericsError
from meshwright.observe.clock import Split
from meshwright.observe.metrics import MetricsWriter
from meshwright.observe.progress import NullProgress
from meshwright.train.figures import Figures
from meshwright.train.result import Agreed, StepResult

__all__ = ["MetricsSink", "ProgressSink", "Recorder"]


class Sink(Protocol):
    """Takes the finished line of a step."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsSink:
    """metrics.jsonl."""

    def __init__(self, writer: MetricsWriter):
        self._writer = writer

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._writer.write(**record)
        except OSError as error:
            free = shutil.disk_usage(self._writer.path.parent).free
            what = f"cannot be written: {error.strerror} ({free / 2**20:,.1f} MiB free)"
            fix = "Free space, then go on from the newest checkpoint with --resume"
            raise DeviceError(findings=[Finding(str(self._writer.path), what, fix)]) from None

    def close(self) -> None:
        self._writer.close()


class ProgressSink:
    """The line that a person sees, and a line of its own for each evaluation."""

    def __init__(self, progress: NullProgress):
        self._progress = progress

    def write(self, record: dict[str, Any]) -> None:
        said = ""
        if "expert_load" in record:
            said = f"fullest expert {record['expert_load']:.2f}x"
            said += f", {record['dropped_tokens']:,} dropped" * (record["dropped_tokens"] > 0)
        self._progress.update(record["step"], loss=record["loss"], tokens_per_s=record["tokens_per_s"], said=said)
        held_out = {key: value for key, value in record.items() if key.startswith("val_") and key != "val_targets"}
        if held_out:
            shown = ", ".join(f"{key.removeprefix('val_').replace('_', ' ')} {value:.4g}" for key, value in held_out.items())
            self._progress.note(f"step {record['step']}: held-out {shown}")

    def close(self) -> None:
        self._progress.close()


@dataclass
class _Pending:
    record: dict[str, Any]
    agreed: Agreed
    result: StepResult
    split: Split
    numbers: Callable[[], list[float]]
    """Loss, gradient norm, noise, of experts their two figures; may wait for the device."""


class Recorder:
    """sinks: of the lead rank; the others have none and keep only the policy on numbers that are not finite.

    deferred: read a step's numbers one step late. Never where the next learning rate depends on them (must_know_skips).
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        figures: Figures,
        *,
        deferred: bool,
        must_know_skips: bool,
        stop_on_nonfinite: bool,
    ):
        self.must_know_skips = must_know_skips
        self._sinks = sinks
        self.figures = figures
        self.deferred = deferred and not must_know_skips
        self._stop_on_nonfinite = stop_on_nonfinite
        self._pending: _Pending | None = None

    def record(self, record: dict[str, Any], agreed: Agreed, result: StepResult, split: Split) -> None:
        """Take a step: `record` has its counters, `result` the device scalars that may not be there yet."""
        routing = () if result.routing is None else tuple(result.routing)
        numbers = fetch(torch.stack([result.loss, result.grad_norm, result.noise, *routing]))
        previous, self._pending = self._pending, _Pending(record, agreed, result, split, numbers)
        if previous is not None:
            self._write(previous)
        if not self.deferred:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. A checkpoint must not be published before the lines of its steps stand."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(pending)

    def _write(self, pending: _Pending) -> None:
        result, record = pending.result, pending.record
        loss, norm, small, *routing = pending.numbers()
        record = {"loss": loss, "grad_norm": norm, **record, "loss_scale": result.loss_scale}
        if routing:
            record.update(expert_load=routing[0], dropped_tokens=int(routing[1]))
        if pending.agreed.targets == 0:  # no target in the whole global batch: there is no loss
            record.update(loss=None, grad_norm=None)
        record.update(self.figures.of(pending.agreed, pending.split, norm=norm, small=small))
        for sink in self._sinks:
            sink.write(record)
        if self._stop_on_nonfinite and not result.retries and not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericsError(_explain(record["step"], loss, norm, result.culprit()))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()
        for sink in self._sinks:
            try:
                sink.close()
            except OSError:  # what a full disk did not take: the write that met it has said so
                if kind is None:
                    raise


def _explain(step: int, loss: float, norm: float, culprit: str | None) -> str:
    where = f", first in the gradient of {culprit}" if culprit else ""
    return (
        f"step {step}: loss {loss}, gradient norm {norm}{where}. The step was not applied. "
        "Lower train.lr, look at the rows of this step, or set train.on_nonfinite: skip"
    )
