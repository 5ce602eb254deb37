from __future__ import annotations

import gc
import threading
import time
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.batch import IGNORE, Batch
from meshwright.data.dataset import RowDataset, build_datasets
from meshwright.data.loader import Loader, StepData, boundaries
from meshwright.errors import DataError
from tests.unit.data_stores import FakeStore, Words, config, counting


def numbered(rows: int, seq_len: int = 4, seed: int = 0) -> RowDataset:
    """Row i of the corpus has the tokens i * seq_len .. : the first token names the row."""
    settings_ = config(data={"seq_len": seq_len}, run={"seed": seed})
    return build_datasets(settings_, [counting([seq_len] * rows)], [], Words())[0]


def samples_of(batches: list[Batch]) -> list[int]:
    return [sample for batch in batches for sample in batch.samples.tolist() if sample >= 0]


def row_ids(step: StepData, seq_len: int = 4) -> list[int]:
    pairs = [pair for batch in step.micro for pair in zip(batch.samples.tolist(), batch.tokens[:, 0].tolist(), strict=True)]
    return [token // seq_len for sample, token in pairs if sample >= 0]


def same(a: Batch, b: Batch) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in Batch.__dataclass_fields__]
    return all((x is None and y is None) or torch.equal(x, y) for x, y in pairs)


def take(loader: Loader, count: int, batch: int, consumed: int = 0) -> list[StepData]:
    iterator = loader.steps(consumed, lambda _: batch)
    steps = list(islice(iterator, count))
    iterator.close()
    return steps


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "meshwright-loader"]


def test_ten_rows_in_batches_of_eight_make_a_step_of_eight_and_one_of_two():
    steps = take(Loader(numbered(10), micro_batch=2), 3, batch=8)
    assert [(step.consumed_before, step.rows, step.dropped, len(step.micro)) for step in steps] == [
        (0, 8, 0, 4), (8, 2, 0, 1), (10, 8, 0, 4)
    ]  # fmt: skip
    assert sorted(row_ids(steps[0]) + row_ids(steps[1])) == list(range(10))
    assert [(step.targets, step.tokens, step.local_rows) for step in steps] == [(24, 32, 8), (6, 8, 2), (24, 32, 8)]


def test_or_a_step_of_eight_and_two_dropped_rows():
    steps = take(Loader(numbered(10), micro_batch=2, tail="drop"), 3, batch=8)
    assert [(step.consumed_before, step.rows, step.dropped) for step in steps] == [(0, 8, 0), (10, 8, 2), (20, 8, 2)]
    assert [step.consumed_after for step in steps] == [8, 18, 28]
    with pytest.raises(DataError):
        take(Loader(numbered(10), micro_batch=2, tail="drop"), 1, batch=11)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("world", [2, 3])
def test_ragged_rows_reach_the_ranks_once_and_in_equal_numbers_of_micro_batches(rows, world):
    # Red when the last rank's padding is left out (fewer micro-batches) and when slices are rounded down (rows lost).
    ranks = [take(Loader(numbered(rows), dp_rank=r, dp_world=world, micro_batch=1), 2 * rows, batch=2) for r in range(world)]
    seen: list[int] = []
    for step in zip(*ranks, strict=True):
        assert len({len(part.micro) for part in step}) == len({part.rows for part in step}) == 1
        assert sum(part.local_rows for part in step) == step[0].rows
        assert {batch.tokens.shape for part in step for batch in part.micro} == {(1, 4)}
        seen += [sample for part in step for sample in samples_of(part.micro)]
    assert seen == list(range(len(seen)))
    epoch = [i for step in zip(*ranks, strict=True) for part in step for i in row_ids(part)][:rows]
    assert sorted(epoch) == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), batch=st.integers(1, 20), world=st.integers(1, 5), micro=st.integers(1, 6))
def test_what_is_learned_from_does_not_depend_on_ranks_or_micro_batches(rows, batch, world, micro):
    dataset = numbered(rows)
    whole = take(Loader(dataset, micro_batch=batch), 4, batch)
    ranks = [take(Loader(dataset, dp_rank=r, dp_world=world, micro_batch=micro), 4, batch) for r in range(world)]
    for one, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        batches = [b for part in parts for b in part.micro]
        real = torch.cat([b.samples for b in batches]) >= 0
        for name in ("tokens", "labels", "samples", "documents", "positions"):
            assert torch.equal(torch.cat([getattr(b, name) for b in batches])[real], getattr(one.micro[0], name)[: one.rows])
        assert sum(part.targets for part in parts) == one.targets == sum(b.targets() for b in one.micro)
        assert sum(part.tokens for part in parts) == one.tokens
        share = -(-one.rows // world)
        assert {len(part.micro) for part in parts} == {-(-share // micro)}


def test_padded_rows_weigh_nothing():
    [step] = take(Loader(numbered(3), micro_batch=4), 1, batch=3)
    [batch] = step.micro
    assert batch.samples.tolist() == [0, 1, 2, -1]
    assert batch.labels[3].tolist() == [IGNORE] * 4
    assert batch.documents[3].tolist() == [-1] * 4
    assert batch.positions[3].tolist() == [0, 1, 2, 3]
    assert (step.targets, step.tokens) == (9, 12)


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "classify"])
def test_padded_rows_have_the_shapes_of_real_ones(kind):
    store = FakeStore([[4, *range(10, 15), 5]] * 3, labels=np.array([0, 1, 0]), label_names=["x", "y"])
    arch = {"arch": "decoder" if kind == "causal_lm" else "encoder"}
    dataset, _ = build_datasets(config(objective={"kind": kind}, model=arch), [store], [], Words())
    loaders = [Loader(dataset, dp_rank=r, dp_world=2, micro_batch=2) for r in range(2)]
    [real], [empty] = (take(loader, 1, batch=1) for loader in loaders)
    assert (real.local_rows, empty.local_rows, empty.targets, empty.tokens) == (1, 0, 0, 0)
    for name in Batch.__dataclass_fields__:
        ours, theirs = getattr(real.micro[0], name), getattr(empty.micro[0], name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype and (name == "cu_seqlens" or ours.shape == theirs.shape)
    assert real.micro[0].labels.shape == {"causal_lm": (2, 8), "masked_lm": (2, 2), "classify": (2,)}[kind]
    assert (empty.micro[0].labels == IGNORE).all()


def test_rows_without_targets_are_dealt_like_any_other():
    store = counting([42, 5], prompt_lengths=np.array([41, 2]))  # a prompt of 41 tokens over rows of 16
    settings_ = config(objective={"response_only": True}, data={"packing": "none", "seq_len": 16})
    dataset, _ = build_datasets(settings_, [store], [], Words())
    assert dataset.rows == 4
    counts = []
    for rank in range(2):
        [step] = take(Loader(dataset, dp_rank=rank, dp_world=2, micro_batch=1), 1, batch=4)
        counts += [(batch.targets(), int(batch.tokens[0, 0])) for batch in step.micro]
        assert step.targets == sum(batch.targets() for batch in step.micro)
    assert sorted(counts) == [(0, 0), (0, 16), (1, 32), (3, 42)]


def test_an_epoch_is_a_permutation_and_a_resume_continues_it():
    # Red when the permutation ignores the epoch.
    loader = Loader(numbered(23), micro_batch=2)
    steps = take(loader, 18, batch=4)
    ids = [i for step in steps for i in row_ids(step)]
    epochs = [ids[start : start + 23] for start in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    resumed = take(Loader(numbered(23), micro_batch=2), 15, batch=4, consumed=steps[2].consumed_after)
    assert [row_ids(step) for step in resumed] == [row_ids(step) for step in steps[3:]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(5, 40),
    batch=st.integers(1, 5),
    stop=st.integers(0, 12),
    tail=st.sampled_from(["step", "drop"]),
    prefetch=st.sampled_from([0, 1, 7]),
    rank=st.integers(0, 1),
    seed=st.integers(0, 3),
)
def test_from_any_step_on_a_resume_is_the_uninterrupted_run(rows, batch, stop, tail, prefetch, rank, seed):
    def fresh() -> Loader:
        return Loader(numbered(rows, seed=seed), dp_rank=rank, dp_world=2, micro_batch=2, tail=tail, prefetch=prefetch)

    def ramp(consumed: int) -> int:
        return 1 if consumed < 7 else batch

    whole = fresh().steps(0, ramp)
    steps = list(islice(whole, stop + 5))
    whole.close()
    consumed = steps[stop - 1].consumed_after if stop else 0
    rest = fresh().steps(consumed, ramp)
    for expected, got in zip(steps[stop:], rest, strict=False):
        assert (expected.consumed_before, expected.rows, expected.dropped) == (got.consumed_before, got.rows, got.dropped)
        assert len(expected.micro) == len(got.micro) and all(map(same, expected.micro, got.micro))
    rest.close()


class Gradient:
    """A bag-of-two-tokens model in fp64: logits = embedding of the token plus that of its position, head tied."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(64, 6, dtype=torch.float64, generator=generator, requires_grad=True)

    def of(self, steps: list[StepData]) -> tuple[float, torch.Tensor]:
        """One step of all ranks: sum over targets divided by their global count."""
        self.weight.grad = None
        targets, total = sum(step.targets for step in steps), 0.0
        for batch in (batch for step in steps for batch in step.micro):
            hidden = self.weight[batch.tokens] + self.weight[batch.positions]
            loss = torch.nn.functional.cross_entropy(
                (hidden @ self.weight.T).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            (loss / targets).backward()
            total += float(loss.detach()) / targets
        assert self.weight.grad is not None
        return total, self.weight.grad


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_the_gradient_does_not_depend_on_the_split(world, micro):
    # Documents of unequal length, so that targets a row differ. Red (the loss by
    # 2%) when each rank divides by its own targets and the ranks are averaged.
    store = FakeStore([list(range(7, 7 + n)) for n in (1, 2, 9, 1, 1, 1, 5, 3, 17, 1, 1, 8)])
    dataset, _ = build_datasets(config(data={"seq_len": 6}), [store], [], Words())
    assert dataset.rows == 9
    model = Gradient()
    for consumed, rows in ((0, 7), (7, 2)):  # a full step and the ragged end of the epoch
        expected_loss, expected = model.of(take(Loader(dataset, micro_batch=rows), 1, 7, consumed))
        loaders = [Loader(dataset, dp_rank=r, dp_world=world, micro_batch=micro) for r in range(world)]
        loss, gradient = model.of([take(loader, 1, 7, consumed)[0] for loader in loaders])
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 30), limit=st.integers(0, 35), world=st.integers(1, 4), micro=st.integers(1, 5))
def test_evaluation_sees_every_row_once_in_equal_numbers_of_batches(rows, limit, world, micro):
    ranks = [list(Loader(numbered(rows), dp_rank=r, dp_world=world, micro_batch=micro).evaluate(limit)) for r in range(world)]
    total = min(limit, rows) if limit else rows
    assert [sample for batches in ranks for sample in samples_of(batches)] == list(range(total))
    assert len({len(batches) for batches in ranks}) == 1
    assert sum(batch.targets() for batches in ranks for batch in batches) == 3 * total


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), rows=st.integers(1, 4))
def test_document_boundaries(lengths, rows):
    store = FakeStore([range(length) for length in lengths])
    dataset, _ = build_datasets(config(data={"seq_len": 7}), [store], [], Words())
    [step] = take(Loader(dataset, micro_batch=rows), 1, batch=rows)
    batch = step.micro[0]
    cu = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32 and cu[0] == 0 and cu[-1] == 7 * rows
    assert len(cu) & (len(cu) - 1) == 0
    real = cu[: cu.index(7 * rows) + 1]
    assert real == sorted(set(real)) and set(cu[len(real) :]) <= {7 * rows} and len(cu) < 2 * len(real)
    flat, positions = batch.documents.flatten().tolist(), batch.positions.flatten().tolist()
    for start, stop in pairwise(real):
        assert start // 7 == (stop - 1) // 7 and len(set(flat[start:stop])) == 1
        assert positions[start:stop] == list(range(stop - start))
        assert start % 7 == 0 or flat[start - 1] != flat[start]


def test_boundaries_by_hand():
    documents = np.array([[0, 0, 1, -1], [0, 0, 0, 0], [-1, -1, -1, -1], [-1, -1, -1, -1]], dtype=np.int32)
    assert boundaries(documents).tolist() == [0, 2, 3, 4, 8, 12, 16, 16]
    assert boundaries(np.zeros((1, 5), np.int32)).tolist() == [0, 5]


def test_plain_rows_have_no_boundaries():
    dataset, _ = build_datasets(config(data={"document_mask": False}), [counting([30])], [], Words())
    [step] = take(Loader(dataset, micro_batch=2), 1, batch=2)
    assert step.micro[0].documents is None and step.micro[0].cu_seqlens is None and step.micro[0].positions is None


@pytest.mark.parametrize("prefetch", [1, 3, 100])
def test_made_ahead_or_not_is_the_same(prefetch):
    dataset = numbered(11)
    plain = take(Loader(dataset, micro_batch=2), 9, batch=5)
    ahead = take(Loader(dataset, micro_batch=2, prefetch=prefetch), 9, batch=5)
    for a, b in zip(plain, ahead, strict=True):
        assert (a.consumed_before, a.targets, a.tokens) == (b.consumed_before, b.targets, b.tokens)
        assert all(map(same, a.micro, b.micro)) and len(a.micro) == len(b.micro)
    assert [b.samples.tolist() for b in Loader(dataset, micro_batch=2, prefetch=prefetch).evaluate()] == [
        b.samples.tolist() for b in Loader(dataset, micro_batch=2).evaluate()
    ]
    assert not loader_threads()


class Watched:
    """A dataset that counts its rows, waits, or fails at one of them."""

    seq_len = 4

    def __init__(self, rows: int = 1000, fail_at: int = -1, seconds: float = 0.0):
        self.rows, self.fail_at, self.seconds, self.made = rows, fail_at, seconds, 0
        self._inner = numbered(rows)

    def row(self, sample: int):
        time.sleep(self.seconds)
        self.made += 1
        if sample == self.fail_at:
            raise DataError("shard 3 is cut short")
        return self._inner.row(sample)


def settle(dataset: Watched) -> int:
    before = -1
    while before != dataset.made:
        before = dataset.made
        time.sleep(0.05)
    return before


def test_no_more_is_made_ahead_than_asked_for():
    dataset = Watched()
    steps = Loader(dataset, micro_batch=2, prefetch=4).steps(0, lambda _: 4)
    next(steps)
    assert settle(dataset) in (8, 12)  # the step that was taken, and 4 micro-batches of 2 rows: two steps
    next(steps)
    assert settle(dataset) in (12, 16)
    steps.close()
    assert not loader_threads()


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_error_reaches_the_training_loop_as_it_is(prefetch):
    steps = Loader(Watched(fail_at=9), micro_batch=2, prefetch=prefetch).steps(0, lambda _: 4)
    assert [next(steps).consumed_before, next(steps).consumed_before] == [0, 4]
    with pytest.raises(DataError, match="shard 3 is cut short"):
        next(steps)
    assert next(steps, None) is None
    assert not loader_threads()


def test_closing_is_prompt_and_leaves_no_thread():
    loader = Loader(Watched(seconds=0.01), micro_batch=2, prefetch=4)
    iterators = [loader.steps(0, lambda _: 4), loader.evaluate()]
    for iterator in iterators:
        next(iterator)
    assert len(loader_threads()) == 2
    start = time.perf_counter()
    loader.close()
    assert time.perf_counter() - start < 0.5
    assert not loader_threads()
    assert all(next(iterator, None) is None for iterator in iterators)


def test_a_forgotten_iteration_ends_its_thread():
    steps = Loader(Watched(), micro_batch=2, prefetch=4).steps(0, lambda _: 4)
    next(steps)
    assert loader_threads()
    del steps
    gc.collect()
    assert not loader_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_for_an_accelerator_are_pinned_beside_the_right_device(monkeypatch, prefetch):
    # The current device belongs to a thread: pinning on a new thread would otherwise take memory on device 0 of all ranks.
    places: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    note = lambda what: places.append((what, threading.current_thread().name))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: note(f"device {index}"))
    monkeypatch.setattr(Batch, "pin", lambda batch: note("pin") or batch)
    batches = list(Loader(numbered(2), micro_batch=1, prefetch=prefetch).evaluate())
    assert len(batches) == 2
    here = threading.current_thread().name
    thread = "meshwright-loader"
    expected = [("device 3", thread), ("pin", thread), ("pin", thread)] if prefetch else [("pin", here)] * 2
    assert places == expected


def test_a_wrong_rank_is_our_own_mistake():
    for bad in ({"dp_rank": 2, "dp_world": 2}, {"dp_rank": -1}, {"micro_batch": 0}, {"prefetch": -1}, {"tail": "wrap"}):
        with pytest.raises(ValueError):
            Loader(numbered(3), **{"micro_batch": 1, **bad})
