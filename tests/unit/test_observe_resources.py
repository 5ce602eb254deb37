"""The sampler: right numbers, no driver needed, stops at once."""

from __future__ import annotations

import sys
import threading
import time
import types

import psutil
import pytest
import torch

from meshwright.distributed import device as devices
from meshwright.observe import resources
from meshwright.observe.resources import Sampler, memory_now

pytestmark = pytest.mark.alone


def test_a_cpu_run_has_cpu_and_resident_memory() -> None:
    with Sampler("cpu", interval=0.02) as sampler:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            pass
        assert {"cpu_percent", "rss"} <= sampler.latest().keys()
    usage = sampler.stop()
    rss = psutil.Process().memory_info().rss
    assert usage.samples >= 3
    assert usage.rss_mean is not None and usage.rss_peak is not None
    assert 0.5 * rss < usage.rss_mean <= usage.rss_peak < 2 * rss
    assert usage.cpu_percent is not None and 10 < usage.cpu_percent < 100 * (psutil.cpu_count() or 1) + 50
    assert usage.gpu_percent is usage.gpu_used_peak is usage.allocated_mean is usage.reserved_peak is None


def test_it_stops_at_once_and_has_a_sample() -> None:
    sampler = Sampler("cpu", interval=60.0).start()
    begin = time.monotonic()
    usage = sampler.stop()
    assert time.monotonic() - begin < 1.0
    assert usage.samples == 1 and usage.rss_peak
    assert sampler.stop().samples == 1
    assert not any(thread.name == "meshwright-sampler" for thread in threading.enumerate())


class FakeNvml(types.ModuleType):
    """A driver with one device; with `broken`, none. Utilisation 40, 60, 80, ... percent; memory falls from 9 GB."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False, no_utilisation: bool = False):
        super().__init__("pynvml")
        self.broken, self.no_utilisation = broken, no_utilisation
        self.asked = 0
        self.open = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-12-34"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> types.SimpleNamespace:
        if self.no_utilisation:
            raise self.NVMLError("Not Supported")
        self.asked += 1
        return types.SimpleNamespace(gpu=20 + 20 * self.asked)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=10 * 10**9 - 10**9 * max(1, self.asked))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(get_device_properties=lambda device: types.SimpleNamespace(uuid="12-34"))
    held = iter([100, 300, 200, 200, 200])
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(devices, "memory", lambda device: devices.Memory(next(held), 400, 350, 450))


def sampled(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, samples: int = 3) -> resources.Usage:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = Sampler("cuda", interval=60.0).start()
    for _ in range(samples - 1):
        sampler._sample()
    return sampler.stop()


def test_means_and_peaks_by_hand(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    usage = sampled(nvml, monkeypatch)
    assert usage.gpu_percent == (40 + 60 + 80) / 3
    assert usage.gpu_used_peak == 9 * 10**9
    assert (usage.allocated_mean, usage.reserved_mean) == (200, 400)
    assert (usage.allocated_peak, usage.reserved_peak) == (350, 450)  # the allocator's own, which no sample saw
    assert nvml.open == 0


def test_no_driver_is_no_error(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = sampled(FakeNvml(broken=True), monkeypatch)
    assert usage.gpu_percent is None and usage.gpu_used_peak is None and usage.allocated_mean == 200


def test_a_device_that_hides_its_utilisation_still_tells_memory(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = sampled(FakeNvml(no_utilisation=True), monkeypatch)
    assert usage.gpu_percent is None and usage.gpu_used_peak == 9 * 10**9


def test_memory_of_a_step() -> None:
    assert list(memory_now("cpu")) == ["rss"]
    assert memory_now("cpu")["rss"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_a_real_device() -> None:
    device = torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    with Sampler(device, interval=0.1) as sampler:
        held = torch.zeros(64, 2**20, device=device)
        for _ in range(200):
            held = held * 1.01
        torch.accelerator.synchronize(device)
        time.sleep(0.3)
    usage = sampler.stop()
    assert usage.allocated_peak is not None and usage.allocated_peak >= held.numel() * 4
    assert usage.reserved_peak is not None and usage.reserved_peak >= usage.allocated_peak
    assert usage.gpu_percent is None or 0 <= usage.gpu_percent <= 100
