"""The time split: a partition of the wall time, each second in the innermost span, planted delays in their own column."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe import clock as clock_module
from meshwright.observe.clock import IDLE, PARTS, Split, StepClock

pytestmark = pytest.mark.alone

SPAN: st.SearchStrategy = st.deferred(
    lambda: st.tuples(st.sampled_from(PARTS), st.lists(st.one_of(st.integers(1, 10**9), SPAN), max_size=4))
)
"""A span: its part and what happens inside, in order: a delay of so many nanoseconds, or a span further inside."""


class FakeTime:
    def __init__(self) -> None:
        self.now = 12_345

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    replaced = FakeTime()
    monkeypatch.setattr(clock_module, "time", replaced)
    return replaced


def play(clock: StepClock, fake: FakeTime, events: list, part: str, truth: dict[str, int]) -> None:
    for event in events:
        if isinstance(event, int):
            fake.now += event
            truth[part] += event
        else:
            with clock.span(event[0]):
                play(clock, fake, event[1], event[0], truth)


@given(st.lists(st.lists(st.one_of(st.integers(1, 10**9), SPAN), max_size=5), min_size=1, max_size=3))
def test_every_nanosecond_belongs_to_the_innermost_span(steps: list) -> None:
    # mutations tried, each red: _leave returns to IDLE instead of the outer span; the step's first mark named "compute"
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeTime()
        patch.setattr(clock_module, "time", fake)
        clock = StepClock()
        for events in steps:
            truth = dict.fromkeys((*PARTS, IDLE), 0)
            play(clock, fake, events, IDLE, truth)
            split = clock.finish_step()
            assert split.parts == {part: nanoseconds / 1e9 for part, nanoseconds in truth.items()}
            assert split.wall == sum(truth.values()) / 1e9 == split.host_seconds
            assert split.training == (sum(truth.values()) - truth["evaluate"]) / 1e9
            assert split.as_dict() == {**split.parts, "wall": split.wall}


def test_time_before_a_restart_belongs_to_no_step(fake: FakeTime) -> None:
    clock = StepClock()
    fake.now += 5_000_000_000
    clock.restart()
    fake.now += 2_000_000_000
    split = clock.finish_step()
    assert split.wall == split.parts[IDLE] == split.host_seconds == 2.0


def test_a_span_ends_when_its_body_raises(fake: FakeTime) -> None:
    clock = StepClock()
    with pytest.raises(KeyError), clock.span("data"):
        fake.now += 1_000_000_000
        raise KeyError
    fake.now += 3_000_000_000
    parts = clock.finish_step().parts
    assert (parts["data"], parts[IDLE]) == (1.0, 3.0)


def test_wrong_use_is_refused() -> None:
    clock = StepClock()
    with pytest.raises(ValueError, match="'load' is none of compute, communication"), clock.span("load"):
        pass
    with clock.span("data"):
        with pytest.raises(RuntimeError, match="inside the span 'data'"):
            clock.finish_step()
        with pytest.raises(RuntimeError, match="inside the span 'data'"):
            clock.restart()


class FakeEvent:
    """A device event: it gets its time when the device comes to it, which is later than the host records it."""

    def __init__(self, device: FakeDevice):
        self.device = device
        self.at: int | None = None

    def record(self, stream: object) -> None:
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.device.run()

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None and other.at is not None
        return (other.at - self.at) / 1e6


class FakeDevice:
    """One in-order stream: kernels of a given length start when they are queued or when the one before ends."""

    def __init__(self, host: FakeTime):
        self.host = host
        self.queue: list = []
        self.free_at = host.now
        self.ran = 0

    def kernel(self, nanoseconds: int) -> None:
        self.queue.append((self.host.now, nanoseconds))

    def run(self) -> None:
        for item in self.queue:
            if isinstance(item, tuple):
                self.free_at = max(self.free_at, item[0]) + item[1]
            else:
                item.at = max(self.free_at, item.recorded)
        self.queue.clear()
        self.host.now = max(self.host.now, self.free_at)
        self.ran += 1


@pytest.fixture
def device(fake: FakeTime, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice(fake)

    def event(device: torch.device, timing: bool = False) -> FakeEvent:
        assert timing
        new = FakeEvent(made)
        new.recorded = fake.now  # type: ignore[attr-defined]
        return new

    monkeypatch.setattr(clock_module.devices, "event", event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: object())
    return made


MS = 1_000_000
NOTHING = dict.fromkeys((*PARTS, IDLE), 0.0)


def run_step(clock: StepClock, fake: FakeTime, device: FakeDevice, *, load: int, wait: int) -> Split:
    with clock.span("data"):
        fake.now += load * MS
    with clock.span("compute"):
        device.kernel(80 * MS)
        with clock.waiting():
            device.kernel(wait * MS)  # the compute stream stands still for so long
        device.kernel(10 * MS)
    return clock.finish_step()


def test_on_a_device_the_parts_are_what_its_stream_waited_for(fake: FakeTime, device: FakeDevice) -> None:
    clock = StepClock("cuda")
    late = run_step(clock, fake, device, load=50, wait=7)
    assert not late.ready and device.ran == 0  # nothing was synchronised
    hidden = run_step(clock, fake, device, load=50, wait=7)  # queued while the device still works on the step before
    busy = {"compute": 0.09, "communication": 0.007}
    assert late.parts == pytest.approx({**NOTHING, **busy, "data": 0.05})
    assert hidden.parts == pytest.approx({**NOTHING, **busy})
    assert late.wall + hidden.wall == pytest.approx((device.free_at - 12_345) / 1e9)
    assert device.ran == 2


def train(clock: StepClock, steps: int, planted: str | None) -> Iterator[Split]:
    """A pretended training step in real time, with 50 ms planted in one part."""
    extra = {part: 0.05 if part == planted else 0.0 for part in PARTS}
    clock.restart()
    for _ in range(steps):
        with clock.span("data"):
            time.sleep(0.005 + extra["data"])
        with clock.span("compute"):
            time.sleep(0.01)
            with clock.waiting():
                time.sleep(0.005 + extra["communication"])
        with clock.span("checkpoint"):
            time.sleep(0.002 + extra["checkpoint"])
        yield clock.finish_step()


@pytest.mark.parametrize("planted", ["data", "communication", "checkpoint"])
def test_a_planted_delay_moves_its_own_column_and_no_other(planted: str) -> None:
    # mutation tried: waiting() opening a "compute" span -> red for communication
    clock = StepClock()
    plain = list(train(clock, 7, None))
    delayed = list(train(clock, 7, planted))
    for part in (*PARTS, IDLE):
        moved = statistics.median(s.parts[part] for s in delayed) - statistics.median(s.parts[part] for s in plain)
        assert moved == pytest.approx(0.05 if part == planted else 0.0, abs=0.01), part
    for split in plain + delayed:
        assert sum(split.parts.values()) == pytest.approx(split.wall, rel=1e-9)
        assert split.wall == pytest.approx(split.host_seconds, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_a_real_device_exposed_time_is_found_without_synchronising() -> None:
    device = torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    a = torch.randn(4096, 4096, device=device)
    side = torch.Stream(device)
    clock = StepClock(device)

    def one(load: float, late: int) -> Split:
        with clock.span("data"):
            time.sleep(load)
        with clock.span("compute"):
            for _ in range(4):
                a @ a
            side.wait_stream(torch.accelerator.current_stream(device))
            with side:
                for _ in range(late):
                    a @ a
            with clock.waiting():
                torch.accelerator.current_stream(device).wait_stream(side)
        split = clock.finish_step()
        torch.accelerator.synchronize(device)
        return split

    for _ in range(3):
        one(0.0, 1)
    plain, loaded, waited = one(0.0, 0), one(0.05, 0), one(0.0, 40)
    assert loaded.parts["data"] - plain.parts["data"] == pytest.approx(0.05, abs=0.01)
    assert loaded.parts["compute"] == pytest.approx(plain.parts["compute"], abs=0.01)
    assert waited.parts["communication"] > 5 * plain.parts["compute"] > 5 * plain.parts["communication"]
    for split in (plain, loaded, waited):
        assert split.wall == pytest.approx(split.host_seconds, rel=0.02, abs=0.001)
