"""The one file that knows devices apart. Everything else asks here and runs unchanged on a CPU.

Functions take a device type ("cpu", "cuda", ...) or a torch.device; what has no meaning on a CPU does nothing there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.errors import DeviceError, Finding

__all__ = [
    "Memory",
    "Recorder",
    "backend",
    "capability",
    "cores",
    "count",
    "current",
    "default_ranks",
    "event",
    "fetch",
    "fp8_findings",
    "kept_random",
    "mark",
    "memory",
    "memory_total",
    "name",
    "pick",
    "pinned",
    "rank_device",
    "records",
    "reset_memory_peaks",
    "set_current",
    "stream",
    "synchronize",
    "use_stream",
    "visible",
    "wait_stream",
]

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable by which each device type's runtime narrows what a process sees."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: now and at the highest since `reset_memory_peaks`. All zero on a CPU."""

    allocated: int = 0
    reserved: int = 0
    allocated_peak: int = 0
    reserved_peak: int = 0


def pick(wanted: str | None = None) -> str:
    """The device type to run on: the accelerator torch finds, else "cpu". A wanted type that is not here is a DeviceError."""
    found = torch.accelerator.current_accelerator(check_available=True)
    here = found.type if found is not None else "cpu"
    if wanted in (None, "auto", here):
        return here
    if wanted == "cpu":
        return "cpu"
    fix = "Use device cpu, or run `meshwright doctor` to see why the device is not found"
    raise DeviceError(
        findings=[Finding("device", f"there is no {wanted} device here; torch {torch.__version__} finds {here}", fix)]
    )


def backend(device_type: str) -> str:
    """The process-group backend that torch names for this device type."""
    return "gloo" if device_type in ("cpu", "mps") else dist.get_default_backend_for_device(device_type)


def count(device_type: str) -> int:
    """Devices of the type in this process's sight; a CPU is one device."""
    return 1 if device_type == "cpu" else torch.accelerator.device_count()


def cores() -> int:
    """CPU cores this process may use: its affinity, and a container's quota where there is one."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no quota
        return allowed


def default_ranks(device_type: str) -> int:
    """Ranks for this machine when none are asked for: one a device; two on a CPU with more than one core."""
    return count(device_type) if device_type != "cpu" else min(2, cores())


def rank_device(device_type: str, local_rank: int) -> torch.device:
    """The device of a rank on this machine. DeviceError if there are fewer devices than local ranks."""
    if device_type == "cpu":
        return torch.device("cpu")
    have = count(device_type)
    if local_rank >= have:
        fix = f"Start at most {have} ranks here with --nproc, or name the devices with --devices"
        raise DeviceError(
            findings=[Finding("device", f"local rank {local_rank} has no device: {have} {device_type} found", fix)]
        )
    return torch.device(device_type, local_rank)


def set_current(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current(device_type: str) -> torch.device:
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, torch.accelerator.current_device_index())


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def stream(device: torch.device) -> torch.Stream | None:
    """A new stream; None on a CPU, which every function here accepts."""
    return None if device.type == "cpu" else torch.Stream(device)


def use_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Queue the work of a `with` block on this stream."""
    return nullcontext() if stream is None else stream


def wait_stream(waiting: torch.Stream | None, other: torch.Stream | None) -> None:
    """Work queued on `waiting` from now on starts after all that is queued on `other`; None is the device's current stream."""
    known = waiting if waiting is not None else other
    if known is None:
        return
    first = waiting if waiting is not None else torch.accelerator.current_stream(known.device)
    first.wait_stream(other if other is not None else torch.accelerator.current_stream(known.device))


def event(device: torch.device, timing: bool = False) -> torch.Event | None:
    return None if device.type == "cpu" else torch.Event(device, enable_timing=timing)


def mark(device: torch.device, stream: torch.Stream | None = None) -> torch.Event | None:
    """Passed when all is done that was queued on the stream (default: the current one) so far; None on a CPU, where
    everything is done at once."""
    made = event(device)
    if made is not None:
        made.record(torch.accelerator.current_stream(device) if stream is None else stream)
    return made


def fetch(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Starts a copy of the values to the host. What is returned waits for it, and not for what was queued meanwhile: a
    plain `tolist` copies when it is called, behind everything that the device has been given since."""
    if values.device.type == "cpu":
        listed = values.tolist()
        return lambda: listed
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = mark(values.device)

    def wait() -> list[Any]:
        assert arrived is not None  # not on a CPU
        arrived.synchronize()
        return host.tolist()

    return wait


def kept_random(device: torch.device) -> AbstractContextManager[object]:
    """What is drawn inside a `with` block, from the host's and from the device's generator, is drawn again behind it."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=())
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.random.fork_rng(devices=(index,), device_type=device.type)


def pinned(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the host, where the device can copy from it without the host waiting; the memory is not used again before."""
    host = torch.from_numpy(numbers)
    if device.type == "cpu":
        return host
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)


def records(device: torch.device | str) -> bool:
    """Whether the device can replay launches that it recorded, as a `Recorder` does."""
    return torch.device(device).type == "cuda"


class Recorder:
    """Records what a call launches, for a device that `records`. What the calls allocate on their way is in memory that all
    recordings share: none may be replayed beside another, and those that leave something to others run in the order of their
    recording. Memory of what outlives a call is allocated before, or stays as long as a tensor over it is kept."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """Kept: torch 2.11 forgets the shared memory with the last recording that used it, and the next one then fails."""

    def record(self, call: Callable[[], object]) -> Callable[[], None]:
        """The launches of `call`, which is not computed by this. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            call()
        self._first = self._first or graph
        return graph.replay


def memory(device: torch.device) -> Memory:
    """Bytes held by torch's allocator on the device."""
    if device.type == "cpu":
        return Memory()
    return Memory(
        torch.accelerator.memory_allocated(device),
        torch.accelerator.memory_reserved(device),
        torch.accelerator.max_memory_allocated(device),
        torch.accelerator.max_memory_reserved(device),
    )


def reset_memory_peaks(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def memory_total(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes: of the device, or of the machine's RAM on a CPU."""
    if device.type == "cpu":
        import psutil

        found = psutil.virtual_memory()
        return found.available, found.total
    return torch.get_device_module(device).mem_get_info(device)


def name(device: torch.device) -> str:
    """What the maker calls it."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def capability(device: torch.device) -> str:
    """The generation of an accelerator, such as "9.0"; "" where there is no such number."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def fp8_findings(device: torch.device) -> list[Finding]:
    """Why a device cannot train with `precision: fp8`; empty where it can. Products of e4m3 numbers have GPUs of NVIDIA from
    compute capability 8.9 (Ada, Hopper) on, and a CPU emulates them."""
    if device.type == "cpu":
        return []
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        return []
    what = f"fp8, but {name(device)} does not multiply in 8 bits as PyTorch offers it"
    return [Finding("precision", what, "Use bf16 or fp16, or an NVIDIA GPU of compute capability 8.9 or more")]


def visible(devices: str, device_type: str, have: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which a process sees only `devices` ("0,2"), numbers among the `have` it sees now.

    Raises DeviceError with every wrong number at once.
    """
    where = f"--devices {devices}"
    if device_type not in _VISIBLE:
        fix = "Leave it out" if device_type == "cpu" else f"Only {', '.join(_VISIBLE)} devices can be chosen by number"
        raise DeviceError(findings=[Finding(where, f"the devices here are of type {device_type}, which have no numbers", fix)])
    parts = [part.strip() for part in devices.split(",")]
    findings = []
    for part in parts:
        if not part.isdigit():
            findings.append(Finding(where, f"{part!r} is not a device number", "Write for example --devices 0,2"))
        elif int(part) >= have:
            findings.append(Finding(where, f"there is no device {part}", f"Found: 0 to {have - 1}" if have else "None found"))
        elif parts.count(part) > 1 and not any(f"device {part} is named" in f.what for f in findings):
            findings.append(Finding(where, f"device {part} is named {parts.count(part)} times"))
    if findings:
        raise DeviceError(findings=findings)
    variable = _VISIBLE[device_type]
    before = [part for part in env.get(variable, "").split(",") if part]
    chosen = [before[int(part)] if int(part) < len(before) else part for part in parts]
    return {variable: ",".join(chosen)}
