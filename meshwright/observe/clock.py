"""Where the time of a step goes: compute, exposed communication, data, checkpoint, evaluate, idle.

The clock is a row of *marks* on one time line. Entering or leaving a span sets a mark; the time between two neighbouring
marks belongs to the innermost span that is open there, or to `idle` when none is. So the parts are a partition of the
step: they sum to the wall time exactly (whole nanoseconds), and none can be negative.

Which time line:
- CPU: the host's monotonic clock.
- An accelerator: the *compute stream*. A mark is a timing event recorded on that stream, so a part is the time by which
  the span delayed the device. A loader that is late by 50 ms while the device still has queued work costs nothing and shows
  nothing; when the device has run dry, it shows 50 ms of data. The wait of the compute stream for a collective is the time
  between an event before and one after the wait: exposed communication, without any synchronisation.
  Gaps between kernels inside a compute span (launch cost) count as compute; GPU utilisation shows them. So do waits that
  nobody puts a span around: for weights under ZeRO, for reductions waited for inside backward, for tensor-parallel collectives.

The wall time of a step reaches from the end of the step before to its own end, on the same time line, so the walls of a
run add up to the run. Events are read when a `Split` is first looked at: look at it one step late, beside the loss, and
nothing waits; look at once, and it costs one synchronisation with the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from meshwright.distributed import device as devices

__all__ = ["IDLE", "PARTS", "Split", "StepClock"]

PARTS = ("compute", "communication", "data", "checkpoint", "evaluate")
IDLE = "idle"


class _Timeline(Protocol):
    """A mark is a moment on the time line: an integer of nanoseconds, or an event of a device."""

    def mark(self) -> Any: ...

    def between(self, start: Any, stop: Any) -> int:
        """Nanoseconds."""
        ...

    def wait(self, mark: Any) -> None: ...

    def ready(self, mark: Any) -> bool: ...


class _HostTimeline:
    def mark(self) -> int:
        return time.perf_counter_ns()

    def between(self, start: int, stop: int) -> int:
        return stop - start

    def wait(self, mark: int) -> None:
        pass

    def ready(self, mark: int) -> bool:
        return True


class _StreamTimeline:
    """Events of the stream that is current on `device` when the clock is made: the compute stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.accelerator.current_stream(device)

    def mark(self) -> torch.Event:
        event = devices.event(self._device, timing=True)
        assert event is not None
        event.record(self._stream)
        return event

    def between(self, start: torch.Event, stop: torch.Event) -> int:
        return max(0, round(start.elapsed_time(stop) * 1e6))

    def wait(self, mark: torch.Event) -> None:
        mark.synchronize()

    def ready(self, mark: torch.Event) -> bool:
        return mark.query()


class Split:
    """Seconds of one step, by part. Properties: `wall`, `parts` (every part and idle), `training`, `ready`.

    On an accelerator the first look waits for the end of this step's work on the device.
    """

    def __init__(self, timeline: _Timeline, marks: list[tuple[str, Any]], end: Any, host_seconds: float):
        self._timeline = timeline
        self._marks = marks
        self._end = end
        self._nanoseconds: dict[str, int] | None = None
        self.host_seconds = host_seconds
        """Seconds between the two ends of step on the host, whatever the device does: the independent check of `wall`."""

    @property
    def ready(self) -> bool:
        """Whether looking at the numbers will not wait."""
        return self._nanoseconds is not None or self._timeline.ready(self._end)

    def _resolve(self) -> dict[str, int]:
        if self._nanoseconds is None:
            self._timeline.wait(self._end)
            total = dict.fromkeys((*PARTS, IDLE), 0)
            stops = [mark for _, mark in self._marks[1:]] + [self._end]
            for (part, start), stop in zip(self._marks, stops, strict=True):
                total[part] += self._timeline.between(start, stop)
            assert min(total.values()) >= 0, total
            self._nanoseconds = total
            self._marks = []
        return self._nanoseconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of compute, communication (exposed), data, checkpoint, evaluate, idle."""
        return {part: nanoseconds / 1e9 for part, nanoseconds in self._resolve().items()}

    @property
    def wall(self) -> float:
        """Seconds from the end of the step before to the end of this one; the sum of the parts."""
        return sum(self._resolve().values()) / 1e9

    @property
    def training(self) -> float:
        """Seconds of the step without evaluation: the denominator of tokens/s, samples/s and MFU."""
        total = self._resolve()
        return (sum(total.values()) - total["evaluate"]) / 1e9

    def as_dict(self) -> dict[str, float]:
        """The parts and `wall`, as they stand in metrics.jsonl."""
        return {**self.parts, "wall": self.wall}

    def __repr__(self) -> str:
        if not self.ready:
            return "Split(not finished on the device)"
        return "Split(" + ", ".join(f"{name}={seconds:.4f}" for name, seconds in self.as_dict().items()) + ")"


class StepClock:
    """Splits the time of each step. One clock a rank; spans are opened by the thread that runs the step (autograd's own
    thread included, while that thread waits in backward), never by a loader's background thread.

    Do not open spans while a graph of the device is being captured: the events would become part of the graph.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        device = torch.device(device)
        self._timeline: _Timeline = _HostTimeline() if device.type == "cpu" else _StreamTimeline(device)
        self._open: list[str] = []
        self.restart()

    def restart(self) -> None:
        """Begin a step now: what passed since the last `finish_step` belongs to no step (set-up before the loop)."""
        if self._open:
            raise RuntimeError(f"the clock was restarted inside the span {self._open[-1]!r}")
        self._host_start = time.perf_counter_ns()
        self._marks: list[tuple[str, Any]] = [(IDLE, self._timeline.mark())]

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Time inside belongs to `part`, except what a span opened further inside takes."""
        if part not in PARTS:
            raise ValueError(f"{part!r} is none of {', '.join(PARTS)}")
        self._open.append(part)
        self._marks.append((part, self._timeline.mark()))
        try:
            yield
        finally:
            self._open.pop()
            self._marks.append((self._open[-1] if self._open else IDLE, self._timeline.mark()))

    def waiting(self) -> AbstractContextManager[None]:
        """A span of exposed communication: put it around the wait for a collective, where the compute stream (on a CPU
        the host) stands still until the result is there."""
        return self.span("communication")

    def finish_step(self) -> Split:
        """End the step and begin the next. The result may be kept and looked at later."""
        if self._open:
            raise RuntimeError(f"the step was finished inside the span {self._open[-1]!r}")
        end, now = self._timeline.mark(), time.perf_counter_ns()
        split = Split(self._timeline, self._marks, end, (now - self._host_start) / 1e9)
        self._marks, self._host_start = [(IDLE, end)], now
        return split
