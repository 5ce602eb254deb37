from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.batch import IGNORE
from meshwright.data.masking import Masking

SPECIAL = {0, 1, 2, 3, 4, 5, 6}
MASK = 3


def masking(seq_len: int = 64, fraction: float = 0.15, seed: int = 0, vocab_size: int = 100) -> Masking:
    return Masking(seed, fraction=fraction, seq_len=seq_len, vocab_size=vocab_size, mask_id=MASK, special_ids=SPECIAL)


def one(draw: Masking, row: np.ndarray, sample: int, eligible: np.ndarray | None = None) -> list[np.ndarray]:
    """A micro-batch of one row."""
    return [value[0] for value in draw(row[None], [sample], None if eligible is None else eligible[None])]


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 99), min_size=1, max_size=64),
    fraction=st.floats(0.001, 0.999),
    sample=st.integers(0, 2**50),
    data=st.data(),
)
def test_exactly_the_asked_number_of_ordinary_tokens_is_chosen(tokens, fraction, sample, data):
    # Red when each position is drawn on its own, and when special tokens are candidates.
    row = np.array(tokens)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=row.size, max_size=row.size)))
    draw = masking(fraction=fraction)
    masked, select, labels = one(draw, row, sample, eligible)
    candidates = [i for i, token in enumerate(tokens) if token not in SPECIAL and eligible[i]]
    count = max(1, round(fraction * len(candidates))) if candidates else 0
    assert select.shape == labels.shape == (draw.slots,)
    chosen = select[:count]
    assert len(set(chosen.tolist())) == count and set(chosen.tolist()) <= set(candidates)
    assert np.array_equal(labels[:count], row[chosen]) and np.all(np.diff(chosen) > 0)
    assert np.all(labels[count:] == IGNORE) and np.all(select[count:] == 0)
    others = np.setdiff1d(np.arange(row.size), chosen)
    assert np.array_equal(masked[others], row[others])
    assert all(token == MASK or token not in SPECIAL for token in masked[chosen].tolist())
    assert np.array_equal(row, tokens), "the row itself is left alone"


def test_eighty_ten_ten():
    # Red with the bounds 0.8 and 0.1 swapped, and when the two draws share one stream.
    draw, row = masking(seq_len=1000, fraction=0.3), np.full(1000, 50)
    fates = np.zeros(3)
    places = np.zeros(1000)
    for sample in range(200):
        masked, select, _ = one(draw, row, sample)
        here = masked[select]
        fates += [(here == MASK).sum(), ((here != MASK) & (here != 50)).sum(), (here == 50).sum()]
        places[select] += 1
    # A random token is drawn from the 93 ordinary ones, so 1 in 93 of those equals the old one: 0.1 * (1 - 1/93).
    share = fates / fates.sum()
    assert fates.sum() == 200 * 300
    assert np.allclose(share, [0.8, 0.1 * 92 / 93, 0.1 + 0.1 / 93], atol=0.006)  # 3.7 sigma of 60,000 draws
    assert places.min() > 25 and places.max() < 95  # 60 +- 6.5 at each position


def test_random_tokens_cover_the_ordinary_vocabulary_evenly():
    draw, row = masking(seq_len=1000, fraction=0.9), np.full(1000, 50)
    drawn = np.concatenate([one(draw, row, sample)[0] for sample in range(100)])
    counts = np.bincount(drawn[(drawn != MASK) & (drawn != 50)], minlength=100)
    assert counts[:7].sum() == 0
    assert np.delete(counts[7:], 43).min() > 50 and counts.max() < 150  # about 97 each


def test_a_row_is_a_function_of_seed_and_sample_only():
    row = np.arange(7, 71)
    first = one(masking(), row, 5)
    one(masking(), row, 4)
    again = one(masking(), row, 5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (one(masking(), row, 6), one(masking(seed=1), row, 5)):
        assert not np.array_equal(first[1], other[1])


@settings(deadline=None)
@given(rows=st.integers(1, 6), seq_len=st.integers(1, 40), fraction=st.floats(0.001, 0.999), data=st.data())
def test_rows_drawn_together_are_those_drawn_alone(rows, seq_len, fraction, data):
    # Red when all rows take the first one's stream, and when every row takes as many places as the first.
    draw = masking(seq_len=seq_len, fraction=fraction)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens, eligible = random.integers(0, 100, (rows, seq_len)), random.random((rows, seq_len)) < 0.8
    samples = range(11, 11 + rows)
    together = draw(tokens, samples, eligible)
    for row, sample in enumerate(samples):
        alone = one(draw, tokens[row], sample, eligible[row])
        assert all(np.array_equal(value[row], single) for value, single in zip(together, alone, strict=True))


def test_the_draws_are_the_same_for_ever():
    # A run that is resumed after an upgrade depends on these very numbers.
    masked, select, labels = one(masking(seq_len=40), np.arange(7, 47), 12345)
    assert select.tolist() == SELECT
    assert labels.tolist() == [7 + place for place in SELECT]
    assert masked[select].tolist() == MASKED


SELECT = [14, 15, 20, 22, 25, 27]
MASKED = [45, 41, 3, 46, 3, 3]


@pytest.mark.parametrize(
    ("seq_len", "fraction", "slots"), [(100, 0.15, 15), (30, 0.1, 3), (20, 0.15, 3), (7, 0.15, 2), (4, 0.01, 1), (1, 0.99, 1)]
)
def test_the_number_of_slots_is_fixed_by_the_row_length(seq_len, fraction, slots):
    assert masking(seq_len, fraction).slots == slots


def test_a_row_of_special_tokens_has_no_target():
    masked, _select, labels = one(masking(), np.array([1, 4, 5, 2]), 0)
    assert masked.tolist() == [1, 4, 5, 2] and np.all(labels == IGNORE)
