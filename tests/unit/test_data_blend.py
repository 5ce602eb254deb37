from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.blend import Blend, Concatenation, order_of
from meshwright.errors import ConfigError

WEIGHTS = st.lists(st.one_of(st.floats(0.01, 10.0), st.integers(1, 9).map(float)), min_size=1, max_size=6)


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(sum), seed=st.integers(0, 2**64))
def test_without_weights_every_row_of_every_corpus_comes_once_an_epoch(rows, seed):
    order = Concatenation(rows, seed)
    everything = [(corpus, row) for corpus, count in enumerate(rows) for row in range(count)]
    for epoch in range(3):
        samples = range(epoch * order.rows, (epoch + 1) * order.rows)
        assert sorted(order.locate(sample) for sample in samples) == everything


def test_epochs_of_a_concatenation_differ():
    order = Concatenation([10, 13], 0)
    epochs = [tuple(order.locate(23 * epoch + i) for i in range(23)) for epoch in range(3)]
    assert len(set(epochs)) == 3


@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 100), block=st.integers(0, 10**9))
def test_shares_are_exact_to_one_sample_at_block_borders(weights, seed, block):
    # Red when each corpus is rounded on its own (the counts no longer add up) and with blocks of 1 (counts that fall).
    blend = Blend([5] * len(weights), weights, seed)
    for number in (block, block + 1):
        samples = number * blend.block
        counts = blend.counts(samples)
        assert sum(counts) == samples
        assert all(abs(count - samples * share) <= 1 for count, share in zip(counts, blend.shares, strict=True))
    before, after = blend.counts(block * blend.block), blend.counts((block + 1) * blend.block)
    assert all(b <= a for b, a in zip(before, after, strict=True))


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS.filter(lambda w: min(w) / sum(w) > 0.005), seed=st.integers(0, 100))
def test_each_index_of_each_corpus_comes_exactly_once(weights, seed):
    blend = Blend([5] * len(weights), weights, seed)
    samples = 2 * blend.block
    picks = [blend.pick(sample) for sample in range(samples)]
    for corpus, count in enumerate(blend.counts(samples)):
        assert sorted(index for c, index in picks if c == corpus) == list(range(count))


def test_rows_of_a_corpus_come_once_in_each_of_its_own_epochs():
    blend = Blend([7, 64], [0.5, 0.5], 0)
    assert blend.rows == 71
    picked = [(blend.pick(sample), blend.locate(sample)) for sample in range(blend.block)]
    for corpus, rows in ((0, 7), (1, 64)):
        by_index = {index: row for (c, index), (_, row) in picked if c == corpus}
        epochs = [tuple(by_index[i] for i in range(start, start + rows)) for start in range(0, 128 - rows + 1, rows)]
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert len(set(epochs)) == len(epochs)


def test_a_place_is_reached_directly_and_any_time_again():
    blend = Blend([1000, 10, 33], [0.7, 0.2, 0.1], 3)
    walked = [blend.locate(sample) for sample in range(3000)]
    fresh = Blend([1000, 10, 33], [0.7, 0.2, 0.1], 3)
    assert [fresh.locate(sample) for sample in reversed(range(3000))] == walked[::-1]
    corpus, index = Blend([1000, 10, 33], [0.7, 0.2, 0.1], 3).pick(10**15)
    assert abs(index - 10**15 * (0.7, 0.2, 0.1)[corpus]) < blend.block


def test_corpora_are_mixed_within_a_block():
    # Red when the shuffle inside a block is left out: one corpus then comes as one run.
    blend = Blend([100, 100], [0.5, 0.5], 0)
    corpora = np.array([blend.pick(sample)[0] for sample in range(20_000)])
    changes = (corpora[1:] != corpora[:-1]).mean()
    assert 0.48 < changes < 0.52
    share_of_batches = corpora.reshape(-1, 32).mean(1)
    assert 0.03 < share_of_batches.std() < 0.12  # a fair coin: sqrt(1/4/32) = 0.088


def test_decimal_weights_mean_what_they_say():
    assert [str(share) for share in Blend([1, 1], [0.7, 0.3], 0).shares] == ["7/10", "3/10"]
    assert [str(share) for share in Blend([1, 1, 1], [1, 2, 5], 0).shares] == ["1/8", "1/4", "5/8"]


def test_a_tiny_share_is_still_exact():
    blend = Blend([10, 10], [1e-4, 1.0], 0)
    picks = Counter(blend.pick(sample)[0] for sample in range(blend.block))
    assert abs(picks[0] - blend.block * float(blend.shares[0])) <= 1 and picks[0] >= 1


def test_all_or_no_corpora_carry_a_weight():
    assert isinstance(order_of([3, 4], [None, None], 0), Concatenation)
    assert isinstance(order_of([3, 4], [1.0, 2.0], 0), Blend)
    with pytest.raises(ConfigError) as caught:
        order_of([3, 4, 5], [1.0, None, None], 0)
    assert [finding.where for finding in caught.value.findings] == ["data.train.1.weight", "data.train.2.weight"]
