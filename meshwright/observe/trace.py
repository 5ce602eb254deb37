"""`--profile 10:12`: a trace of some steps, the operators that took most, and what memory was held for.

Files of each rank: trace-rank0.json.gz (open in ui.perfetto.dev or chrome://tracing), operators-rank0.txt, and on an
accelerator memory-rank0.json.gz: the segments and blocks of the caching allocator when the last profiled step ended.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.distributed import device as devices
from meshwright.errors import ConfigError, Finding

__all__ = ["Profile"]

log = logging.getLogger("meshwright")


def _parse(spec: str) -> tuple[int, int]:
    first, colon, last = spec.partition(":")
    if colon and first.isascii() and last.isascii() and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise ConfigError(
        findings=[
            Finding(
                "--profile",
                f"{spec!r} is not FIRST:LAST with 1 <= FIRST <= LAST",
                "For the steps 10, 11 and 12 say --profile 10:12",
            )
        ]
    )


class Profile:
    """Profiles the steps `first` to `last`, both included, counted from 1; `spec` None profiles nothing.

    Raises ConfigError for a `spec` that is no such range, also when it begins after `total` steps.
    """

    def __init__(
        self,
        spec: str | None,
        folder: str | Path = "profile",
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        total: int | None = None,
    ):
        self._first, self._last = _parse(spec) if spec is not None else (0, 0)
        if total is not None and self._first > total:
            raise ConfigError(findings=[Finding("--profile", f"begins at step {self._first}, but the run has {total} steps")])
        self._folder = Path(folder)
        self._rank = rank
        self._device = torch.device(device)
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`. Starts and ends the trace at the range's borders; a run resumed inside starts there."""
        if self._profiler is None and self._first <= number <= self._last:
            self._start()
        if self._profiler is None:
            yield
            return
        try:
            with torch.profiler.record_function(f"step {number}"):
                yield
        except BaseException:
            self._profiler.stop()
            self._profiler = None
            raise
        if number >= self._last:
            self.close()

    def close(self) -> None:
        """Write what was traced, if a trace is open: also call it when the run ends before the range does."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        devices.synchronize(self._device)  # else the last step's kernels are missing
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._path("trace", "json.gz")
        profiler.export_chrome_trace(str(trace))
        order = "self_cpu_time_total" if self._device.type == "cpu" else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=30)
        self._path("operators", "txt").write_text(table + "\n", encoding="utf-8")
        log.info("profile of steps %d to %d: %s", self._first, self._last, trace)
        self._write_memory()

    def _start(self) -> None:
        self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True)
        self._profiler.start()

    def _write_memory(self) -> None:
        snapshot = getattr(torch.get_device_module(self._device), "memory_snapshot", None)
        if snapshot is None:
            log.info("no memory snapshot: the allocator of %s does not give one", self._device.type)
            return
        path = self._path("memory", "json.gz")
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump(snapshot(), file, default=str)
        log.info("memory snapshot (%d bytes): %s", os.path.getsize(path), path)

    def _path(self, kind: str, ending: str) -> Path:
        return self._folder / f"{kind}-rank{self._rank}.{ending}"
