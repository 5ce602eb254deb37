"""What crosses the slow axis: sums over the replicas, whole, rounded to bf16, or as matrices of low rank (PowerSGD).

A `Reducer` replaces, in place, the values of a range or bucket by their sum over the replicas (`dp_replicate`), in one message
or two. With R replicas and n values of g bytes a rank sends

    whole      2 (R-1)/R g n    one all-reduce
    bf16       2 (R-1)/R 2 n    Each replica rounds its values to bf16 and sends piece r of them to replica r, which adds what
                                came in fp32 (fp64 stays fp64) in the order of the replicas, rounds the sum to bf16 once more
                                and gives it to all. An all-reduce in bf16 would round after every addition.
    PowerSGD   2 (R-1)/R g (rank * (rows + columns) a matrix, and the rest)

PowerSGD (arXiv:1905.13727, algorithm 1), of a matrix M[r] on replica r, with the error E[r] that it has kept and a Q that all
have in common:

    M[r] += E[r];   P = orthonormal columns of sum over r of M[r] Q;   Q[r] = M[r]' P;   E[r] = M[r] - P Q[r]'
    sum = P (sum over r of Q[r])';   Q = orthonormal columns of sum over r of Q[r]

Q starts from (seed, name, block) and is kept from step to step, E starts at zero and is kept in the units of a loss without its
scale. A matrix is what a rank holds of a parameter in one block of consecutive rows, later dimensions taken together: a
parameter that ZeRO or tensor parallelism cuts is several. What would not become smaller, vectors for example, is sent whole.
So is a gradient that is only a rank's share of one (`Placement.shared`), which is no gradient yet: whatever is sent.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshwright.compat import all_gather_single
from meshwright.config.schema import SyncConfig
from meshwright.distributed.piece import Piece, flat_pieces
from meshwright.parallel.buffers import Run, local_pieces, master_dtype
from meshwright.spec.slow_links import low_rank

__all__ = ["Flight", "LowRank", "Queue", "Reducer", "Rounded", "lifted", "make_reducer"]

LAG = 2
"""Gradients under way in their first message before the oldest goes on to its second."""


class Key(Protocol):
    """A bucket of gradients, or a range of weights: what is reduced together."""

    def runs(self) -> Iterator[Run]: ...


class Flight:
    """A reduction under way. Each message is started by the one who waits for the message before."""

    def __init__(self, messages: Iterator[dist.Work | None]):
        self._messages = messages
        self._work = next(messages, None)

    def advance(self) -> None:
        """Waits for the present message and starts the next one."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._messages, None)

    def wait(self) -> None:
        """Until the sum is there."""
        while self._work is not None:
            self.advance()


class Reducer:
    """Sums values over the replicas as they are. group: one rank a replica. Every rank of it starts the same keys in the same
    order, and advances and waits for them in the same order."""

    messages = 1
    """At most so many one after another, for a key."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.scale = 1.0
        """Loss scale that the values carry."""

    def start(self, key: Key, values: torch.Tensor) -> Flight:
        """values: 1-d, of the key; they become the sum. The flight must be waited for."""
        return Flight(self._run(key, values))

    def settle(self, skip: torch.Tensor | bool) -> None:
        """After an update. skip: the sums were not used, since they were not finite."""

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of what is sent as low rank."""
        return []

    def pieces(self) -> list[Piece]:
        """What a checkpoint keeps, as live views."""
        return []

    def _run(self, key: Key, values: torch.Tensor) -> Iterator[dist.Work | None]:
        yield dist.all_reduce(values, group=self.group, async_op=True)


class Rounded(Reducer):
    """Sums of values rounded to bf16, rounded. Several gradients may be on their way at once: see `LAG`."""

    messages = 2

    def __init__(self, group: dist.ProcessGroup, whole: Callable[[Any], bool] = lambda key: False):
        """whole: whether a key is sent as it is."""
        super().__init__(group)
        self._whole = whole

    def _run(self, key: Key, values: torch.Tensor) -> Iterator[dist.Work | None]:
        if self._whole(key):
            yield from super()._run(key, values)
            return
        ways = self.group.size()
        piece = -(-values.numel() // ways)
        sent = torch.zeros(ways * piece, dtype=torch.bfloat16, device=values.device)
        sent[: values.numel()].copy_(values)
        came = torch.empty_like(sent)
        yield dist.all_to_all_single(came, sent, group=self.group, async_op=True)
        rows = came.view(ways, piece)
        total = rows[0].to(values.dtype)
        for row in rows[1:]:
            total += row
        yield all_gather_single(sent, total.to(torch.bfloat16), group=self.group, async_op=True)
        values.copy_(sent[: values.numel()])


@dataclass(eq=False)
class _Matrix:
    """Elements [start, start + rows * columns) of a key. error: [rows, columns], this replica's own. q: [columns, rank]."""

    name: str
    start: int
    rows: int
    columns: int
    error: torch.Tensor
    q: torch.Tensor
    first: torch.Tensor
    """q at the last update."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(eq=False)
class _Content:
    """What lies in a key: matrices, and (start, stop) of what is sent whole; gaps between parameters are left out."""

    matrices: list[_Matrix]
    rest: list[tuple[int, int]]


class LowRank(Reducer):
    """PowerSGD, see the text above. keys: all that will be started. whole: whether a key is sent as it is."""

    messages = 2

    def __init__(
        self,
        group: dist.ProcessGroup,
        keys: Sequence[Any],
        *,
        rank: int,
        seed: int,
        device: torch.device,
        whole: Callable[[Any], bool] = lambda key: False,
    ):
        super().__init__(group)
        self.rank, self.seed, self.device = rank, seed, device
        self._errors: list[tuple[Run, torch.Tensor]] = []
        self._contents = {id(key): self._content(key) for key in keys if not whole(key)}

    def matrices(self) -> list[tuple[int, int]]:
        return [(matrix.rows, matrix.columns) for matrix in self._all()]

    def pieces(self) -> list[Piece]:
        """The errors (`replica/error/`, see `lifted`) and Q (`low_rank/`, with the block in its name)."""
        found = []
        for run, error in self._errors:
            mine = local_pieces("replica/error", run.slot.placement, run.slot.shape, error, run.first)
            found += [lifted(piece, self.group) for piece in mine]
        for matrix in self._all():
            found.append(Piece(f"low_rank/{matrix.name}", matrix.q, tuple(matrix.q.shape), (0, 0)))
        return found

    def settle(self, skip: torch.Tensor | bool) -> None:
        """A skipped step forgets the errors, whose buffers hold what was not finite, and keeps Q."""
        if skip is False:
            skip = torch.zeros((), dtype=torch.bool, device=self.device)
        elif skip is True:
            skip = torch.ones((), dtype=torch.bool, device=self.device)
        for _, error in self._errors:
            error.masked_fill_(skip, 0.0)
        for matrix in self._all():
            matrix.q.copy_(torch.where(skip, matrix.first, matrix.q))
            matrix.first.copy_(matrix.q)

    def _all(self) -> Iterator[_Matrix]:
        return (matrix for content in self._contents.values() for matrix in content.matrices)

    def _content(self, key: Key) -> _Content:
        content = _Content([], [])
        for run in key.runs():
            slot = run.slot
            if not run.size:
                continue
            dtype = master_dtype(slot.parameter.dtype)
            error = torch.zeros(run.size if len(slot.shape) > 1 else 0, dtype=dtype, device=self.device)
            if error.numel():
                self._errors.append((run, error))
            done = 0
            for piece in flat_pieces(slot.placement.name, torch.empty(run.size, device="meta"), slot.shape, run.first):
                size = piece.tensor.numel()
                rows = piece.tensor.shape[0] if piece.tensor.dim() else 1
                columns = size // rows
                if low_rank(rows, columns, self.rank):
                    within = error[done : done + size].view(rows, columns)
                    name = _block_name(slot.placement.name, slot.placement.box.offset, piece)
                    q = _start(self.seed, name, columns, self.rank).to(self.device, dtype)
                    content.matrices.append(_Matrix(name, run.start + done, rows, columns, within, q, q.clone()))
                else:
                    content.rest.append((run.start + done, run.start + done + size))
                done += size
        return content

    def _run(self, key: Key, values: torch.Tensor) -> Iterator[dist.Work | None]:
        content = self._contents.get(id(key))
        if content is None or not content.matrices:
            yield from super()._run(key, values)
            return
        matrices = content.matrices
        for matrix in matrices:
            matrix.of(values).add_(matrix.error, alpha=self.scale)
        sent = [(matrix.of(values) @ matrix.q).flatten() for matrix in matrices]
        message = torch.cat([*sent, *(values[start:stop] for start, stop in content.rest)])
        yield dist.all_reduce(message, group=self.group, async_op=True)
        bases, taken = [], 0
        for matrix in matrices:
            product = message[taken : taken + matrix.rows * self.rank].view(matrix.rows, self.rank)
            bases.append(torch.linalg.qr(product).Q)
            taken += product.numel()
        for start, stop in content.rest:
            values[start:stop].copy_(message[taken : taken + stop - start])
            taken += stop - start
        shares = [matrix.of(values).T @ base for matrix, base in zip(matrices, bases, strict=True)]
        for matrix, base, share in zip(matrices, bases, shares, strict=True):
            torch.sub(matrix.of(values), base @ share.T, out=matrix.error)
            matrix.error.div_(self.scale)
        message = torch.cat([share.flatten() for share in shares])
        yield dist.all_reduce(message, group=self.group, async_op=True)
        parts = message.split([matrix.columns * self.rank for matrix in matrices])
        for matrix, base, part in zip(matrices, bases, parts, strict=True):
            total = part.view(matrix.columns, self.rank)
            torch.mm(base, total.T, out=matrix.of(values))
            matrix.q.copy_(torch.linalg.qr(total).Q)


class Queue:
    """Gradients under way over the replicas: the newest `LAG` in their first message, the others in their second."""

    def __init__(self, reducer: Reducer):
        self.reducer = reducer
        self._first: deque[Flight] = deque()
        self._open = False
        """Whether gradients were summed that no update has settled yet."""

    def start(self, key: Key, values: torch.Tensor) -> Flight:
        self._open = True
        flight = self.reducer.start(key, values)
        if self.reducer.messages > 1:
            self._first.append(flight)
            if len(self._first) > LAG:
                self._first.popleft().advance()
        return flight

    def clear(self) -> None:
        """All have been waited for."""
        self._first.clear()

    def settle(self, skip: torch.Tensor | bool) -> None:
        """After an update from these gradients, or instead of one (`skip`)."""
        if self._open:
            self.reducer.settle(skip)
        self._open = False


def make_reducer(
    sync: SyncConfig,
    group: dist.ProcessGroup,
    keys: Sequence[Any],
    *,
    seed: int,
    device: torch.device,
    whole: Callable[[Any], bool] = lambda key: False,
) -> Reducer:
    """For `sync.compress`. keys: what it will be given. whole: whether a key is sent as it is."""
    if sync.compress == "powersgd":
        return LowRank(group, keys, rank=sync.rank, seed=seed, device=device, whole=whole)
    return Rounded(group, whole) if sync.compress == "bf16" else Reducer(group)


def lifted(piece: Piece, group: dist.ProcessGroup) -> Piece:
    """What a replica alone holds, as its part of a tensor with one more dimension in front: the replicas."""
    shape, offset = (group.size(), *piece.shape), (group.rank(), *piece.offset)
    return Piece(piece.name, piece.tensor.unsqueeze(0), shape, offset, piece.owner)


def _block_name(name: str, offset: Sequence[int], piece: Piece) -> str:
    """The same for all that hold the same block, and no other."""
    start = ".".join(str(a + b) for a, b in zip(offset, piece.offset, strict=True))
    return f"{name}/{start}+{'x'.join(map(str, piece.tensor.shape))}"


def _start(seed: int, name: str, columns: int, rank: int) -> torch.Tensor:
    """fp64 [columns, rank] with orthonormal columns, as far as there are so many."""
    digest = hashlib.blake2b(f"powersgd {seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.linalg.qr(torch.randn(columns, rank, generator=generator, dtype=torch.float64)).Q
