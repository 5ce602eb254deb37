"""What flat buffers are made of: the place of a parameter, the group that owns the buffers, a run and a bucket of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from meshwright.distributed.piece import Piece, flat_pieces
from meshwright.spec.box import Box
from meshwright.spec.placement import Placement

__all__ = [
    "ALIGN_BYTES",
    "Bucket",
    "Group",
    "Kind",
    "Lane",
    "Range",
    "Run",
    "Slot",
    "Unit",
    "decays",
    "host_zeros",
    "local_pieces",
    "master_dtype",
    "unit_of",
]

ALIGN_BYTES = 128

Unit = tuple[int, int]
"""Chunk of the pipeline on this rank (-1: used by several), and block of `model.layers` (-1: outside of them)."""


def unit_of(name: str) -> Unit:
    """Chunk 0 and the block that the name of a parameter tells (`layers.3.mlp.up.weight`: 3)."""
    block = re.match(r"layers\.(\d+)\.", name)
    return 0, int(block[1]) if block else -1


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of masters, moments and summed gradients beside weights of `dtype`: at least fp32, fp64 stays fp64."""
    return torch.promote_types(dtype, torch.float32)


def decays(name: str, no_decay: Iterable[str]) -> bool:
    """Whether weight decay applies: false when the parameter's name contains one of the words, whatever the case."""
    lowered = name.lower()
    return not any(word.lower() in lowered for word in no_decay)


def local_pieces(kind: str, placement: Placement, shape: Sequence[int], flat: torch.Tensor, first: int) -> list[Piece]:
    """The elements first .. first + n, in `flat` [n], of a rank's parameter of `shape`, as blocks of the logical tensor.

    What the parameter holds beyond `placement.box` is padding, which no other layout would know: it is left out.
    """
    held, pieces = Box.whole(placement.box.shape), []
    for piece in flat_pieces(kind, flat, shape, first):
        inside = piece.box.meet(held)
        if inside is not None:
            offset = tuple(a + b for a, b in zip(inside.offset, placement.box.offset, strict=True))
            values = piece.tensor[inside.inside(piece.box)]
            pieces.append(Piece(f"{kind}/{placement.name}", values, placement.shape, offset))
    return pieces


@dataclass(eq=False)
class Slot:
    """Where one parameter lives: elements [start, start + size) of its group; `index` is its place in the model."""

    name: str
    index: int
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    size: int
    placement: Placement
    unit: Unit
    touched: bool = False
    """Whether its range of the gradient buffer holds gradients of the current step."""

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This parameter's view of a buffer of its group."""
        return buffer[self.start : self.start + self.size].view(self.shape)


@dataclass(frozen=True, eq=False)
class Run:
    """Elements [first, first + size) of a parameter, which lie at [start, start + size) of a range."""

    slot: Slot
    first: int
    start: int
    size: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """These elements in a buffer of the range: 1-d."""
        return buffer[self.start : self.start + self.size]

    def pieces(self, kind: str, buffer: torch.Tensor) -> list[Piece]:
        """These elements in a buffer of the range, as blocks of the logical tensor named `kind`/its name."""
        slot = self.slot
        return local_pieces(kind, slot.placement, slot.shape, self.of(buffer), self.first) if self.size else []


class Range(Protocol):
    """Elements that this rank updates: 1-d tensors of one size that share an element index. `mixed`: whether master and
    working are two tensors. label: which of the caller's own groups it is in. shared, counted, domain: as in `Placement`, of
    all that lies in it. offload: as in `Plan`."""

    @property
    def decay(self) -> bool: ...
    @property
    def label(self) -> int: ...
    @property
    def shared(self) -> str: ...
    @property
    def counted(self) -> bool: ...
    @property
    def domain(self) -> str: ...
    @property
    def offload(self) -> str: ...
    @property
    def mixed(self) -> bool: ...
    @property
    def master(self) -> torch.Tensor: ...
    @property
    def working(self) -> torch.Tensor: ...
    @property
    def gradient(self) -> torch.Tensor: ...
    def buffer(self) -> torch.Tensor:
        """A new zero buffer of its size in the dtype of the masters."""
        ...

    def runs(self) -> Iterator[Run]:
        """What lies in it, gaps left out."""
        ...


@dataclass(frozen=True)
class Kind:
    """What the parameters of a group have in common."""

    decay: bool
    shared: str
    counted: bool
    domain: str = ""
    label: int = 0

    @property
    def order(self) -> tuple[bool, str, bool, str, int]:
        return not self.decay, self.shared, not self.counted, self.domain, self.label


class Group:
    """Parameters of one kind, and their buffers. A `Range` where a rank updates every parameter."""

    working: torch.Tensor
    master: torch.Tensor

    def __init__(
        self,
        slots: list[Slot],
        edges: list[int],
        kind: Kind,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offload: str = "none",
    ):
        """edges: where the buckets begin and end."""
        self.slots = slots
        self.offload = offload
        self.size = edges[-1]
        self.decay, self.shared, self.counted = kind.decay, kind.shared, kind.counted
        self.domain, self.label = kind.domain, kind.label
        self.dtype = dtype
        self.device = device
        self._gradient: torch.Tensor | None = None
        self._allocate()

    def _allocate(self) -> None:
        self.working = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.master = self.buffer() if self.mixed else self.working

    def view(self, slot: Slot) -> torch.Tensor:
        """What the model computes with for one parameter."""
        return slot.of(self.working)

    def fill(self, slot: Slot, values: torch.Tensor) -> None:
        """Takes the values of one parameter, of any dtype."""
        slot.of(self.master).copy_(values)
        if self.mixed:
            slot.of(self.working).copy_(slot.of(self.master))

    def runs(self) -> Iterator[Run]:
        return (Run(slot, 0, slot.start, slot.size) for slot in self.slots)

    def buffer(self) -> torch.Tensor:
        """A new zero buffer [size] for masters or moments: in their dtype, in host memory where they are offloaded."""
        return self.state(self.size)

    def state(self, size: int) -> torch.Tensor:
        """A new zero buffer [size], as `buffer`."""
        if self.offload == "none":
            return torch.zeros(size, dtype=master_dtype(self.dtype), device=self.device)
        return host_zeros(size, master_dtype(self.dtype), self.device)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient buffer [size]. Raises RuntimeError before the first `use_gradient`."""
        if self._gradient is None:
            raise RuntimeError("no backward has run yet, so there are no gradients")
        return self._gradient

    def use_gradient(self, dtype: torch.dtype) -> None:
        """Makes the gradient buffer one of `dtype`. Contents are lost where that changes it."""
        if self._gradient is None or self._gradient.dtype != dtype:
            self._gradient = None  # free the old one first
            self._gradient = torch.zeros(self.size, dtype=dtype, device=self.device)

    @property
    def mixed(self) -> bool:
        """Whether the masters are other tensors than the working weights that this rank keeps."""
        return master_dtype(self.dtype) != self.dtype or self.offload == "optimizer"


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together: elements [start, stop) of a group."""

    group: Group
    slots: list[Slot]
    start: int
    stop: int

    @property
    def gradient(self) -> torch.Tensor:
        return self.group.gradient[self.start : self.stop]

    @property
    def chunk(self) -> int:
        return self.slots[0].unit[0]

    def runs(self) -> Iterator[Run]:
        """What lies in it, gaps left out."""
        return (Run(slot, 0, slot.start - self.start, slot.size) for slot in self.slots)


@dataclass(eq=False)
class Lane:
    """The buckets of one chunk, in the order in which they are reduced, and how far the step has come with them.

    missing: of each bucket, what the present scope still waits for. launched: buckets whose reduction was started. scopes:
    backwards begun (a split one counts once). done: whether the last one was begun. delivered: parameters whose gradients
    come in scopes for weights; `learnt` once such a scope has shown all of them.
    """

    chunk: int
    buckets: list[Bucket] = field(default_factory=list)
    missing: list[set[int]] = field(default_factory=list)
    launched: int = 0
    scopes: int = 0
    done: bool = False
    delivered: set[int] = field(default_factory=set)
    learnt: bool = False


def host_zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [size] in host memory, pinned for copies from and to `device`: torch rounds pinned bytes up to a power of two, so
    that up to twice as many are taken."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type != "cpu")
