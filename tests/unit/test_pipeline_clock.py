"""The seconds of a pipeline's stages: which steps count, and when events of a device are read."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel import pipeline_runner
from meshwright.parallel.pipeline_runner import StageClock
from meshwright.spec.pipeline import BACKWARD, FORWARD


class Host:
    """A clock that only moves when it is told to, and how far a device has come in its events."""

    def __init__(self) -> None:
        self.now = 100.0
        self.recorded = 0
        self.reached = 0

    def perf_counter(self) -> float:
        return self.now


class Event:
    def __init__(self, host: Host):
        self.host = host

    def record(self) -> None:
        self.host.recorded += 1
        self.number, self.at = self.host.recorded, self.host.now

    def query(self) -> bool:
        return self.number <= self.host.reached

    def elapsed_time(self, stop: Event) -> float:
        assert stop.query(), "read before the device was there"
        return 1e3 * (stop.at - self.at)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    replaced = Host()
    monkeypatch.setattr(pipeline_runner, "time", replaced)
    return replaced


@pytest.fixture
def device(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    def catch_up(_: torch.device) -> None:
        host.reached = host.recorded

    monkeypatch.setattr(pipeline_runner.devices, "event", lambda device, timing: Event(host))
    monkeypatch.setattr(pipeline_runner.devices, "synchronize", catch_up)
    return host


def step(clock: StageClock, host: Host, forward: float, backward: float, micros: int = 3) -> None:
    clock.next_step()
    for kind, seconds in ((FORWARD, forward), (BACKWARD, backward)) * micros:
        with clock.span(0, kind):
            host.now += seconds


# red where `span` passes False for the first step
def test_the_first_step_counts_only_while_it_is_the_only_one(host):
    clock = StageClock(torch.device("cpu"))
    assert clock.of(0) == 0.0
    step(clock, host, 50.0, 7.0)
    assert clock.of(0) == clock.of(0) == pytest.approx(57.0) and clock.of(1) == 0.0
    step(clock, host, 1.0, 2.0)
    assert clock.of(0) == pytest.approx(3.0)
    step(clock, host, 2.0, 4.0)
    assert clock.of(0) == pytest.approx(4.5)


# red where `next_step` drops what is not over
def test_events_are_kept_until_the_device_has_reached_them(device):
    clock = StageClock(torch.device("cpu"))
    step(clock, device, 50.0, 7.0)
    step(clock, device, 1.0, 2.0)
    step(clock, device, 2.0, 4.0)
    assert clock.of(0) == pytest.approx(4.5)
    step(clock, device, 3.0, 6.0)
    assert clock.of(0) == pytest.approx(6.0), "each once"


def test_a_device_that_is_far_behind_costs_a_bounded_number_of_events(device, monkeypatch):
    monkeypatch.setattr(pipeline_runner, "OPEN_EVENTS", 12)
    clock = StageClock(torch.device("cpu"))
    for seconds in (50.0, 1.0, 2.0, 4.0):
        step(clock, device, seconds, seconds)
    assert len(clock._open) == 12
    assert clock.of(0) == pytest.approx(2 * (2.0 + 4.0) / 2)
