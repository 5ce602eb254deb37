"""Learning rate, batch ramp and length of a run: pure functions, checked by hand-computed values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import BatchRamp, ScheduleConfig, TrainConfig
from meshwright.errors import ConfigError
from meshwright.train.schedule import batch_at, learning_rate, learning_rate_factor, peak_learning_rate, total_steps


def factors(total, **kwargs):
    schedule = ScheduleConfig(**kwargs)
    return [learning_rate_factor(schedule, k, total) for k in range(total)]


def test_warmup_then_cosine_by_hand():
    f = factors(20, kind="cosine", warmup=5, min_ratio=0.1)
    assert f[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert f[5] == 1.0
    assert f[10] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert learning_rate_factor(ScheduleConfig(warmup=5, min_ratio=0.1), 20, 20) == pytest.approx(0.1)
    assert learning_rate_factor(ScheduleConfig(warmup=5, min_ratio=0.1), 99, 20) == pytest.approx(0.1)


def test_linear_wsd_constant_and_inverse_sqrt_by_hand():
    assert factors(10, kind="linear", min_ratio=0.0)[5] == pytest.approx(0.5)
    wsd = factors(10, kind="wsd", decay=0.5, min_ratio=0.2)
    assert wsd[:6] == [1.0] * 6 and wsd[7] == pytest.approx(1 - 0.8 * 2 / 5)
    assert factors(4, kind="constant", warmup=2) == [0.5, 1.0, 1.0, 1.0]
    root = factors(100, kind="inverse_sqrt", warmup=4, min_ratio=0.0)
    assert root[3] == 1.0 and root[15] == pytest.approx(0.5) and root[63] == pytest.approx(0.25)


def test_learning_rate_follows_the_batch_by_the_named_rule():
    assert peak_learning_rate(TrainConfig(lr=1e-3, batch=64)) == 1e-3
    assert peak_learning_rate(TrainConfig(lr=1e-3, batch=64, lr_batch=16, lr_scaling="linear")) == pytest.approx(4e-3)
    assert peak_learning_rate(TrainConfig(lr=1e-3, batch=64, lr_batch=16, lr_scaling="sqrt")) == pytest.approx(2e-3)
    # a stored total wins over the steps of the run
    train = TrainConfig(lr=1.0, schedule=ScheduleConfig(kind="linear", total=100, min_ratio=0.0))
    assert learning_rate(train, 50, total=60) == pytest.approx(0.5)


def test_batch_ramp_by_hand():
    train = TrainConfig(batch=32, ramp=BatchRamp(start=8, increment=8, samples=300))
    assert [batch_at(train, c) for c in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [8, 8, 16, 16, 24, 24, 32, 32]


def walk(train, rows_per_epoch, rows):
    """Steps by taking them one by one, as the loader does."""
    consumed = steps = 0
    while consumed < rows:
        left = rows_per_epoch - consumed % rows_per_epoch
        take = batch_at(train, consumed)
        if left < take and train.tail == "drop":
            consumed += left
            continue
        consumed += min(take, left)
        steps += 1
    return max(1, steps)


@given(
    rows_per_epoch=st.integers(1, 60),
    batch=st.integers(1, 70),
    epochs=st.integers(1, 5),
    tail=st.sampled_from(["step", "drop"]),
    ramp=st.booleans(),
)
def test_planned_steps_equal_walked_steps(rows_per_epoch, batch, epochs, tail, ramp):
    if tail == "drop" and batch > rows_per_epoch:
        return  # refused when the data is opened: a step could never be filled
    train = TrainConfig(
        batch=batch, epochs=epochs, tail=tail, ramp=BatchRamp(start=1, increment=3, samples=41) if ramp else None
    )
    assert total_steps(train, rows_per_epoch, 8).steps == walk(train, rows_per_epoch, epochs * rows_per_epoch)


def test_budget_is_the_smallest_limit_and_hours_need_a_total():
    assert total_steps(TrainConfig(batch=2, steps=100, epochs=1), 10, 8).steps == 5
    assert total_steps(TrainConfig(batch=2, tokens=8 * 6), 10, 8).steps == 3
    assert total_steps(TrainConfig(batch=4), 10, 8).steps == 3  # one epoch, ragged end included
    assert total_steps(TrainConfig(batch=4, tail="drop"), 10, 8).steps == 2
    with pytest.raises(ConfigError, match="must know its length"):
        total_steps(TrainConfig(hours=1.0), 10, 8)
    budget = total_steps(TrainConfig(hours=1.0, schedule=ScheduleConfig(kind="constant")), 10, 8)
    assert budget.steps is None and budget.hours == 1.0 and budget.spent(10**9) is None
