"""How a time is taken, the same way for ceilings and peers: events on the compute stream, the host's clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.distributed import device as devices

__all__ = ["Laps", "figures", "median_seconds"]

GIB = 2**30


class Laps:
    """Times between moments of a loop, without making the host wait for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The end of a step: when the device gets here, not when the host does."""
        event = devices.event(self._device, timing=True)
        if event is not None:
            event.record(torch.accelerator.current_stream(self._device))
        self._marks.append(time.perf_counter() if event is None else event)

    def seconds(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the device."""
        devices.synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cpu":
            return [stop - start for start, stop in pairs]
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def median_seconds(call: Callable[[], object], device: torch.device, *, warm: int = 3, repeat: int = 9) -> float:
    """Median over `repeat` calls, each timed by itself after `warm` untimed ones."""
    for _ in range(warm):
        call()
    taken = []
    for _ in range(repeat):
        laps = Laps(device)
        laps.mark()
        call()
        laps.mark()
        taken += laps.seconds()
    return statistics.median(taken)


def figures(
    engine: str,
    seconds: list[float],
    *,
    rows: int,
    seq_len: int,
    losses: tuple[float, float],
    peak_gib: float,
    reserved_gib: float,
) -> dict[str, Any]:
    """What every engine reports.

    seconds: of the steps after warm-up. rows: of a step, on all devices together. losses: first and last step, nats a target.
    spread: (slowest - fastest step) / median. tokens_per_s, samples_per_s: all devices together.
    """
    median = statistics.median(seconds)
    return {
        "engine": engine,
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": rows * seq_len / median,
        "samples_per_s": rows / median,
        "peak_gib": peak_gib,
        "reserved_gib": reserved_gib,
        "first_loss": losses[0],
        "loss": losses[1],
    }
