"""Trainable parameters as a few flat buffers, so that reduction, norm and update are a few large kernels.

Parameters are grouped by (decayed or not, dtype). A group owns contiguous 1-D buffers that all share one element index:

    working   what the model computes with; every parameter is a view into it
    master    what the optimizer updates: at least fp32, the very same buffer where the working dtype already is
    gradient  in the dtype of master, or of working where nothing is summed; allocated when first needed

A parameter starts at a multiple of ALIGN_BYTES; the gaps hold zeros for ever, so that sums over a buffer are sums over
parameters. Every buffer is a plain contiguous range, hence a rank that keeps only a share of the optimizer's work needs
only another range, not another layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from meshwright.errors import Finding, LayoutError
from meshwright.spec.parameters import Table

__all__ = ["ALIGN_BYTES", "Bucket", "FlatParameters", "Group", "Range", "Run", "Slot", "decays", "master_dtype"]

ALIGN_BYTES = 128


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of masters, moments and summed gradients beside weights of `dtype`: at least fp32, fp64 stays fp64."""
    return torch.promote_types(dtype, torch.float32)


def decays(name: str, no_decay: Iterable[str]) -> bool:
    """Whether weight decay applies: false when the parameter's name contains one of the words, whatever the case."""
    lowered = name.lower()
    return not any(word.lower() in lowered for word in no_decay)


@dataclass(eq=False)
class Slot:
    """Where one parameter lives: elements [start, start + size) of its group; `index` is its place in the model."""

    name: str
    index: int
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    size: int
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


class Range(Protocol):
    """Elements that this rank updates: 1-d tensors of one size that share an element index. `mixed`: whether master and
    working are two tensors."""

    @property
    def decay(self) -> bool: ...
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


class Group:
    """Parameters that share dtype and decay, and their buffers. A `Range` where a rank updates every parameter."""

    master: torch.Tensor

    def __init__(self, slots: list[Slot], size: int, *, decay: bool, dtype: torch.dtype, device: torch.device):
        self.slots = slots
        self.size = size
        self.decay = decay
        self.dtype = dtype
        self.device = device
        self.working = torch.zeros(size, dtype=dtype, device=device)
        self._gradient: torch.Tensor | None = None
        self._allocate()

    def _allocate(self) -> None:
        self.master = self.buffer() if self.mixed else self.working

    def fill(self, slot: Slot, values: torch.Tensor) -> None:
        """Takes the values of one parameter, of any dtype."""
        slot.of(self.master).copy_(values)
        if self.mixed:
            slot.of(self.working).copy_(slot.of(self.master))

    def runs(self) -> Iterator[Run]:
        return (Run(slot, 0, slot.start, slot.size) for slot in self.slots)

    def buffer(self) -> torch.Tensor:
        """A new zero buffer [size] in the dtype of the masters."""
        return torch.zeros(self.size, dtype=master_dtype(self.dtype), device=self.device)

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
        """Whether the masters are other tensors than the weights that the model computes with."""
        return master_dtype(self.dtype) != self.dtype


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


class FlatParameters:
    """All parameters of a model: the trainable ones moved into groups, the frozen ones cast in place.

    model: on the device, or on meta; then buffers and frozen parameters come up uninitialised and trainable ones zero,
    to be filled inside `Engine.masters()`. A parameter that the model holds under several names is kept once, under the
    canonical name of the table, else under the first one. ways: every bucket of `bucket_bytes` (see `buckets`) can be cut
    into as many equal aligned pieces. Raises LayoutError where nothing can be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        no_decay: Iterable[str],
        table: Table | None,
        ways: int = 1,
        bucket_bytes: int = 0,
    ):
        self.model = model
        self._ways, self._bucket_bytes = ways, bucket_bytes
        every = _canonical(model, table)
        _check_kinds(every)
        words = tuple(no_decay)
        self.frozen: dict[str, nn.Parameter] = {}
        plans: dict[bool, list[tuple[str, int, nn.Parameter]]] = {}
        for index, (name, parameter) in enumerate(every.items()):
            if parameter.requires_grad:
                plans.setdefault(decays(name, words), []).append((name, index, parameter))
            else:
                self.frozen[name] = parameter
        self.groups = [self._group(plans[decay], decay, dtype, device) for decay in sorted(plans, reverse=True)]
        self.slots = sorted((slot for group in self.groups for slot in group.slots), key=lambda slot: slot.index)
        for name, parameter in self.frozen.items():
            kind = dtype if parameter.dtype.is_floating_point else parameter.dtype
            if parameter.is_meta:
                self.frozen[name] = _replace(model, parameter, torch.empty(parameter.shape, dtype=kind, device=device))
            else:
                parameter.data = parameter.detach().to(device, kind)
        _place_buffers(model, dtype, device)

    def _group(
        self, members: list[tuple[str, int, nn.Parameter]], decay: bool, dtype: torch.dtype, device: torch.device
    ) -> Group:
        align = ALIGN_BYTES // dtype.itemsize
        slots = [Slot(name, index, parameter, parameter.shape, 0, parameter.numel()) for name, index, parameter in members]
        end, edges = 0, [0]
        for run in _cut(slots, align, self._bucket_bytes // master_dtype(dtype).itemsize):
            for slot in run:
                slot.start = end
                end += _aligned(slot.size, align)
            end = _aligned(end, align * self._ways) if self._ways > 1 else end
            edges.append(end)
        group = self._new_group(slots, edges, decay, dtype, device)
        for slot in slots:
            if slot.parameter.is_meta:
                slot.parameter = _replace(self.model, slot.parameter, slot.of(group.working))
                continue
            group.fill(slot, slot.parameter.detach())
            slot.parameter.data = slot.of(group.working)  # frees the tensor it came with before the next one is copied
            slot.parameter.grad = None
        return group

    def _new_group(self, slots: list[Slot], edges: list[int], decay: bool, dtype: torch.dtype, device: torch.device) -> Group:
        """edges: where the buckets of `bucket_bytes` begin and end."""
        return Group(slots, edges[-1], decay=decay, dtype=dtype, device=device)

    @property
    def ranges(self) -> Sequence[Range]:
        """What this rank updates, in the order in which it should."""
        return self.groups

    def publish(self, updated: Range) -> None:
        """Call it after the working weights of a range were changed; other ranks may compute with them."""

    def settle(self) -> None:
        """Waits until every published weight is here."""

    def settle_shared(self) -> None:
        """Waits for the published weights that no block of `model.layers` waits for."""

    def buckets(self, size_bytes: int) -> list[Bucket]:
        """Cuts the gradient buffers at parameter borders into ranges of at most `size_bytes` (or one larger parameter).

        In the order in which backward completes them: a bucket is whole when its first registered parameter has its
        gradient, so the one whose first parameter comes last goes first. The same on every rank.
        """
        out: list[Bucket] = []
        for group in self.groups:
            align = ALIGN_BYTES // group.dtype.itemsize
            runs = _cut(group.slots, align, size_bytes // master_dtype(group.dtype).itemsize)
            stops = [run[0].start for run in runs[1:]] + [group.size]
            out += [Bucket(group, run[::-1], run[0].start, stop) for run, stop in zip(runs, stops, strict=True)]
        return sorted(out, key=lambda bucket: bucket.slots[-1].index, reverse=True)

    def each(self) -> Iterator[tuple[Group, Slot]]:
        """Trainable parameters in the order of the model."""
        home = {id(slot): group for group in self.groups for slot in group.slots}
        return ((home[id(slot)], slot) for slot in self.slots)

    def refresh(self) -> None:
        """Working weights from the masters."""
        for part in self.ranges:
            if part.mixed:
                part.working.copy_(part.master)
            self.publish(part)
        self.settle()

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The parameters of the model are whole masters inside; working weights follow on leaving."""
        for group, slot in self.each():
            slot.parameter.data = slot.of(group.master)
        try:
            yield
        finally:
            for group, slot in self.each():
                slot.parameter.data = slot.of(group.working)
        self.refresh()


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align


def _cut(slots: Sequence[Slot], align: int, limit: int) -> list[list[Slot]]:
    """Runs of neighbours of at most `limit` elements (or one larger slot), filled from the last slot on: backward reaches it
    first. Depends on the sizes alone, not on where the slots start."""
    runs: list[list[Slot]] = []
    room = 0
    for slot in reversed(slots):
        size = _aligned(slot.size, align)
        if not runs or size > room:
            runs.append([])
            room = limit
        runs[-1].append(slot)
        room -= size
    return [run[::-1] for run in reversed(runs)]


def _canonical(model: nn.Module, table: Table | None) -> dict[str, nn.Parameter]:
    """Parameters once each in order of registration; ties under the table's canonical name. Raises LayoutError for a
    tie of the table that the model does not have."""
    every = dict(model.named_parameters(remove_duplicate=False))
    renamed: dict[int, str] = {}
    for canonical, other in table.ties if table else ():
        if canonical not in every or other not in every:
            continue
        if every[canonical] is not every[other]:
            raise LayoutError(
                f"{other} is declared to be {canonical}, but the model holds two tensors; tie them before parallelize"
            )
        renamed[id(every[canonical])] = canonical
    return {renamed.get(id(parameter), name): parameter for name, parameter in model.named_parameters()}


def _check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    findings = [
        Finding(name, f"is a trainable parameter of dtype {parameter.dtype}", "Keep its real and imaginary part as two")
        for name, parameter in trained.items()
        if not parameter.dtype.is_floating_point
    ]
    if not trained:
        findings = [Finding("model", "has no trainable parameter", "Let some parameter require a gradient")]
    if findings:
        raise LayoutError(findings=findings)


def _replace(model: nn.Module, old: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A meta parameter cannot change device in place: put a new one wherever the model holds the old one."""
    new = nn.Parameter(values.new_empty(0), requires_grad=old.requires_grad)
    new.data = values  # a view made into a parameter shares its version with all others of the buffer: autograd would
    # see a weight that arrives during forward as a change of those that were used before
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, key, new)
    return new


def _place_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers go to the device and are never cast down: position tables and statistics keep their precision."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            kind = torch.promote_types(buffer.dtype, dtype) if buffer.dtype.is_floating_point else buffer.dtype
            placed = torch.empty(buffer.shape, dtype=kind, device=device) if buffer.is_meta else buffer.to(device, kind)
            if placed is not buffer:
                setattr(module, key, placed)
