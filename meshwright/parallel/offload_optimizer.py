"""Optimizer state in host memory: gradients come over, the update runs there, new working weights go back.

Both go window by window through pinned buffers, two of each, so that the next gradients travel while the present ones are
used. A parameter crosses the link with g bytes down and w bytes up a step (none up where working weights live in host memory
too); masters, moments and averages never do. An update is a function of each element alone, hence the same bits as on one
device of the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.distributed import device as devices
from meshwright.parallel.buffers import Range, host_zeros

__all__ = ["WINDOW", "HostStage"]

WINDOW = 1 << 22
"""Most elements in flight at a time: two buffers of 16 MiB of fp32 gradients."""


class HostStage:
    """The buffers, made when they are first needed. device: where gradients and working weights are. largest: elements of
    the largest range."""

    def __init__(self, device: torch.device, largest: int):
        self.device = device
        self.size = min(WINDOW, largest)
        self._buffers: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}
        self._sent: list[torch.Event | None] = [None, None]

    def windows(self, part: Range) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """(elements, their gradient, where to put their working weights or None) in host memory. What was put there is on its
        way when the next one is asked for, and there for whatever the device does next."""
        end = part.master.numel()
        spans = [slice(start, min(start + self.size, end)) for start in range(0, end, self.size)] if end else []
        lent = part.mixed and part.working.device == self.device and part.offload == "optimizer"
        coming = self._fetch(part, spans[0], 0) if spans else None
        for number, span in enumerate(spans):
            assert coming is not None
            gradient, arrived = coming
            if number + 1 < len(spans):
                coming = self._fetch(part, spans[number + 1], (number + 1) % 2)
            if arrived is not None:
                arrived.synchronize()
            if not lent:
                yield span, gradient, part.working[span] if part.mixed else None
                continue
            self._await_sent(number % 2)
            working = self._buffer("working", part.working.dtype, number % 2)[: span.stop - span.start]
            yield span, gradient, working
            part.working[span].copy_(working, non_blocking=True)
            self._sent[number % 2] = devices.mark(self.device)  # waited for before the buffer is used again

    def _fetch(self, part: Range, span: slice, turn: int) -> tuple[torch.Tensor, torch.Event | None]:
        source = part.gradient[span]
        target = self._buffer("gradient", source.dtype, turn)[: source.numel()]
        target.copy_(source, non_blocking=True)
        return target, devices.mark(self.device)

    def _await_sent(self, turn: int) -> None:
        event, self._sent[turn] = self._sent[turn], None
        if event is not None:
            event.synchronize()

    def _buffer(self, kind: str, dtype: torch.dtype, turn: int) -> torch.Tensor:
        key = (kind, dtype, turn)
        if key not in self._buffers:
            self._buffers[key] = host_zeros(self.size, dtype, self.device)
        return self._buffers[key]
