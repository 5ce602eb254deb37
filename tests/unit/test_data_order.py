from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import Permutation, Span, key, mix, mix_array, step_span
from meshwright.errors import DataError

SEEDS = st.integers(0, 2**70)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 2000), seed=SEEDS, epoch=st.integers(0, 10**6), data=st.data())
def test_every_number_comes_exactly_once_and_can_be_traced_back(n, seed, epoch, data):
    # Red when the cycle walk is left out (numbers >= n appear) and when a round writes to both halves.
    order = Permutation(n, seed, epoch)
    images = order.many(np.arange(n))
    assert np.array_equal(np.sort(images), np.arange(n))
    i = data.draw(st.integers(0, n - 1))
    assert order(i) == images[i]
    assert order.inverse(order(i)) == i
    assert order(order.inverse(i)) == i


@pytest.mark.parametrize("n", [10**12, 10**12 + 39, 2**40, 2**40 + 1, 2**62])
def test_huge_ranges_are_reached_at_any_place(n):
    order = Permutation(n, 7, 3)
    places = np.unique(np.concatenate([np.arange(2000), n - 1 - np.arange(2000), np.arange(2000) * (n // 2003)]))
    images = order.many(places)
    assert images.min() >= 0 and images.max() < n
    assert np.unique(images).size == places.size
    for i in places[::500].tolist():
        assert order(i) == images[np.searchsorted(places, i)]
        assert order.inverse(order(i)) == i


def test_all_orders_of_few_things_are_equally_likely():
    # Red with 2 rounds instead of 8 (chi-square in the thousands).
    seen = dict.fromkeys(permutations(range(4)), 0)
    for epoch in range(24 * 200):
        seen[tuple(Permutation(4, 0, epoch).many(np.arange(4)).tolist())] += 1
    chi_square = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi_square < 58  # 23 degrees of freedom: 1 in 10,000 above it; seeds are fixed


def test_neighbours_do_not_stay_neighbours():
    # Red when only one half is ever changed: rows of the same stretch then stay together.
    n = 100_000
    images = Permutation(n, 1, 0).many(np.arange(n)).astype(float)
    assert abs(np.corrcoef(images[1:], images[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(images, np.arange(n))[0, 1]) < 0.02
    assert abs(np.abs(np.diff(images)).mean() / n - 1 / 3) < 0.01


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(Permutation(23, seed, epoch).many(np.arange(23)).tolist()) for seed in range(4) for epoch in range(50)]
    assert len(set(orders)) == len(orders)


def test_the_order_is_the_same_for_ever():
    # A run that is resumed after an upgrade depends on these very numbers.
    assert Permutation(10, 0, 0).many(np.arange(10)).tolist() == ORDER_10
    assert [Permutation(10**12, 5, 2)(i) for i in (0, 1, 10**12 - 1)] == ORDER_HUGE
    assert [mix(0, 1), mix(0, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # SplitMix64's published first outputs


ORDER_10 = [0, 2, 9, 4, 7, 6, 3, 1, 5, 8]
ORDER_HUGE = [698178080130, 310534221707, 338729362837]


@settings(deadline=None)
@given(stream=st.integers(0, 2**64 - 1), counters=st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_the_array_form_of_the_hash_equals_the_plain_one(stream, counters):
    assert mix_array(stream, np.array(counters)).tolist() == [mix(stream, counter) for counter in counters]


def test_keys_do_not_run_into_each_other():
    assert len({key("a", 1, 23), key("a", 12, 3), key("a1", 23), key("a", "1", 23), key("a", 1, 23 + 2**64)}) == 5


def test_outside_the_range_is_refused():
    order = Permutation(5, 0)
    for bad in (-1, 5):
        with pytest.raises(IndexError):
            order(bad)
        with pytest.raises(IndexError):
            order.inverse(bad)
    with pytest.raises(IndexError):
        order.many(np.array([5]))
    for n in (0, 2**62 + 1):
        with pytest.raises(ValueError):
            Permutation(n, 0)


def test_the_last_step_of_an_epoch_is_smaller():
    spans, consumed = [], 0
    for _ in range(4):
        spans.append(step_span(consumed, lambda _: 8, 10, "step"))
        consumed = spans[-1].stop
    assert spans == [Span(0, 8), Span(8, 2), Span(10, 8), Span(18, 2)]


def test_or_the_ragged_end_is_dropped_and_counted():
    assert step_span(0, lambda _: 8, 10, "drop") == Span(0, 8)
    assert step_span(8, lambda _: 8, 10, "drop") == Span(10, 8, dropped=2)
    assert step_span(2, lambda _: 8, 10, "drop") == Span(2, 8)


def test_a_ramp_is_asked_again_after_the_dropped_rows():
    assert step_span(8, lambda consumed: 4 if consumed < 10 else 6, 10, "drop") == Span(10, 6, dropped=2)


def test_dropping_everything_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"11 rows.*10 rows"):
        step_span(0, lambda _: 11, 10, "drop")


@settings(deadline=None)
@given(rows=st.integers(1, 50), batch=st.integers(1, 60), tail=st.sampled_from(["step", "drop"]), start=st.integers(0, 200))
def test_no_step_reaches_over_an_epoch(rows, batch, tail, start):
    if tail == "drop" and batch > rows:
        return
    span = step_span(start, lambda _: batch, rows, tail)
    assert span.start == start + span.dropped
    assert 1 <= span.rows <= batch and span.dropped < batch
    assert span.start // rows == (span.stop - 1) // rows
    assert tail == "step" or span.rows == batch
