"""The gradient noise scale against gradients whose covariance is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.observe.noise import NoiseScale, batch_warning


def test_one_update_by_hand() -> None:
    # |g4|^2 = 5, |g16|^2 = 2: |G|^2 = (16*2 - 4*5) / 12 = 1; S = (5 - 2) / (1/4 - 1/16) = 16; B = 16 rows
    noise = NoiseScale()
    noise.update(5.0, 2.0, 4, 16)
    assert noise.squared_norm == pytest.approx(1.0)
    assert noise.trace == pytest.approx(16.0)
    assert noise.value == pytest.approx(16.0)


def test_averages_come_before_the_ratio() -> None:
    # decay 1/2; estimates (|G|^2, S): (1, 16), then (3, 0): averages (1/4*1 + 1/2*3) / (3/4) = 7/3 and (1/4*16) / (3/4) = 16/3
    noise = NoiseScale(decay=0.5)
    noise.update(5.0, 2.0, 4, 16)
    noise.update(3.0, 3.0, 4, 16)
    assert noise.squared_norm == pytest.approx(7 / 3)
    assert noise.trace == pytest.approx(16 / 3)
    assert noise.value == pytest.approx(16 / 7)


@pytest.mark.parametrize(("parts", "rows"), [(8, 4), (2, 32)])
def test_synthetic_gradients(parts: int, rows: int) -> None:
    """G of norm 2 in 200 dimensions, diagonal covariance of trace 500: B = 500 / 4 = 125 rows. Mean of 1,500 steps."""
    # mutations tried, each red: 1/b_small - 1/b_big replaced by 1/b_small; b_big and b_small exchanged in |G|^2
    draw = np.random.default_rng(0)
    dims = 200
    gradient = draw.normal(size=dims)
    gradient *= 2.0 / np.linalg.norm(gradient)
    variance = draw.uniform(0.5, 1.5, size=dims)
    variance *= 500.0 / variance.sum()
    noise = NoiseScale(decay=0.999)
    for _ in range(1500):  # a mean over `rows` rows has covariance / rows
        means = gradient + draw.normal(size=(parts, dims)) * np.sqrt(variance / rows)
        noise.update(float((means**2).sum(1).mean()), float((means.mean(0) ** 2).sum()), rows, rows * parts)
    assert noise.trace == pytest.approx(500.0, rel=0.01)
    assert noise.squared_norm == pytest.approx(4.0, rel=0.05)
    assert noise.value == pytest.approx(125.0, rel=0.05)


def test_no_value_before_it_makes_sense() -> None:
    noise = NoiseScale()
    assert noise.value is None and noise.trace is None and noise.squared_norm is None
    noise.update(8.0, 1.0, 1, 2)  # |G|^2 = (2*1 - 8) / 1 < 0
    assert noise.value is None and noise.squared_norm == pytest.approx(-6.0)


def test_steps_that_are_not_finite_are_left_out() -> None:
    noise = NoiseScale()
    noise.update(5.0, 2.0, 4, 16)
    for small, big in ((math.inf, 2.0), (5.0, math.nan)):
        noise.update(small, big, 4, 16)
    assert noise.updates == 1 and noise.value == pytest.approx(16.0)


@pytest.mark.parametrize(("small", "big"), [(4, 4), (8, 4), (0, 4)])
def test_one_batch_size_tells_nothing(small: int, big: int) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        NoiseScale().update(1.0, 1.0, small, big)


def test_state_goes_on_where_it_was() -> None:
    draw = np.random.default_rng(1)
    norms = [(float(b + 1 + a), float(b)) for a, b in draw.random((20, 2))]
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for pair in norms:
        whole.update(*pair, 2, 8)
    for pair in norms[:7]:
        first.update(*pair, 2, 8)
    second.load_state_dict(first.state_dict())
    for pair in norms[7:]:
        second.update(*pair, 2, 8)
    assert second.state_dict() == whole.state_dict()  # bitwise


def test_the_warning_has_numbers_and_waits() -> None:
    noise = NoiseScale()
    for _ in range(99):
        noise.update(5.0, 2.0, 4, 16)
    assert batch_warning(65, noise) is None  # too early
    noise.update(5.0, 2.0, 4, 16)
    text = batch_warning(65, noise)
    assert text is not None and "65 rows" in text and "more than 4 times" in text and "16 rows" in text
    assert batch_warning(63, noise) is None  # not beyond 4 x 16
    assert batch_warning(63, noise, factor=2.0) is not None
    assert batch_warning(65, NoiseScale(), after=0) is None  # nothing measured
