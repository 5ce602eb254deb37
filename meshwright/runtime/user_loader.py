"""A user's loader, dealt to the data ranks: every rank gets its own rows, and the same number of batches.

    map-style dataset     the batches of indices that one device would have drawn, each cut into contiguous shares
    iterable dataset      every rank reads the stream and keeps each `ways`-th sample of a batch, also inside workers
    anything else         batches that come ready made are cut by rows
    DistributedSampler    has dealt already: left as it is

The global batch is the one of the script ("global"), or every rank gets one of that size ("rank"). Where a batch has fewer rows
than there are ranks, a rank without one gets a row of another as a stand-in that weighs nothing, so that all take part.

Indices come from rank 0, which draws them exactly as the user's loader would, whatever its sampler is, a few batches ahead. A
random sampler without a generator gets one that is seeded by the run, since what one rank draws elsewhere (dropout) must not
decide about the order of all.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from meshwright.distributed.reduce import broadcast_json
from meshwright.distributed.world import Ranks
from meshwright.errors import DataError, Finding
from meshwright.runtime.batches import Split, move, rows_of, share, split_rows

__all__ = ["Share", "UserLoader"]

AHEAD = 64
"""Batches of indices that are sent to the ranks at once."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """rows: of this rank in the present batch; None where it is not known. empty: they stand in for none. last: of the epoch.
    most: rows of the rank that has most; None where it is not known."""

    rows: int | None
    empty: bool = False
    last: bool = False
    most: int | None = None


@dataclass
class _Position:
    """epoch: begun so far. batch: handed out of it. random: state of the sampler's generator when the epoch began, as hex.
    seeded: whether workers that live on have had their seed by then, which a loader draws from the same generator."""

    epoch: int = 0
    batch: int = 0
    random: str = ""
    seeded: bool = False


class UserLoader:
    """Iterate it once an epoch. place of ways: this rank among those that see different samples. mode: "global" or "rank".

    `share` describes the batch that was handed out last. Raises DataError for loaders that cannot be dealt.
    """

    def __init__(
        self,
        loader: Any,
        *,
        ranks: Ranks,
        place: int,
        ways: int,
        mode: str = "global",
        seed: int = 0,
        split: Split = split_rows,
    ):
        self.loader = loader
        self.share = Share(None)
        self.handed = 0
        """When the last batch was, in ns of a clock."""
        self._ranks, self._place, self._ways, self._mode, self._split = ranks, place, ways, mode, split
        self._at = _Position()
        self._skip = 0
        self._next_epoch: int | None = None
        self._ready: deque[Share] = deque()
        self._generator: torch.Generator | None = None
        """Of the sampler, where it has one."""
        self._stand_ins: dict[int, Any] = {}
        self._made = self._source(seed)

    # ---- what a script uses

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        stream = self._stream()
        for batch, mine in stream:
            self.share, self.handed = mine, time.monotonic_ns()
            self._at.batch += 1
            batch = move(batch, self._ranks.device)
            if mine.empty:
                self._stand_ins = {id(batch): batch}  # kept, so that no other batch gets its id
            yield batch
        self._at.batch = 0
        self._at.epoch += 1
        self._note_order()  # a run that is saved now goes on with the order of the next epoch

    def __len__(self) -> int:
        """Batches an epoch on each rank."""
        total = len(self.loader)
        return total if self._mode == "global" or self._dealt else -(-total // self._ways)

    def set_epoch(self, epoch: int) -> None:
        """For the next iteration; sampler and dataset are told, where they listen."""
        self._next_epoch = epoch

    def stands_in(self, batch: Any) -> bool:
        """Whether this batch is a stand-in for no rows."""
        return id(batch) in self._stand_ins and self._stand_ins[id(batch)] is batch

    def close(self) -> None:
        self._stand_ins = {}

    # ---- going on where a run was

    def state(self) -> dict[str, Any]:
        """JSON values; a loader with the same data goes on from there on any number of ranks."""
        return {"epoch": self._at.epoch, "batch": self._at.batch, "random": self._at.random, "seeded": self._at.seeded}

    def load(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the batches that had been handed out."""
        self._at = _Position(int(state["epoch"]), 0, str(state["random"]), bool(state.get("seeded", False)))
        self._next_epoch, self._skip = self._at.epoch, int(state["batch"])
        if self._generator is not None and self._at.random:
            self._generator.set_state(torch.frombuffer(bytearray.fromhex(self._at.random), dtype=torch.uint8).clone())
        if isinstance(self._made, _Deal):
            self._made.seeded = self._at.seeded

    # ---- the parts

    @property
    def _dealt(self) -> bool:
        """Whether the loader's own sampler deals to ranks."""
        return isinstance(getattr(self.loader, "sampler", None), DistributedSampler)

    def _begin(self) -> None:
        skip, self._skip = self._skip, 0
        if self._next_epoch is not None:
            self._at.epoch, self._next_epoch = self._next_epoch, None
        self._at.batch = skip
        self._ready.clear()
        for listener in (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler", "dataset")):
            told = getattr(listener, "set_epoch", None)
            if told is not None:
                told(self._at.epoch)
        self._note_order()
        if isinstance(self._made, _Deal):
            self._made.skip = skip

    def _note_order(self) -> None:
        """The sampler's generator as it is."""
        if self._generator is not None:
            self._at.random = bytes(self._generator.get_state().numpy().tobytes()).hex()
        if isinstance(self._made, _Deal):
            self._at.seeded = self._made.seeded

    def _source(self, seed: int) -> Any:
        """What is iterated: a loader over the dealt indices or samples, or the user's own."""
        loader = self.loader
        if not isinstance(loader, DataLoader):
            return loader
        if self._dealt:
            self._check_sampler(loader.sampler)
            return loader
        if isinstance(loader.dataset, IterableDataset):
            return _rebuilt_stream(loader, self._place, self._ways, self._mode, seed) if loader.batch_size else loader
        if loader.batch_sampler is None and self._mode == "global" and self._ways > 1:
            return loader  # each sample is a batch, which is cut by rows
        self._generator = _generator_of(loader, seed)
        return _Deal(self, loader, seed)

    def _check_sampler(self, sampler: Any) -> None:
        if (sampler.num_replicas, sampler.rank) != (self._ways, self._place):
            what = f"is for rank {sampler.rank} of {sampler.num_replicas}; this is data rank {self._place} of {self._ways}"
            raise DataError(findings=[Finding("DistributedSampler", what, "Leave it out: the loader is dealt here")])

    def _stream(self) -> Iterator[tuple[Any, Share]]:
        made, skip = self._made, self._at.batch
        if isinstance(made, _Deal):
            return made.batches()
        if self._dealt:
            return ((batch, Share(rows_of(batch), last=last)) for batch, last in _ahead(itertools.islice(made, skip, None)))
        if isinstance(made, DataLoader) and isinstance(made.dataset, _Strided):
            return _shares(itertools.islice(made, skip, None))
        if self._mode == "rank":
            return self._turns(itertools.islice(made, skip * self._ways, None))
        return self._pieces(itertools.islice(made, skip, None))

    def _pieces(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Share]]:
        """Every batch cut by rows."""
        for batch, last in _ahead(batches):
            if self._ways == 1:
                yield batch, Share(rows_of(batch), last=last, most=rows_of(batch))
                continue
            parts = self._split(batch, self._ways)
            mine = parts[self._place]
            rows = rows_of(mine)
            empty = rows == 0
            most = rows_of(parts[0])
            yield (parts[0] if empty else mine), Share(0 if empty else rows, empty, last, most)

    def _turns(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Share]]:
        """Batch after batch, one to each rank; ranks for which none is left stand in with the last one."""
        for group, last in _ahead(_grouped(batches, self._ways)):
            empty = self._place >= len(group)
            mine = group[-1] if empty else group[self._place]
            yield mine, Share(0 if empty else rows_of(mine), empty, last)


def _grouped(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


def _ahead(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item, and whether it is the last."""
    iterator = iter(items)
    for held in iterator:
        for following in iterator:
            yield held, False
            held = following
        yield held, True


def _shares(stepped: Iterable[Any]) -> Iterator[tuple[Any, Share]]:
    for (batch, mine, most), last in _ahead(stepped):
        yield batch, Share(mine, mine == 0, last, most)


def _generator_of(loader: DataLoader, seed: int) -> torch.Generator | None:
    """Of the sampler behind a loader; a random sampler of torch gets one where it has none."""
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(seed)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _options(loader: DataLoader, seed: int) -> dict[str, Any]:
    """Of a loader with the same workers. Their own seeds come from a generator of ours: the user's decides the order."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": torch.Generator().manual_seed(seed),
    }
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return options


# ---- map-style datasets


@dataclass
class _Deal:
    """This rank's indices, batch after batch: the batch sampler of a loader that is the user's otherwise. seeded: whether the
    loader of one device would have drawn the seed of its workers, which those that live on get once."""

    owner: UserLoader
    original: DataLoader
    seed: int
    skip: int = 0
    seeded: bool = False
    made: DataLoader = field(init=False)

    def __post_init__(self) -> None:
        options = _options(self.original, self.seed + self.owner._place)
        if self.original.batch_sampler is None:  # a sample is a batch
            options |= {"sampler": self, "batch_size": None}
        else:
            options |= {"batch_sampler": self}
        self.made = DataLoader(self.original.dataset, collate_fn=self.original.collate_fn, **options)

    def __len__(self) -> int:
        return len(self.owner)

    def batches(self) -> Iterator[tuple[Any, Share]]:
        for batch in self.made:
            yield batch, self.owner._ready.popleft()

    def __iter__(self) -> Iterator[Any]:
        owner = self.owner
        steps = self._groups() if owner._mode == "rank" else ([batch] for batch in self._drawn())
        for group, last in _ahead(itertools.islice(steps, self.skip, None)):
            indices, mine = self._mine(group)
            owner._ready.append(Share(mine.rows, mine.empty, last, mine.most))
            yield indices if self.original.batch_sampler is not None else indices[0]

    def _groups(self) -> Iterator[list[list[Any]]]:
        return _grouped(self._drawn(), self.owner._ways)

    def _mine(self, group: list[list[Any]]) -> tuple[list[Any], Share]:
        place, ways = self.owner._place, self.owner._ways
        if self.owner._mode == "rank" and (len(group) == ways or self.original.batch_sampler is None):
            empty = place >= len(group)
            mine = group[-1] if empty else group[place]
            return mine, Share(0 if empty else len(mine), empty, most=max(map(len, group)))
        whole = [index for batch in group for index in batch]
        first, last = share(len(whole), ways, place)
        most = share(len(whole), ways, 0)[1]
        return (whole[first:last], Share(last - first, most=most)) if last > first else (whole[:1], Share(0, True, most=most))

    def _drawn(self) -> Iterator[list[Any]]:
        """The user's batches of indices, as one device would draw them; drawn on rank 0."""
        ranks = self.owner._ranks
        alone = ranks.size == 1
        source = self._draw() if ranks.rank == 0 else iter(())
        while True:
            chunk = [_plain(batch) for batch in itertools.islice(source, AHEAD)]
            if not alone:
                chunk = broadcast_json(chunk, ranks.control)
            if not chunk:
                return
            yield from (list(map(_hashable, batch)) for batch in chunk)

    def _draw(self) -> Iterator[Any]:
        original = self.original
        if original.generator is not None and not (self.seeded and original.persistent_workers):
            torch.empty((), dtype=torch.int64).random_(generator=original.generator)  # a loader draws its workers' seed first
        self.seeded = True
        source = original.batch_sampler
        return iter(source) if source is not None else ([index] for index in original.sampler)


def _plain(batch: Any) -> list[Any]:
    """Indices as JSON: torch's and numpy's numbers as Python's own."""
    return [index.item() if hasattr(index, "item") else index for index in batch]


def _hashable(index: Any) -> Any:
    return tuple(map(_hashable, index)) if isinstance(index, list) else index


# ---- iterable datasets


class _Strided(IterableDataset, Generic[Item]):
    """Collated shares of the batches of a stream: (batch, rows of this rank, most rows of a rank)."""

    def __init__(self, loader: DataLoader, place: int, ways: int, size: int):
        super().__init__()
        self.dataset, self.collate, self.drop = loader.dataset, loader.collate_fn, loader.drop_last
        self.place, self.ways, self.size = place, ways, size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        stream = iter(self.dataset)
        while True:
            mine: list[Any] = []
            first, total = None, 0
            for sample in itertools.islice(stream, self.size):
                first = sample if total == 0 else first
                if total % self.ways == self.place:
                    mine.append(sample)
                total += 1
            if not total or (self.drop and total < self.size):
                return
            yield self.collate(mine or [first]), len(mine), -(-total // self.ways)


def _rebuilt_stream(loader: DataLoader, place: int, ways: int, mode: str, seed: int) -> DataLoader:
    size = (loader.batch_size or 1) * (ways if mode == "rank" else 1)
    strided: _Strided[Any] = _Strided(loader, place, ways, size)
    return DataLoader(strided, batch_size=None, collate_fn=_as_it_is, **_options(loader, seed))


def _as_it_is(item: Any) -> Any:
    return item
