"""Norms, clip coefficient and digests against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel import norm
from meshwright.parallel.norm import CHUNK, agree_least, clip_coefficient, differing, digest, square_norm


@pytest.mark.parametrize("size", [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_square_norm_counts_each_element_once(size):
    # Red when the elements after the last whole chunk are left out.
    assert float(square_norm(torch.full((size,), 2.0, dtype=torch.float64))) == pytest.approx(4.0 * size, rel=1e-15)


def test_square_norm_is_taken_in_at_least_fp32():
    values = torch.full((1 << 16,), 2.0**-10, dtype=torch.bfloat16)
    assert square_norm(values).dtype == torch.float32 and float(square_norm(values)) == pytest.approx(2.0**-4, rel=1e-6)
    assert square_norm(torch.full((4,), 300.0, dtype=torch.float16)) == 360000.0  # past the largest fp16
    big = torch.full((4,), 1e200, dtype=torch.float64)
    assert square_norm(big.div(1e50)).dtype == torch.float64


def test_square_norm_stays_near_fp64_and_repeats_bitwise():
    values = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1)) + 3.0
    exact = float(values.double().square().sum())
    assert float(square_norm(values)) == pytest.approx(exact, rel=1e-6)
    assert torch.equal(square_norm(values), square_norm(values))


def test_square_norm_of_what_is_not_finite_is_not_finite():
    for bad in (math.inf, -math.inf, math.nan):
        values = torch.zeros(2 * CHUNK)
        values[CHUNK + 3] = bad
        assert not torch.isfinite(square_norm(values))


@pytest.mark.parametrize(
    ("length", "clip", "expected"), [(4.0, 1.0, 1.0 / 4.000001), (0.5, 1.0, 1.0), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clip_coefficient(length, clip, expected):
    assert float(clip_coefficient(torch.tensor(length, dtype=torch.float64), clip)) == pytest.approx(expected, rel=1e-15)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(2, 200),
    place=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_digest_sees_one_changed_bit_and_a_swap(size, place, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    reference = digest(values)
    assert torch.equal(reference, digest(values.clone()))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    changed = values.clone()
    changed.view(integers)[place % size] ^= 1
    assert not torch.equal(digest(changed), reference)
    swapped = values.clone()
    i, j = place % size, (place + 1) % size
    swapped[i], swapped[j] = values[j].clone(), values[i].clone()
    assert torch.equal(digest(swapped), reference) == torch.equal(swapped, values)


def test_digest_positions_go_on_over_its_blocks(monkeypatch):
    # Red when every block counts its places from 1.
    values = torch.randn(21)
    whole = digest(values)
    monkeypatch.setattr(norm, "DIGEST_BLOCK", 8)
    assert torch.equal(digest(values), whole)


def test_without_groups_nothing_differs_and_the_own_index_is_the_first():
    assert differing(torch.arange(6).view(3, 2), []) is None
    assert agree_least([3, "a"], [], torch.device("cpu")) == [3, "a"]
    assert agree_least(None, [], torch.device("cpu")) is None
