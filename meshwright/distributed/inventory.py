"""What this machine has, as plain data."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Device", "Machine", "driver_gpus", "take_inventory"]


@dataclass(frozen=True)
class Device:
    """One accelerator; memory in bytes."""

    index: int
    name: str
    memory_total: int
    memory_free: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """device_type: what training would run on. cores: those this process may use. Memory in bytes. driver: "" without one."""

    device_type: str
    backend: str
    devices: tuple[Device, ...]
    driver: str
    cpu: str
    cores: int
    memory_total: int
    memory_free: int
    host: str
    system: str
    python: str
    torch: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def take_inventory() -> Machine:
    import torch

    from meshwright.distributed import device

    kind = device.pick()
    found = []
    for index in range(device.count(kind) if kind != "cpu" else 0):
        each = torch.device(kind, index)
        free, total = device.memory_total(each)
        found.append(Device(index, device.name(each), total, free, device.capability(each)))
    free, total = device.memory_total(torch.device("cpu"))
    return Machine(
        device_type=kind,
        backend=device.backend(kind),
        devices=tuple(found),
        driver=driver_gpus()[0],
        cpu=device.name(torch.device("cpu")),
        cores=device.cores(),
        memory_total=total,
        memory_free=free,
        host=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
    )


def driver_gpus() -> tuple[str, int]:
    """(version of the NVIDIA driver, GPUs it knows), torch aside; ("", 0) where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", 0
    try:
        return str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return "", 0
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
