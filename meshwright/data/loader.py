"""From samples to the micro-batches of each data rank, made ahead on a background thread.

Legend: B rows of a micro-batch, S tokens a row, N documents of a micro-batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from meshwright.data.batch import IGNORE, Batch
from meshwright.data.dataset import Block, Dataset, block_of
from meshwright.data.order import step_span

__all__ = ["Loader", "StepData", "boundaries"]

T = TypeVar("T")


@dataclass(frozen=True)
class StepData:
    """What one data rank computes in one optimizer step.

    consumed_before: sample number of the step's first row, after any rows that were dropped
    rows: samples of the step over all ranks        local_rows: of this rank
    micro: micro-batches, as many on every rank     dropped: rows of the epoch's end left out before this step
    targets, tokens: of this rank: positions that count in the loss, tokens that are no padding
    """

    consumed_before: int
    rows: int
    micro: list[Batch]
    targets: int
    tokens: int
    local_rows: int
    dropped: int = 0

    @property
    def consumed_after(self) -> int:
        return self.consumed_before + self.rows


class Loader:
    """Deals the samples of a dataset to the data ranks.

    Of the rows of a step, rank r takes the r-th contiguous slice of ceil(rows / dp_world); each slice is cut into
    micro-batches of `micro_batch` rows. What is missing at the end is filled with rows that weigh zero (sample -1, no
    target, every token padding), so that all ranks run the same number of forwards on the same shapes.

    prefetch: micro-batches made ahead (whole steps, at least one); 0 makes each when it is asked for. Both give the same.
    tail: "step" ends an epoch with a smaller step, "drop" skips its ragged end and counts it.
    """

    def __init__(
        self, dataset: Dataset, *, dp_rank: int = 0, dp_world: int = 1, micro_batch: int, prefetch: int = 0, tail: str = "step"
    ):
        if not 0 <= dp_rank < dp_world or micro_batch < 1 or prefetch < 0 or tail not in ("step", "drop"):
            raise ValueError(f"rank {dp_rank} of {dp_world}, micro-batch {micro_batch}, prefetch {prefetch}, tail {tail!r}")
        self.dataset = dataset
        self.dp_rank, self.dp_world = dp_rank, dp_world
        self.micro_batch, self.prefetch, self.tail = micro_batch, prefetch, tail
        self._pin = torch.accelerator.is_available()
        self._blank: Block | None = None
        self._running: set[_Ahead[Any]] = set()

    def steps(self, consumed: int, batch_at: Callable[[int], int]) -> Iterator[StepData]:
        """Steps without end, from `consumed` samples on; `batch_at(consumed)` is the global batch in rows.

        From any position it gives what an iteration from 0 would give there. Errors of the background thread are raised
        by `next` as they are.
        """
        return self._run(self._steps(consumed, batch_at), lambda step: len(step.micro))

    def evaluate(self, rows: int = 0) -> Iterator[Batch]:
        """Samples 0 .. rows - 1 (0: one epoch), each on exactly one rank, as many batches on every rank."""
        total = min(rows, self.dataset.rows) if rows else self.dataset.rows
        return self._run((batch for batch, _, _ in self._share(0, total)), lambda batch: 1)

    def close(self) -> None:
        """End the background threads of all iterations; those end as well."""
        for ahead in list(self._running):
            ahead.close()

    def _steps(self, consumed: int, batch_at: Callable[[int], int]) -> Iterator[StepData]:
        while True:
            span = step_span(consumed, batch_at, self.dataset.rows, self.tail)
            parts = list(self._share(span.start, span.rows))
            yield StepData(
                consumed_before=span.start,
                rows=span.rows,
                micro=[batch for batch, _, _ in parts],
                targets=sum(batch.targets() for batch, _, _ in parts),
                tokens=sum(tokens for _, tokens, _ in parts),
                local_rows=sum(count for _, _, count in parts),
                dropped=span.dropped,
            )
            consumed = span.stop

    def _share(self, start: int, rows: int) -> Iterator[tuple[Batch, int, int]]:
        """This rank's micro-batches of the samples start .. start + rows - 1, with their tokens and real rows."""
        share = -(-rows // self.dp_world)
        first = start + min(rows, share * self.dp_rank)
        last = start + min(rows, share * (self.dp_rank + 1))
        for begin in range(first, first + share, self.micro_batch):
            yield self._collate(range(begin, min(begin + self.micro_batch, last)))

    def _collate(self, samples: range) -> tuple[Batch, int, int]:
        count = len(samples)
        blocks = [block_of(self.dataset, samples)] if count else []
        if count < self.micro_batch:
            blocks += [self._padding()] * (self.micro_batch - count)
        block = blocks[0] if len(blocks) == 1 else Block.joined(blocks)
        numbers = np.full(self.micro_batch, -1, dtype=np.int64)
        numbers[:count] = samples
        batch = Batch(
            tokens=torch.from_numpy(block.tokens),
            labels=torch.from_numpy(block.labels),
            samples=torch.from_numpy(numbers),
            documents=_tensor(block.documents),
            positions=_tensor(block.positions),
            cu_seqlens=_tensor(None if block.documents is None else boundaries(block.documents)),
            select=_tensor(block.select),
        )
        return batch.pin() if self._pin else batch, int(block.lengths.sum()), count

    def _padding(self) -> Block:
        """A row that weighs zero, of the same fields and shapes as a real one."""
        if self._blank is None:
            row = block_of(self.dataset, range(1))
            self._blank = replace(
                row,
                tokens=np.zeros_like(row.tokens),
                labels=np.full_like(row.labels, IGNORE),
                lengths=np.zeros_like(row.lengths),
                documents=None if row.documents is None else np.full_like(row.documents, -1),
                positions=None if row.positions is None else np.arange(row.positions.size)[None],
                select=None if row.select is None else np.zeros_like(row.select),
            )
        return self._blank

    def _run(self, source: Iterator[T], weigh: Callable[[T], int]) -> Iterator[T]:
        if not self.prefetch:
            yield from source
            return
        ahead = _Ahead(source, self.prefetch, weigh, torch.accelerator.current_device_index() if self._pin else None)
        self._running.add(ahead)
        try:
            yield from ahead
        finally:
            ahead.close()
            self._running.discard(ahead)


class _Ahead(Generic[T]):
    """Items of an iterator, made on a thread of its own while fewer than `limit` (weighed by `weigh`) wait to be taken."""

    def __init__(self, source: Iterator[T], limit: int, weigh: Callable[[T], int], device: int | None):
        self._source, self._limit, self._weigh, self._device = source, limit, weigh, device
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._waiting = 0
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="meshwright-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._closed:
                raise StopIteration
            if self._items:
                item = self._items.popleft()
                self._waiting -= self._weigh(item)
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread and forget what it made. It stops after the item that it is making."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # garbage collection may close an iteration from anywhere
            self._thread.join()

    def _fill(self) -> None:
        try:
            if self._device is not None:  # a new thread starts on device 0, and pinning there would take memory on it
                torch.accelerator.set_device_index(self._device)
            for item in self._source:
                with self._changed:
                    self._items.append(item)
                    self._waiting += self._weigh(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._waiting < self._limit)
                    if self._closed:
                        return
        except BaseException as error:  # handed to the consumer, whatever it is
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def boundaries(documents: np.ndarray) -> np.ndarray:
    """int32 [B, S] document indices -> int32 cumulative lengths of the documents over the B * S flattened tokens.

    Each row starts a new one, and a run of padding counts as one. Filled with B * S up to a power of two entries, so that
    few different shapes occur (empty documents at the end, which varlen attention passes over).
    """
    first = np.empty(documents.shape, dtype=bool)
    first[:, 0] = True
    np.not_equal(documents[:, 1:], documents[:, :-1], out=first[:, 1:])
    starts = np.flatnonzero(first)
    out = np.full(1 << int(starts.size).bit_length(), documents.size, dtype=np.int32)
    out[: starts.size] = starts
    return out


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)
