"""Loaders of a user on several ranks: together they hand out what the plain DataLoader of one device does, batch by batch."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from meshwright.errors import DataError
from meshwright.runtime.batches import counted_split
from meshwright.runtime.preparing import are_loaders, as_given, loaders_of
from meshwright.runtime.user_loader import UserLoader
from tests.ranks.pool import joined


class Stream(IterableDataset):
    """Numbers 0 .. 10, dealt to its workers by itself, as a user's dataset does."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(11) if info is None else range(info.id, 11, info.num_workers))


class Uneven:
    """A user's own batch sampler: batches of 1, 2, 3, ... of the numbers below 11."""

    def __iter__(self) -> Iterator[list[int]]:
        left, size = list(range(11)), 1
        while left:
            yield left[:size]
            left, size = left[size:], size + 1

    def __len__(self) -> int:
        return 5


def draw(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labelled(rows: list[int]) -> dict[str, Any]:
    """A collate function of a user's own."""
    return {"x": torch.tensor(rows), "text": [str(row) for row in rows]}


def made(kind: str, rows: int = 11) -> Any:
    data = list(range(rows))
    weights = [1.0] * rows
    return {
        "in order": lambda: DataLoader(data, batch_size=4),
        "shuffled": lambda: DataLoader(data, batch_size=4, shuffle=True, generator=draw()),
        "weighted": lambda: DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(weights, rows, generator=draw())),
        "own batches": lambda: DataLoader(data, batch_sampler=Uneven()),
        "own collate": lambda: DataLoader(data, batch_size=4, shuffle=True, generator=draw(), collate_fn=labelled),
        "without the rest": lambda: DataLoader(data, batch_size=4, drop_last=True),
        "workers": lambda: DataLoader(data, batch_size=4, shuffle=True, generator=draw(), num_workers=2),
        "workers that live on": lambda: DataLoader(
            data, batch_size=4, shuffle=True, generator=draw(), num_workers=1, persistent_workers=True
        ),
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "stream, no rest": lambda: DataLoader(Stream(), batch_size=4, drop_last=True),
        "stream, workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
        "ready made": lambda: [torch.arange(i, min(i + 4, rows)) for i in range(0, rows, 4)],
        "a sample a batch": lambda: DataLoader([torch.arange(i, min(i + 4, 11)) for i in range(0, 11, 4)], batch_size=None),
    }[kind]()


SLOW = pytest.mark.slow
"""Workers of a rank of the pool take seconds to end; tests/e2e/test_script.py has some of a real script."""
KINDS = (
    "in order", "shuffled", "weighted", "own batches", "own collate", "without the rest", "workers", "stream",
    "stream, no rest", "stream, workers", "ready made", "a sample a batch",
)  # fmt: skip


def ids(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        assert batch["text"] == [str(row) for row in batch["x"].tolist()]
        batch = batch["x"]
    return batch.tolist()


def ends_workers(job: Callable[..., Any]) -> Callable[..., Any]:
    """A job of a rank, after which the rank has no processes. Workers that live on go with their loader, which refers to
    itself; a rank that is killed before would leave them behind: a server of forks, not the rank, is their parent.
    Mutation tried: no collection."""

    @wraps(job)
    def whole(*args: Any, **options: Any) -> Any:
        found = job(*args, **options)
        gc.collect()
        assert not multiprocessing.active_children()
        return found

    return whole


@ends_workers
def dealt(
    kind: str, mode: str, epochs: int, rows: int = 11, stop: int | None = None
) -> list[list[tuple[list[int], bool, bool]]]:
    """(rows, whether they count, whether it is the last) of every batch of every epoch on this rank."""
    ranks = joined()
    loader = UserLoader(made(kind, rows), ranks=ranks, place=ranks.rank, ways=ranks.size, mode=mode)
    out = []
    for _ in range(epochs):
        seen = []
        for batch in loader:
            assert loader.stands_in(batch) == loader.share.empty
            seen.append((ids(batch), not loader.share.empty, loader.share.last))
            assert loader.share.empty or loader.share.rows == len(seen[-1][0])
        out.append(seen)
    return out


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW if "workers" in kind else ()) for kind in KINDS])
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_together_have_the_batches_of_one_device(ranks, world: int, kind: str):
    """Mutations tried: a share that begins one later; a stand-in that counts; the seed of workers not drawn ("shuffled")."""
    plain = made(kind)
    expected = [[sorted(ids(batch)) for batch in plain] for _ in range(2)]
    found = ranks(world).run(dealt, kind, "global", 2)
    for epoch in range(2):
        steps = [rank[epoch] for rank in found]
        assert {len(each) for each in steps} == {len(expected[epoch])}
        for number, whole in enumerate(expected[epoch]):
            parts = [rows for rows, counts, _ in (rank[number] for rank in steps) if counts]
            assert sorted(row for part in parts for row in part) == whole
            assert all(rank[number][0] for rank in steps)  # also one without rows of its own can run a batch
            assert {rank[number][2] for rank in steps} == {number == len(expected[epoch]) - 1}


@pytest.mark.parametrize("kind", ["shuffled", "own batches", "stream", "ready made"])
def test_batches_a_rank_are_those_of_the_script_and_every_row_comes_once(ranks, kind: str):
    plain = [ids(batch) for batch in made(kind)]
    found = ranks(2).run(dealt, kind, "rank", 1)
    rows = sorted(row for rank in found for part, counts, _ in rank[0] if counts for row in part)
    assert rows == sorted(row for batch in plain for row in batch)
    assert {len(rank[0]) for rank in found} == {-(-len(plain) // 2)}
    if kind != "stream":
        assert [rank[0][0][0] for rank in found] == plain[:2]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9])
def test_all_ranks_have_the_same_number_of_batches(ranks, rows: int):
    for mode in ("global", "rank"):
        found = ranks(2).run(dealt, "in order", mode, 1, rows)
        assert len({len(rank[0]) for rank in found}) == 1
        assert sum(len(part) for rank in found for part, counts, _ in rank[0] if counts) == rows


@ends_workers
def resumed(kind: str, stop: int) -> list[list[int]]:
    """An epoch and a half, saved after `stop` batches of the second, and what another loader makes of that state."""
    ranks = joined()
    options = {"ranks": ranks, "place": ranks.rank, "ways": ranks.size}
    first = UserLoader(made(kind), **options)
    list(first)
    state = None
    for number, _ in enumerate(first):
        if number + 1 == stop:
            state = first.state()
            break
    assert state is not None
    second = UserLoader(made(kind), **options)
    second.load(state)
    return [ids(batch) for batch in second] + [ids(batch) for batch in second]


@pytest.mark.parametrize("kind", ["shuffled", "in order", "stream", "ready made", pytest.param("workers", marks=SLOW)])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(ranks, kind: str):
    """On two ranks, and the same batches on one. Mutation tried: the generator's state not taken ("shuffled")."""
    epochs = ranks(2).run(dealt, kind, "global", 3)
    for rank, left in enumerate(ranks(2).run(resumed, kind, 2)):
        expected = [rows for rows, _, _ in epochs[rank][1][2:] + epochs[rank][2]]
        assert left == expected


@ends_workers
def between(kind: str) -> list[list[int]]:
    """An epoch, saved when it is over, and what another loader makes of that state."""
    ranks = joined()
    options = {"ranks": ranks, "place": ranks.rank, "ways": ranks.size}
    first = UserLoader(made(kind), **options)
    list(first)
    second = UserLoader(made(kind), **options)
    second.load(first.state())
    return [ids(batch) for batch in second] + [ids(batch) for batch in second]


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "in order", pytest.param("workers that live on", marks=SLOW)])
def test_a_loader_that_was_saved_between_epochs_goes_on_with_the_order_of_the_next(ranks, kind: str):
    """Mutation tried: the generator noted when an epoch begins only ("shuffled": the finished epoch again)."""
    epochs = ranks(2).run(dealt, kind, "global", 3)
    for rank, left in enumerate(ranks(2).run(between, kind)):
        assert left == [rows for rows, _, _ in epochs[rank][1] + epochs[rank][2]]


@SLOW
def test_workers_that_live_on_draw_their_seed_once(ranks):
    """Epoch after epoch the order of the plain DataLoader. Mutation tried: a seed drawn in every epoch."""
    plain = made("workers that live on")
    epochs = [[ids(batch) for batch in plain] for _ in range(3)]
    found = ranks(2).run(dealt, "workers that live on", "global", 3)
    together = [
        [[row for rows, _, _ in step for row in rows] for step in zip(*each, strict=True)] for each in zip(*found, strict=True)
    ]
    assert together == epochs


def ordered(sampler: str) -> list[list[int]]:
    """Two epochs of a sampler of torch that was given no generator, on ranks that have drawn as many numbers as they are."""
    ranks = joined()
    torch.rand(ranks.size + ranks.rank)
    kinds = {"subset": SubsetRandomSampler(range(11)), "weighted": WeightedRandomSampler([1.0] * 11, 11)}
    loader = DataLoader(list(range(11)), batch_size=4, sampler=kinds[sampler])
    dealt = UserLoader(loader, ranks=ranks, place=ranks.rank, ways=ranks.size, seed=3)
    return [ids(batch) for _ in range(2) for batch in dealt]


@pytest.mark.parametrize("sampler", ["subset", "weighted"])
def test_a_random_sampler_without_a_generator_is_ordered_by_the_seed_of_the_run(ranks, sampler: str):
    """Mutation tried: RandomSampler alone gets a generator."""
    first, second = ranks(2).run(ordered, sampler), ranks(1).run(ordered, sampler)
    assert [[row for rows in step for row in rows] for step in zip(*first, strict=True)] == second[0]


@pytest.mark.parametrize("text", [torch.zeros(2), {"x": torch.zeros(2)}, (torch.zeros(2), "a"), ["a", "b"], "ab"])
def test_a_list_of_batches_is_one_loader_and_a_list_of_loaders_is_several(text: Any):
    """Mutation tried: everything that can be iterated taken for a loader."""
    batches, loader = [text, text], DataLoader([1, 2])
    assert loaders_of(batches) == [batches] and as_given(batches, ["made"], several=are_loaders(batches)) == "made"
    assert loaders_of((loader, loader)) == [loader, loader] == loaders_of({"a": loader, "b": loader})
    assert loaders_of(loader) == [loader] and loaders_of(None) == [] and loaders_of([]) == [[]]


def wrong_split() -> list[str]:
    ranks, said = joined(), []
    for parts in (1, 3):
        cut = counted_split(lambda batch, ways, parts=parts: [batch] * parts)
        try:
            list(UserLoader([torch.zeros(4)], ranks=ranks, place=ranks.rank, ways=ranks.size, split=cut))
        except DataError as error:
            said.append(str(error))
    return said


def test_a_split_that_returns_another_number_is_refused_with_both(ranks):
    assert ["1 batches, and 2" in text or "3 batches, and 2" in text for text in ranks(2).run(wrong_split)[0]] == [True, True]


def wrong_sampler() -> str:
    ranks = joined()
    data = list(range(8))
    sampler = DistributedSampler(data, num_replicas=8, rank=3)
    try:
        UserLoader(DataLoader(data, sampler=sampler), ranks=ranks, place=ranks.rank, ways=ranks.size)
    except DataError as error:
        return str(error)
    return ""


def with_sampler() -> list[int]:
    ranks = joined()
    data = list(range(8))
    sampler = DistributedSampler(data, num_replicas=ranks.size, rank=ranks.rank, shuffle=True)
    loader = UserLoader(DataLoader(data, batch_size=2, sampler=sampler), ranks=ranks, place=ranks.rank, ways=ranks.size)
    loader.set_epoch(5)
    seen = [row for batch in loader for row in batch.tolist()]
    assert sampler.epoch == 5 and len(loader) == 2
    return seen


def test_a_distributed_sampler_is_left_as_it_is(ranks):
    assert sorted(row for rank in ranks(2).run(with_sampler) for row in rank) == list(range(8))
    assert "rank 3 of 8" in ranks(2).run(wrong_sampler)[0]
