"""The device file on a CPU: everything answers, nothing needs an accelerator; and the choice of devices by number."""

from __future__ import annotations

import pytest
import torch

from meshwright.distributed import device
from meshwright.errors import DeviceError

CPU = torch.device("cpu")


def test_a_cpu_can_always_be_had_and_what_is_missing_is_named():
    assert device.pick("cpu") == "cpu" and device.backend("cpu") == "gloo" and device.count("cpu") == 1
    with pytest.raises(DeviceError, match="there is no xyz device here"):
        device.pick("xyz")


def test_streams_events_and_memory_do_nothing_on_a_cpu():
    assert device.stream(CPU) is None and device.event(CPU) is None
    with device.use_stream(device.stream(CPU)):
        device.wait_stream(None, None)
    device.synchronize(CPU)
    device.set_current(CPU)
    device.reset_memory_peaks(CPU)
    assert device.memory(CPU) == device.Memory(0, 0, 0, 0)
    assert device.rank_device("cpu", 7) == CPU and device.current("cpu") == CPU


def test_the_machine_is_described():
    free, total = device.memory_total(CPU)
    assert 0 < free <= total
    assert device.name(CPU) and device.cores() >= 1 and device.default_ranks("cpu") in (1, 2)


def test_devices_are_chosen_by_number_among_those_in_sight():
    assert device.visible("0,2", "cuda", 4, {}) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    # numbers count what this process sees already, as a batch system may have narrowed it
    assert device.visible("1, 0", "cuda", 2, {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}) == {"CUDA_VISIBLE_DEVICES": "GPU-7,4"}


def test_wrong_numbers_are_all_named():
    with pytest.raises(DeviceError) as caught:
        device.visible("0,x,9,0", "cuda", 2, {})
    assert [finding.what for finding in caught.value.findings] == [
        "device 0 is named 2 times",
        "'x' is not a device number",
        "there is no device 9",
    ]
    with pytest.raises(DeviceError, match="have no numbers"):
        device.visible("0", "cpu", 1, {})


def test_fetched_values_are_those_of_the_call():
    assert device.fetch(torch.tensor([1.5, float("inf")], dtype=torch.float64))() == [1.5, float("inf")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")
def test_fetched_values_do_not_wait_for_what_was_queued_after_them():
    # Red with: `tolist` of the values when they are asked for.
    here = device.rank_device(device.pick(), 0)
    matrix, values = torch.randn(8192, 8192, device=here), torch.arange(3.0, device=here)
    device.synchronize(here)
    wait = device.fetch(values)
    values.add_(1)
    for _ in range(30):
        matrix @ matrix
    after = device.event(here)
    after.record()
    assert wait() == [0.0, 1.0, 2.0]
    assert not after.query()
    device.synchronize(here)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")
def test_the_same_calls_on_an_accelerator():
    kind = device.pick()
    here = device.rank_device(kind, 0)
    device.set_current(here)
    assert device.current(kind) == here and device.count(kind) >= 1 and device.name(here)
    device.reset_memory_peaks(here)
    before = device.memory(here)
    side = device.stream(here)
    with device.use_stream(side):
        tensor = torch.ones(1 << 20, device=here)
    device.wait_stream(None, side)
    device.synchronize(here)
    after = device.memory(here)
    assert after.allocated - before.allocated == 4 << 20 and after.allocated_peak >= after.allocated and tensor.sum() == 1 << 20
    free, total = device.memory_total(here)
    assert 0 < free <= total
    with pytest.raises(DeviceError, match="has no device"):
        device.rank_device(kind, device.count(kind))
