"""What the process takes from the machine: GPU utilisation and memory, CPU, resident memory; sampled on a thread.

    gpu_percent   NVML's utilisation: percent of the sampling period in which at least one kernel ran on the device
    gpu_used      bytes in use on the whole device (NVML): contexts, NCCL and other processes included
    cpu_percent   CPU time of this process over wall time since the sample before, in percent of one core
    rss           resident bytes of this process
    allocated     bytes in live tensors on the device; reserved: bytes that the caching allocator holds

Means are over the samples, which lie evenly in time. Peaks of allocated and reserved are the allocator's own high-water
marks, so nothing between two samples is missed; peaks of rss and gpu_used are over the samples.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from meshwright.distributed import device as devices

__all__ = ["Sampler", "Usage", "memory_now"]


@dataclass(frozen=True)
class Usage:
    """Means and peaks over a run; bytes and percent; None where the machine does not tell."""

    samples: int = 0
    gpu_percent: float | None = None
    gpu_used_peak: int | None = None
    cpu_percent: float | None = None
    rss_mean: int | None = None
    rss_peak: int | None = None
    allocated_mean: int | None = None
    allocated_peak: int | None = None
    reserved_mean: int | None = None
    reserved_peak: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def memory_now(device: torch.device | str) -> dict[str, int]:
    """Bytes: rss, and on an accelerator allocated, reserved, allocated_peak, reserved_peak (on a CPU tensors are in rss)."""
    try:
        found = {"rss": psutil.Process().memory_info().rss}
    except psutil.Error:  # a machine that hides /proc: the other figures still count
        found = {}
    return found | _allocator(torch.device(device))


def _allocator(device: torch.device) -> dict[str, int]:
    return {} if device.type == "cpu" else asdict(devices.memory(device))


class _Nvml:
    """One NVIDIA device's own counters. `open` returns None where there is no driver or no such device."""

    def __init__(self, library: Any, handle: Any):
        self._library = library
        self._handle = handle

    @classmethod
    def open(cls, device: torch.device) -> _Nvml | None:
        if device.type != "cuda":
            return None
        import pynvml

        uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError:
            return None

    def read(self) -> dict[str, float]:
        """gpu_percent and gpu_used, without those that the device does not tell (a part of a card has no utilisation)."""
        found: dict[str, float] = {}
        for name, ask in (
            ("gpu_percent", lambda: self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu),
            ("gpu_used", lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle).used),
        ):
            try:
                found[name] = ask()
            except self._library.NVMLError:
                continue
        return found

    def close(self) -> None:
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


class Sampler:
    """Samples every `interval` seconds between `start` and `stop` (or inside `with`); `stop` returns at once."""

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.5):
        self._device = torch.device(device)
        self._interval = interval
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._peaks: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._samples = 0
        self._thread: threading.Thread | None = None
        self._process = psutil.Process()
        self._nvml: _Nvml | None = None

    def start(self) -> Sampler:
        self._nvml = _Nvml.open(self._device)
        self._process.cpu_percent(interval=None)  # the first call only sets the origin
        self._thread = threading.Thread(target=self._run, name="meshwright-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> Usage:
        """Take a last sample, end the thread, and return the usage. A second call changes nothing."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._sample()
            if self._nvml is not None:
                self._nvml.close()
                self._nvml = None
        return self.usage()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def latest(self) -> dict[str, float]:
        """The newest sample, empty before the first."""
        with self._lock:
            return dict(self._latest)

    def usage(self) -> Usage:
        memory = _allocator(self._device)
        with self._lock:
            mean = {name: total / self._counts[name] for name, total in self._sums.items()}
            peak, samples = dict(self._peaks), self._samples

        def whole(value: float | None) -> int | None:
            return None if value is None else round(value)

        return Usage(
            samples=samples,
            gpu_percent=mean.get("gpu_percent"),
            gpu_used_peak=whole(peak.get("gpu_used")),
            cpu_percent=mean.get("cpu_percent"),
            rss_mean=whole(mean.get("rss")),
            rss_peak=whole(peak.get("rss")),
            allocated_mean=whole(mean.get("allocated")),
            allocated_peak=memory.get("allocated_peak"),
            reserved_mean=whole(mean.get("reserved")),
            reserved_peak=memory.get("reserved_peak"),
        )

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        values: dict[str, float] = dict(memory_now(self._device))
        with contextlib.suppress(psutil.Error):
            values["cpu_percent"] = self._process.cpu_percent(interval=None)
        if self._nvml is not None:
            values |= self._nvml.read()
        with self._lock:
            self._samples += 1
            self._latest = values
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1
                self._peaks[name] = max(self._peaks.get(name, value), value)
