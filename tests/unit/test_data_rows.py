from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.batch import IGNORE
from meshwright.data.rows import DocumentRows, StreamRows, Subset, held_out
from tests.unit.data_stores import FakeStore, counting

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=30)
ROW = st.integers(1, 9)


def documents_of(store: FakeStore, subset: Subset) -> list[list[int]]:
    return [list(store.parts[i]) for i in subset.ids(0, subset.documents).tolist()]


def prompts_for(lengths: list[int]) -> np.ndarray:
    return np.array([(7 * i) % (length + 2) for i, length in enumerate(lengths)])  # up to one more than the document has


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=ROW, fraction=st.sampled_from([0.0, 0.2, 0.5]), mask=st.booleans(), response=st.booleans())
def test_stream_rows_hold_every_token_and_every_target_once(lengths, seq_len, fraction, mask, response):
    # Red when a row ends without looking one token ahead, when a border at a row's end is kept as a target, and when
    # prompt lengths are taken of the subset's instead of the store's document numbers.
    prompts = prompts_for(lengths)
    store = counting(lengths, prompt_lengths=prompts)
    for subset in Subset.split(store, fraction):
        rows = StreamRows(subset, seq_len, document_mask=mask, response_only=response)
        documents = documents_of(store, subset)
        places = [(d, offset) for d in range(len(documents)) for offset in range(len(documents[d]))]
        stream = [documents[d][offset] for d, offset in places]
        ids = subset.ids(0, subset.documents).tolist()
        is_target = [not response or offset >= prompts[ids[d]] for d, offset in places]
        inputs, following, begins, eligible = [], [], [], []
        assert rows.rows == -(-len(stream) // seq_len)
        for i in range(rows.rows):
            cut = rows.cut(i)
            assert cut.tokens.size == min(seq_len, len(stream) - i * seq_len)
            assert cut.starts[0] == 0 and np.all(np.diff(cut.starts) > 0) and cut.starts[-1] < cut.tokens.size
            begins += (cut.starts + i * seq_len).tolist()
            inputs += cut.tokens.tolist()
            following += cut.following.tolist()
            eligible += [True] * cut.tokens.size if cut.eligible is None else cut.eligible.tolist()
        assert inputs == stream
        assert eligible == is_target
        expected = []
        for t in range(len(stream)):
            last = t + 1 == len(stream)
            crosses = not last and mask and places[t + 1][1] == 0
            expected.append(IGNORE if last or crosses or not is_target[t + 1] else stream[t + 1])
        assert following == expected
        borders = {t for t, (_, offset) in enumerate(places) if offset == 0} if mask else set()
        assert begins == sorted(borders | set(range(0, len(stream), seq_len)))


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=ROW, fraction=st.sampled_from([0.0, 0.3]), response=st.booleans())
def test_document_rows_are_the_windows_of_each_document(lengths, seq_len, fraction, response):
    # Red when a window does not look one token ahead and when empty documents give a row.
    prompts = prompts_for(lengths)
    store = counting(lengths, prompt_lengths=prompts)
    for subset in Subset.split(store, fraction):
        rows = DocumentRows(subset, seq_len, response_only=response)
        expected = []
        for d in subset.ids(0, subset.documents).tolist():
            tokens = list(store.parts[d])
            shifted = [IGNORE if response and t + 1 < prompts[d] else token for t, token in enumerate(tokens[1:])] + [
                IGNORE
            ] * bool(tokens)
            expected += [(tokens[a : a + seq_len], shifted[a : a + seq_len]) for a in range(0, len(tokens), seq_len)]
        assert [(cut.tokens.tolist(), cut.following.tolist()) for cut in map(rows.cut, range(rows.rows))] == expected
        assert all(rows.cut(i).starts.tolist() == [0] for i in range(rows.rows))
        assert rows.empty == sum(not store.parts[d] for d in subset.ids(0, subset.documents).tolist())


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    seq_len=ROW,
    fraction=st.sampled_from([0.0, 0.2, 0.5]),
    mask=st.booleans(),
    response=st.booleans(),
    whole=st.booleans(),
    data=st.data(),
)
def test_rows_cut_together_are_those_cut_alone(lengths, seq_len, fraction, mask, response, whole, data):
    # Red when a border behind a row counts as one in the next row, when runs without tokens stay among the pieces of a window,
    # when the last row of the corpus has a target behind its end, and when prompts are counted from the window's begin.
    store = counting(lengths, prompt_lengths=prompts_for(lengths))
    for subset in Subset.split(store, fraction):
        if whole:
            rows: StreamRows | DocumentRows = DocumentRows(subset, seq_len, response_only=response)
        else:
            rows = StreamRows(subset, seq_len, document_mask=mask, response_only=response)
        if not rows.rows:
            continue
        wanted = data.draw(st.lists(st.integers(0, rows.rows - 1), min_size=1, max_size=12))
        cuts = rows.cuts(np.array(wanted))
        assert cuts.tokens.shape == cuts.following.shape == cuts.first.shape == (len(wanted), seq_len)
        assert cuts.tokens.dtype == cuts.following.dtype == cuts.sizes.dtype == np.int64
        for row, cut in enumerate(map(rows.cut, wanted)):
            size = int(cuts.sizes[row])
            assert np.array_equal(cuts.tokens[row, :size], cut.tokens)
            assert np.array_equal(cuts.following[row, :size], cut.following) and np.all(cuts.following[row, size:] == IGNORE)
            assert np.flatnonzero(cuts.first[row]).tolist() == cut.starts.tolist()
            assert (cut.eligible is None) == (cuts.eligible is None)
            assert cut.eligible is None or np.array_equal(cuts.eligible[row, :size], cut.eligible)


def test_a_very_long_document_is_cut_into_windows():
    length, seq_len = 1_000_003, 512
    store = FakeStore([np.zeros(3, np.int64), np.arange(length) % 60_000, np.zeros(5, np.int64)])
    rows = DocumentRows(Subset.whole(store), seq_len)
    assert rows.rows == 1 + -(-length // seq_len) + 1
    last = rows.cut(rows.rows - 2)
    assert last.tokens.size == length % seq_len and last.following[-1] == IGNORE
    middle = rows.cut(1000)
    assert middle.tokens[0] == 999 * seq_len % 60_000 and middle.following[-1] == 1000 * seq_len % 60_000


def test_many_documents_are_found_through_the_index():
    lengths = np.random.default_rng(0).integers(0, 9, 5000)  # several blocks of the index
    store = counting(lengths.tolist())
    for subset in Subset.split(store, 0.3):
        rows = DocumentRows(subset, 3)
        wanted = [store.parts[d][a : a + 3] for d in subset.ids(0, subset.documents) for a in range(0, lengths[d], 3)]
        assert rows.rows == len(wanted)
        for i in [*range(0, rows.rows, 37), rows.rows - 1]:
            assert rows.cut(i).tokens.tolist() == [token % 65536 for token in wanted[i]]


def test_classified_documents_are_truncated_and_counted():
    # Red when the closing token is not kept.
    store = FakeStore(
        [[4, 10, 5], [4, *range(10, 20), 5], [4, *range(10, 20), 19], [], [4, 10, 11, 12, 5]], labels=np.array([0, 1, 2, 3, 4])
    )
    rows = DocumentRows(Subset.whole(store), 5, truncate=True, closing=frozenset({5, 2}))
    cuts = [rows.cut(i) for i in range(rows.rows)]
    assert [cut.tokens.tolist() for cut in cuts] == [[4, 10, 5], [4, 10, 11, 12, 5], [4, 10, 11, 12, 13], [4, 10, 11, 12, 5]]
    assert [cut.label for cut in cuts] == [0, 1, 2, 4]
    assert (rows.truncated, rows.empty) == (2, 1)


@settings(deadline=None)
@given(documents=st.integers(1, 3000), fraction=st.floats(0, 0.999))
def test_the_held_out_part_has_exactly_its_size_and_shares_no_document(documents, fraction):
    ids = held_out(documents, fraction)
    assert ids.size == round(fraction * documents)
    assert np.array_equal(ids, np.unique(ids)) and (not ids.size or (ids[0] >= 0 and ids[-1] < documents))
    store = FakeStore([[1]] * documents)
    train, valid = Subset.split(store, fraction)
    both = np.concatenate([train.ids(0, train.documents), valid.ids(0, valid.documents)])
    assert np.array_equal(np.sort(both), np.arange(documents))
    assert np.array_equal(valid.ids(0, valid.documents), ids)


def test_three_documents_and_a_small_fraction_hold_out_nothing():
    assert held_out(3, 49 / 999).size == 0
    assert held_out(3, 0.34).size == 1


def test_a_store_that_has_grown_keeps_its_held_out_documents():
    # Red when the split is a permutation of the document count: then 1% of them would stay.
    before, after = held_out(100_000, 0.01), held_out(101_000, 0.01)
    assert np.isin(before, after).mean() > 0.97
    assert np.isin(after[after < 100_000], before).mean() > 0.97


def test_held_out_documents_are_spread_over_the_store(monkeypatch):
    ids = held_out(2_500_000, 0.002)
    assert ids.size == 5000
    tenths = np.histogram(ids, bins=10, range=(0, 2_500_000))[0]
    assert tenths.min() > 400 and tenths.max() < 600  # 500 +- 22
    monkeypatch.setattr("meshwright.data.rows._CHUNK", 999)
    assert np.array_equal(held_out(25_000, 0.1), np.sort(HELD_OUT(25_000, 2500)))


def HELD_OUT(documents: int, wanted: int) -> np.ndarray:
    """All hashes at once, sorted: what the chunked search must find."""
    from meshwright.data.order import key, mix_array

    return np.argsort(mix_array(key("held-out documents"), np.arange(documents)), kind="stable")[:wanted]


def test_a_training_part_is_kept_as_few_numbers():
    store = FakeStore([[1, 2]] * 20_000)
    train, valid = Subset.split(store, 0.01)
    assert (train.documents, valid.documents) == (19_800, 200)
    assert (
        sum(value.size for name, value in vars(train).items() if isinstance(value, np.ndarray) and name != "_offsets") < 5 * 202
    )


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_windows_of_a_subset_name_the_stores_documents(fraction):
    store = counting([3, 0, 4, 1, 0, 0, 6, 2])
    subset, _ = Subset.split(store, fraction)
    ids = [d for d in subset.ids(0, subset.documents).tolist() if store.parts[d]]
    tokens, begins, found = subset.window(0, subset.tokens)
    assert found.tolist() == ids
    assert begins.tolist() == np.cumsum([0, *(len(store.parts[d]) for d in ids)])[:-1].tolist()
    assert tokens.tolist() == [token for d in ids for token in store.parts[d]]
