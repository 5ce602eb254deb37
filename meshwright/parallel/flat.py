"""Trainable parameters as a few flat buffers, so that reduction, norm and update are a few large kernels.

Parameters are grouped by what is done to them: decayed or not, with whom a gradient is shared, counted in the norm or not,
over which data ranks it is summed (`spec.placement.Placement`). A group owns contiguous 1-D buffers that all share one element
index:

    working   what the model computes with; every parameter is a view into it
    master    what the optimizer updates: at least fp32, the very same buffer where the working dtype already is
    gradient  in the dtype of master, or of working where nothing is summed; allocated when first needed

A bucket, a run of neighbours in a group whose gradients are reduced together, never spans two chunks of a pipeline: each
has its own last backward. A parameter starts at a multiple of ALIGN_BYTES; the gaps hold zeros for ever, so that sums over a
buffer are sums over parameters. Every buffer is a plain contiguous range, hence a rank that keeps only a share of the
optimizer's work needs only another range, not another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.parallel.buffers import (
    ALIGN_BYTES,
    Bucket,
    Group,
    Kind,
    Range,
    Run,
    Slot,
    Unit,
    decays,
    master_dtype,
    unit_of,
)
from meshwright.parallel.modules import canonical, check_kinds, place_buffers, replace
from meshwright.parallel.sharing import Sharing
from meshwright.spec.parameters import Table
from meshwright.spec.placement import Placement

__all__ = ["FlatParameters", "cut_runs"]


class FlatParameters:
    """All parameters of a model: the trainable ones moved into groups, the frozen ones cast in place.

    model: on the device, or on meta; then buffers and frozen parameters come up uninitialised and trainable ones zero,
    to be filled by `Engine.fill` or inside `Engine.masters()`. A parameter that the model holds under several names is kept
    once, under the canonical name of the table, else under the first one. ways: every bucket of `bucket_bytes` (see
    `buckets`) can be cut into as many equal aligned pieces. offload: what lies in host memory. sharing: which blocks of
    logical tensors they are, and who else holds them. unit: of a parameter's name in this model. label: of a parameter and
    its logical name; those of one label share a group. Raises LayoutError where nothing can be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        no_decay: Iterable[str],
        table: Table | None,
        offload: str = "none",
        sharing: Sharing | None = None,
        unit: Callable[[str], Unit] = unit_of,
        label: Callable[[nn.Parameter, str], int] = lambda parameter, name: 0,
        ways: int = 1,
        bucket_bytes: int = 0,
    ):
        self.model = model
        self.offload = offload
        self.sharing = sharing or Sharing()
        self._ways, self._bucket_bytes = ways, bucket_bytes
        kept = model.state_dict(keep_vars=True)  # now: ZeRO-3 refuses it later
        self.persistent = frozenset(name for name, _ in model.named_buffers() if name in kept)
        """Names of the buffers that a checkpoint keeps."""
        every = canonical(model, table)
        check_kinds(every)
        words = tuple(no_decay)
        self.frozen: dict[str, nn.Parameter] = {}
        self.placements = self._placements(every)
        plans: dict[Kind, list[Slot]] = {}
        for index, (name, parameter) in enumerate(every.items()):
            if not parameter.requires_grad:
                self.frozen[name] = parameter
                continue
            placement = self.placements[name]
            slot = Slot(name, index, parameter, parameter.shape, 0, parameter.numel(), placement, unit(name))
            placed = (placement.shared, placement.counted, placement.domain)
            kind = Kind(decays(placement.name, words), *placed, label(parameter, placement.name))
            plans.setdefault(kind, []).append(slot)
        self.groups = [self._group(plans[kind], kind, dtype, device) for kind in sorted(plans, key=lambda kind: kind.order)]
        self.slots = sorted((slot for group in self.groups for slot in group.slots), key=lambda slot: slot.index)
        for name, parameter in self.frozen.items():
            wanted = dtype if parameter.dtype.is_floating_point else parameter.dtype
            if parameter.is_meta:
                self.frozen[name] = replace(model, parameter, torch.empty(parameter.shape, dtype=wanted, device=device))
            else:
                parameter.data = parameter.detach().to(device, wanted)
        place_buffers(model, dtype, device)

    def _placements(self, every: dict[str, nn.Parameter]) -> dict[str, Placement]:
        """Of every name that the model has for a parameter. A tie may be known to `sharing` by any of its names."""
        names: dict[int, list[str]] = {id(parameter): [name] for name, parameter in every.items()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        found = {}
        for name, parameter in every.items():
            known = next((other for other in names[id(parameter)] if other in self.sharing.placements), name)
            placement = self.sharing.of(known, tuple(parameter.shape))
            found.update(dict.fromkeys(names[id(parameter)], placement))
        return found

    def _group(self, slots: list[Slot], kind: Kind, dtype: torch.dtype, device: torch.device) -> Group:
        align = ALIGN_BYTES // dtype.itemsize
        end, edges, ways = 0, [0], self._ways_of(kind)
        for run in self._cut(slots, align, self._bucket_bytes // master_dtype(dtype).itemsize):
            for slot in run:
                slot.start = end
                end += _aligned(slot.size, align)
            end = _aligned(end, align * ways) if ways > 1 else end
            edges.append(end)
        group = self._new_group(slots, edges, kind, dtype=dtype, device=device, offload=self.offload)
        for slot in slots:
            if slot.parameter.is_meta:
                slot.parameter = replace(self.model, slot.parameter, group.view(slot))
                continue
            group.fill(slot, slot.parameter.detach())
            slot.parameter.data = group.view(slot)  # frees the tensor it came with before the next one is copied
            slot.parameter.grad = None
        return group

    def _ways_of(self, kind: Kind) -> int:
        return self._ways

    def _new_group(self, *args: Any, **options: Any) -> Group:
        return Group(*args, **options)

    def _cut(self, slots: Sequence[Slot], align: int, limit: int) -> list[list[Slot]]:
        """Buckets of at most `limit` elements (or one larger parameter), within a chunk."""
        return cut_runs(slots, align, limit, lambda slot: slot.unit[0])

    @property
    def ranges(self) -> Sequence[Range]:
        """What this rank updates, in the order in which it should."""
        return self.groups

    def publish(self, updated: Range) -> None:
        """Call it after the working weights of a range were changed; other ranks may compute with them."""

    def settle(self) -> None:
        """Waits until every published weight is here, and nothing else is reading them: they may be overwritten."""

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
            runs = self._cut(group.slots, align, size_bytes // master_dtype(group.dtype).itemsize)
            stops = [run[0].start for run in runs[1:]] + [group.size]
            out += [Bucket(group, run[::-1], run[0].start, stop) for run, stop in zip(runs, stops, strict=True)]
        return sorted(out, key=lambda bucket: bucket.slots[-1].index, reverse=True)

    def each(self) -> Iterator[tuple[Group, Slot]]:
        """Trainable parameters in the order of the model."""
        home = {id(slot): group for group in self.groups for slot in group.slots}
        return ((home[id(slot)], slot) for slot in self.slots)

    def working(self) -> Iterator[tuple[Run, torch.Tensor]]:
        """What this rank always holds of the working weights."""
        return ((Run(slot, 0, slot.start, slot.size), slot.of(group.working)) for group, slot in self.each())

    def place(self, slot: Slot) -> tuple[int, int, int]:
        """Sorts parameters of all ranks in the order of the whole model: before, in and after its blocks."""
        first = min((other.index for other in self.slots if other.unit[1] >= 0), default=len(self.slots))
        block = slot.unit[1]
        return (1, block, slot.index) if block >= 0 else (0 if slot.index < first else 2, 0, slot.index)

    def fill(self, values: Callable[[str, Placement], torch.Tensor]) -> None:
        """New values for every parameter, one after another, so that no rank ever holds two whole ones beside its own share.

        values: (name in this model, placement) to what this rank's parameter holds, of its shape (or of the placement's box,
        where the parameter is padded beyond it with zeros), of any dtype and on any device.
        """
        self.settle()
        for group, slot in self.each():
            group.fill(slot, _padded(values(slot.name, slot.placement), slot.shape))
        for name, parameter in self.frozen.items():
            parameter.data.copy_(_padded(values(name, self.placements[name]), parameter.shape))
        self.refresh()

    def refresh(self) -> None:
        """Working weights from the masters."""
        self.settle()
        for part in self.ranges:
            if part.mixed:
                part.working.copy_(part.master)
            self.publish(part)
        self.settle()

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The parameters of the model are whole masters on its device inside: up to g P bytes a rank, the size of a
        data-parallel gradient. Working weights follow on leaving."""
        self.settle()
        whole = {id(group): self._gather(group) for group in self.groups}
        for group, slot in self.each():
            slot.parameter.data = slot.of(whole[id(group)])
        try:
            yield
        finally:
            for group, slot in self.each():
                slot.parameter.data = group.view(slot)
        for group in self.groups:
            self._scatter(group, whole[id(group)])
        self.refresh()

    def _gather(self, group: Group) -> torch.Tensor:
        """All masters of a group, on the model's device."""
        return group.master.to(group.device)

    def _scatter(self, group: Group, whole: torch.Tensor) -> None:
        """Takes them back."""
        if whole is not group.master:
            group.master.copy_(whole)


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align


def cut_runs(slots: Sequence[Slot], align: int, limit: float, apart: Callable[[Slot], object]) -> list[list[Slot]]:
    """Runs of neighbours of at most `limit` elements (or one larger slot) that are not `apart`, filled from the last slot on:
    backward reaches it first. Depends on the sizes alone, not on where the slots start."""
    runs: list[list[Slot]] = []
    room = 0.0
    for slot in reversed(slots):
        size = _aligned(slot.size, align)
        if not runs or size > room or apart(slot) != apart(runs[-1][-1]):
            runs.append([])
            room = limit
        runs[-1].append(slot)
        room -= size
    return [run[::-1] for run in reversed(runs)]


def _padded(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if values.shape == shape:
        return values
    whole = values.new_zeros(shape)
    whole[tuple(slice(0, size) for size in values.shape)] = values
    return whole
