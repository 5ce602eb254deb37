"""Data parallelism: gradients gathered into the flat buffers while backward runs, and summed over the data ranks.

What moves a parameter, in bytes read and written, between autograd's own tensor and the flat buffer:

                                                        bf16, fp16 weights       fp32 weights
    first micro-step: a hook copies                     r2 + w4 =  6             r4 + w4      =  8
    later ones: added (by a hook; fp32 by autograd)     r2 + r4 + w4 = 10        r4 + r4 + w4 = 12
    one rank and one micro-step: nothing to be summed,
    so the buffer has the dtype of the weights          r2 + w2 =  4             r4 + w4      =  8

and then the norm reads the buffer once (4 or 2) and the update once (4 or 2) beside master and two moments (r12 + w12) and
the working copy (w2). A buffer is never cleared: the first micro-step overwrites it. Nothing is divided: the loss is already
a sum over the global number of targets.

A pipeline runs backward in pieces: `scope` is told whose (chunk) and which (part). A gradient that several ranks of a layer
or two stages share is summed over them at the very end, after the data ranks: in one order everywhere, whatever the ranks
did before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.buffers import Bucket, Group, Lane, Slot, master_dtype
from meshwright.parallel.compress import Flight, Key, Queue
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.norm import square_norm

__all__ = ["Gradients", "Lane", "second_gradient"]


@dataclass(frozen=True)
class _Scope:
    lane: Lane
    last: bool
    part: str


class Gradients:
    """Accumulates and reduces gradients.

    group: ranks that see different samples; None for one. overlap: reduce during the last backward, else after it (the
    same buckets in the same order, hence the same bits). Backward may run only inside `scope`, once each.
    """

    _in_place = True
    """Whether later micro-steps of full-precision weights may be added by autograd itself."""

    def __init__(self, parameters: FlatParameters, group: dist.ProcessGroup | None, *, bucket_bytes: int, overlap: bool):
        self.parameters = parameters
        self.group = group
        self.overlap = overlap
        self.measure_noise = False
        """Ask, before the first micro-step, for `square_norms`."""
        self.square_norms: list[torch.Tensor] = []
        """Square norms of this rank's own part of the gradient, counted parameters only: of all its micro-steps where there
        are several ranks, of the first of several micro-steps on one rank. Whole after `finish`."""
        self._partial: list[tuple[Bucket, torch.Tensor]] = []
        """Own parts of shared buckets: squared when they are summed over the ranks that share them."""
        self._lanes: dict[int, Lane] = {}
        for bucket in parameters.buckets(bucket_bytes):
            self._lanes.setdefault(bucket.chunk, Lane(bucket.chunk)).buckets.append(bucket)
        self._bucket = self._numbers()
        self._home = {id(slot.parameter): (owner, slot) for owner, slot in parameters.each()}
        self.reached: set[int] = set()
        """Slots, by id, that got a gradient on this rank since the step began."""
        self._work: list[dist.Work | Flight] = []
        self.compressed: Queue | None = None
        """By which gradients are summed over the replicas where it is no plain all-reduce."""
        self._scope: _Scope | None = None
        self._begun = self._split = self._settled = False
        self._at_once = overlap
        """Whether a bucket is started as soon as it is full."""
        arrived = _weakly(self)
        for slot in parameters.slots:
            slot.parameter.register_post_accumulate_grad_hook(arrived)

    @property
    def buckets(self) -> list[Bucket]:
        """Chunk after chunk, each in the order in which its buckets are reduced."""
        return [bucket for lane in self._sorted() for bucket in lane.buckets]

    @contextmanager
    def scope(self, last: bool, chunk: int = 0, part: str = "whole") -> Iterator[None]:
        """Around one backward of one micro-batch of one chunk; `last` on the chunk's last one of the step.

        part: "whole"; or of a backward in two, "input", in which some gradients arrive, and later "weight", in which the
        others come through `deliver`. Scopes "input" of other micro-batches may lie between the two.
        Raises MeshwrightError for a scope inside another, and for one after the chunk's last.
        """
        lane = self._lanes.setdefault(chunk, Lane(chunk))
        if self._scope is not None or lane.done:
            raise MeshwrightError("a backward scope inside another, or after the last one of the step: call zero() first")
        self._scope = scope = _Scope(lane, last, part)
        self._begin(scope)
        try:
            yield
        finally:
            self._scope = None
        if part != "input":
            self._end(scope)
            lane.learnt |= part == "weight"

    def deliver(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a gradient that did not come through autograd, of the parameter's shape; inside a scope.

        Raises MeshwrightError for a parameter that is not trained here.
        """
        if id(parameter) not in self._home:
            raise MeshwrightError("a gradient was delivered for a parameter that is not trained on this rank")
        group, slot = self._home[id(parameter)]
        scope = self._within(slot)
        self._add(group, slot, gradient)
        if scope.part == "weight":
            scope.lane.delivered.add(id(slot))
        self._count(scope, slot)

    def _begin(self, scope: _Scope) -> None:
        lane, whole = scope.lane, scope.part == "whole"
        self._split |= not whole
        if not self._begun:
            self._prepare(alone=self.group is None and scope.last and whole and len(self._lanes) == 1)
            self._begun = True
        if scope.part == "input":
            return
        lane.scopes += 1
        lane.done = scope.last
        lane.missing = [{id(slot) for slot in bucket.slots if whole or self._awaited(lane, slot)} for bucket in lane.buckets]

    def _prepare(self, alone: bool) -> None:
        """Before the first backward of the step. alone: it is the only one, and no other rank adds to it."""
        for group in self.parameters.groups:
            group.use_gradient(group.dtype if alone and not group.shared else master_dtype(group.dtype))

    def _awaited(self, lane: Lane, slot: Slot) -> bool:
        """Whether a scope for weights waits for it. Before one has shown what comes, for everything: until its end."""
        return not lane.learnt or id(slot) in lane.delivered

    def _end(self, scope: _Scope) -> None:
        lane, last = scope.lane, scope.last
        alone = self.group is None and lane.scopes == 1 and not last
        if last or (alone and self.measure_noise):
            self._zero_untouched(lane)
        if alone and self.measure_noise:
            self._measure(lane, len(lane.buckets))
        if last and self.overlap:
            self._launch(lane, len(lane.buckets))
        elif last and self.group is not None:
            self._measure(lane, len(lane.buckets))

    def finish(self, wait: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Waits until every bucket is reduced; only the waiting is inside `wait()`."""
        with wait():
            for lane in self._sorted():
                if lane.chunk < 0:
                    self._finish_common(lane)
                self._launch(lane, len(lane.buckets))
            self._complete()
            self._share()
        if self._measured_in_part:
            self.square_norms = []
        if self.group is not None and self.overlap and not self._settled:
            self._settle()

    def _finish_common(self, lane: Lane) -> None:
        """What several chunks use is whole only now."""
        lane.done = True
        self._zero_untouched(lane)
        if self.group is not None and not self._at_once:
            self._measure(lane, len(lane.buckets))

    def zero(self) -> None:
        """Forgets the gradients of the step."""
        if self.compressed is not None:
            self.compressed.settle(skip=True)  # nothing was updated from them
        for slot in self.parameters.slots:
            slot.parameter.grad = None
            slot.touched = False
        self.square_norms, self._partial = [], []
        self.reached.clear()
        self._begun = self._split = False
        for lane in self._lanes.values():
            lane.scopes = lane.launched = 0
            lane.done = False

    def square(self, counted: bool = True, domain: str | None = None) -> torch.Tensor:
        """Sum of squares of the gradients held here that count (or of those that do not), loss scale included: 0-d. domain: of
        one `Placement.domain` alone."""
        chosen = [part for part in self.parameters.ranges if part.counted is counted and domain in (None, part.domain)]
        squares = [square_norm(part.gradient) for part in chosen]
        group = self.parameters.groups[0]
        none = torch.zeros((), dtype=master_dtype(group.dtype), device=group.device)
        return torch.stack(squares).sum() if squares else none

    @property
    def noise_of_one_micro_step(self) -> bool:
        """Whether `square_norms` are of one micro-step, not of all that this rank did. Then there are none with a backward in
        two, or with parameters of several chunks: their first micro-steps cannot be told apart."""
        return self.group is None

    @property
    def _measured_in_part(self) -> bool:
        return self.noise_of_one_micro_step and (self._split or -1 in self._lanes)

    def _within(self, slot: Slot) -> _Scope:
        """The present scope. Raises MeshwrightError where it is none of this parameter's."""
        scope = self._scope
        if scope is None:
            what = f"backward reached {slot.name} outside of a micro-batch (engine.backward_scope)"
            raise MeshwrightError(f"{what}. In a loop of your own: `with run.micro_batch(): run.backward(loss)`")
        if slot.unit[0] not in (scope.lane.chunk, -1):
            raise MeshwrightError(f"backward of chunk {scope.lane.chunk} reached {slot.name} of chunk {slot.unit[0]}")
        return scope

    def _arrive(self, parameter: torch.Tensor) -> None:
        group, slot = self._home[id(parameter)]
        scope = self._within(slot)
        gradient = parameter.grad
        assert gradient is not None  # autograd has just set it
        view = self._add(group, slot, gradient)
        parameter.grad = view if self._in_place and view.dtype == parameter.dtype else None
        self._count(scope, slot)

    def _add(self, group: Group, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Adds to what came before in the step, if anything did. Returns the sum."""
        self.reached.add(id(slot))
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        view = self._view(group, slot)
        if gradient.data_ptr() != view.data_ptr():  # else autograd has added in place
            if slot.touched:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        slot.touched = True
        return view

    def _view(self, group: Group, slot: Slot) -> torch.Tensor:
        """Where the gradient of a parameter is summed over micro-steps."""
        return slot.of(group.gradient)

    def _source(self, bucket: Bucket) -> torch.Tensor:
        """What is reduced for a bucket."""
        return bucket.gradient

    def _count(self, scope: _Scope, slot: Slot) -> None:
        lane = scope.lane
        if not self._reduces(scope) or slot.unit[0] != lane.chunk:
            return
        number = self._bucket[id(slot)]
        missing = lane.missing[number]
        if id(slot) not in missing and (scope.part == "whole" or number < lane.launched):
            raise second_gradient(slot)
        missing.discard(id(slot))
        if self._at_once and (scope.part == "whole" or lane.learnt):
            ready = lane.launched
            while ready < len(lane.buckets) and not lane.missing[ready]:
                ready += 1
            self._launch(lane, ready)

    def _zero_untouched(self, lane: Lane, stop: int | None = None) -> None:
        """Zeros for what got no gradient, in the buckets before `stop` that are not yet on their way."""
        for bucket in lane.buckets[lane.launched : stop]:
            self._zero_rest(bucket)

    def _zero_rest(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.touched:
                self._view(bucket.group, slot).zero_()
                slot.touched = True

    def _launch(self, lane: Lane, stop: int) -> None:
        """Starts the reduction of the lane's buckets before `stop` that have not been started."""
        if self.group is None:
            return
        self._zero_untouched(lane, stop)
        if self._at_once:
            self._measure(lane, stop)
        for bucket in lane.buckets[lane.launched : stop]:
            self._reduce(lane, bucket)
        lane.launched = max(stop, lane.launched)

    def _reduces(self, scope: _Scope) -> bool:
        """Whether the buckets are reduced in this scope."""
        return scope.last and scope.part != "input"

    def _reduce(self, lane: Lane, bucket: Bucket) -> None:
        """Starts the reduction of one bucket."""
        domain = bucket.group.domain
        self._start_replicas(bucket, bucket.gradient, self.parameters.sharing.domains[domain].data if domain else self.group)

    def _start_replicas(self, key: Key, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Starts the sum over `group`, the replicas; None where there is one."""
        if self.compressed is not None:
            self._work.append(self.compressed.start(key, values))
        elif group is not None:
            self._start(values, group)

    def join(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> None:
        """From the next step on gradients are summed over `group`, and with shards over `replicas`."""
        self.group = group

    def _start(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None  # asynchronous, on a group that this rank is in
        self._work.append(work)

    def _complete(self) -> None:
        """Waits for everything that was started."""
        for work in self._work:
            work.wait()
        self._work = []
        if self.compressed is not None:
            self.compressed.clear()

    def _share(self) -> None:
        """Sums shared gradients over the ranks that share them: all at once, in an order that these ranks have in common
        (they hold the same shared parameters in the same order, whatever else they hold)."""
        groups = self.parameters.sharing.groups
        for part in sorted(self.parameters.ranges, key=lambda part: part.shared):
            if part.shared:
                self._start(part.gradient, groups[part.shared])
        partial = sorted(self._partial, key=lambda each: (each[0].group.shared, each[0].slots[-1].index))
        for bucket, values in partial:
            self._start(values, groups[bucket.group.shared])
        self._complete()
        for bucket, values in partial:
            self._note_square(values if bucket.group.counted else values[:0])
        self._partial = []

    def _settle(self) -> None:
        """After the first step: buckets that some rank did not complete, because the model leaves a parameter unused, go
        last, or the ones behind them would never leave before the end of backward. The ranks agree on the order; it
        changes no value."""
        device = self.parameters.groups[0].device
        lanes = [lane for lane in self._sorted() if lane.chunk >= 0]
        # what comes through autograd in a backward in two is never awaited
        flags = [bool(missing & lane.delivered if lane.delivered else missing) for lane in lanes for missing in lane.missing]
        if flags:
            late = torch.tensor(flags, dtype=torch.int32, device=device)
            dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.group)
            flags = [bool(flag) for flag in late.tolist()]
        for lane in lanes:
            mine, flags = flags[: len(lane.missing)], flags[len(lane.missing) :]
            if mine:
                lane.buckets = [lane.buckets[number] for number in sorted(range(len(mine)), key=mine.__getitem__)]
        self._bucket = self._numbers()
        self._settled = True

    def _sorted(self) -> list[Lane]:
        return [self._lanes[chunk] for chunk in sorted(self._lanes)]

    def _numbers(self) -> dict[int, int]:
        """Place of a slot's bucket in its lane."""
        lanes = self._lanes.values()
        return {id(slot): number for lane in lanes for number, bucket in enumerate(lane.buckets) for slot in bucket.slots}

    def _measure(self, lane: Lane, stop: int) -> None:
        """Adds the square norms of the buckets that `_launch(stop)` is about to reduce."""
        for bucket in lane.buckets[lane.launched : stop] if self.measure_noise else ():
            self._measure_one(bucket)

    def _measure_one(self, bucket: Bucket) -> None:
        source = self._source(bucket)
        if bucket.group.shared:
            self._partial.append((bucket, source.to(master_dtype(source.dtype), copy=True)))
        else:
            self._note_square(source if bucket.group.counted else source[:0])

    def _note_square(self, values: torch.Tensor) -> None:
        square = square_norm(values)
        self.square_norms = [self.square_norms[0] + square] if self.square_norms else [square]


def _weakly(gradients: Gradients) -> Callable[[torch.Tensor], None]:
    """A hook on parameters that does not keep the buffers alive: Python's collector does not see through autograd's hooks."""
    reference = weakref.ref(gradients)

    def arrived(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._arrive(parameter)

    return arrived


def second_gradient(slot: Slot) -> MeshwrightError:
    """What is wrong when a gradient arrives after its bucket was reduced."""
    return MeshwrightError(
        f"{slot.name} got a second gradient in one micro-step: run one backward a scope, and recompute with use_reentrant=False"
    )
