"""ZeRO-3 (arXiv:1910.02054): of weights too a rank keeps only its pieces; a block's are gathered around its use.

A unit is a block of `model.layers`, or all that is used outside of them. Every unit has buckets of its own, of which rank r
keeps piece r: working weights, master, moments, average and gradient. The whole weights of a bucket lie in a storage that
has memory only between gathering and release; parameters stay views of it, so that what autograd saved sees the weights
again that were gathered for backward.

    forward     the rest is gathered before the model runs; a block's before it runs, and the next block's meanwhile; they
                are released when it has run ("twice": gathered again for backward) or after its last backward ("once")
    backward    when the gradient of a block's output is there its weights are gathered, and the previous block's meanwhile;
                the block behind it is finished then: its weights are released, its gradients reduced as in ZeRO-2
    the rest    is kept until backward ends, and gathered for each micro-step; embedding and head may be one tensor

With P trainable parameters, E of them outside of blocks, B in the largest block, N = dp_shard cp, w and g as in `zero` and M
micro-steps a rank holds (w + g) P / N, at most w (E + 2 B) of whole weights and gradients of about two blocks, and it
receives w (N-1)/N (2 P - E - L) M of weights, L of them in the last block, which is kept for backward (2 P - E in a pipeline,
whose backward comes later; "once": w (N-1)/N P, as ZeRO-1), and sends g (N-1)/N P M of gradients.

All ranks gather and reduce in one order, which follows from where the model's forward goes, not from the gradients that
arrive: a weight that is unused on one rank alone changes nothing. The blocks that a forward visits are remembered, to know
the next one ahead. Frozen parameters are whole on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.compat import all_gather_single
from meshwright.distributed import device as devices
from meshwright.errors import MeshwrightError
from meshwright.parallel.buffers import Bucket, Group, Range, Run, Slot, host_zeros
from meshwright.parallel.flat import cut_runs
from meshwright.parallel.lesson import tensors_in
from meshwright.parallel.replicate import Lane, second_gradient
from meshwright.parallel.zero import Part, ShardedGroup, ShardedParameters, StreamedGradients

__all__ = ["GatheredGradients", "GatheredParameters", "GatheredPart", "Walk"]


class GatheredPart(Part):
    """This rank's piece of a bucket; `whole_weights` has memory from `gather` to `release`. kept: the piece is all of it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        slots = [slot for slot in self.group.slots if self.begin <= slot.start < self.end and slot.size]
        self.chunk = next((slot.unit[0] for slot in slots), 0)
        self.kept = self.shards is None and self.working.device == self.group.device
        whole = self.end - self.begin
        self.whole_weights = self.working if self.kept else self.working.new_empty(whole, device=self.group.device)
        self._bytes = self.whole_weights.untyped_storage().nbytes()
        self.views = {id(s): self.whole_weights[s.start - self.begin :][: s.size].view(s.shape) for s in slots}
        self._work: dist.Work | None = None
        self.stream: torch.Stream | None = None
        """On which pieces come from the host; None: on the one that computes."""
        self.there = True
        """Whether the weights are there or on their way."""
        self.release()

    def _keep(self) -> torch.Tensor:
        group = self.group
        if group.offload == "parameters":
            return host_zeros(self.size, group.dtype, group.device)
        return torch.zeros(self.size, dtype=group.dtype, device=group.device)

    def gather(self) -> None:
        """Starts gathering, unless the weights are there or on their way."""
        if self.there or not self.size:
            return
        self.whole_weights.untyped_storage().resize_(self._bytes)
        self.there = True
        if self.shards is None:
            self.whole_weights.copy_(self.working, non_blocking=True)
            return
        # from the host it comes on a stream of its own, behind what is queued now and may use that memory, beside what is later
        devices.wait_stream(self.stream, None)
        with devices.use_stream(self.stream):
            piece = self.working.to(self.group.device, non_blocking=True)
            self._work = all_gather_single(self.whole_weights, piece, group=self.shards, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def ready(self) -> bool:
        """Whether the weights are there, and not on their way."""
        return self.there and self._work is None

    def release(self) -> None:
        if self.there and not self.kept:
            self.wait()
            self.whole_weights.untyped_storage().resize_(0)
            self.there = False


class GatheredGroup(ShardedGroup):
    """A group whose working weights exist in parts too."""

    parts: Sequence[GatheredPart]

    def _allocate(self) -> None:
        edges, shards = self._share
        self.parts = [GatheredPart(self, begin, end, shards) for begin, end in itertools.pairwise(edges)]
        self._views = {number: view for part in self.parts for number, view in part.views.items()}

    def view(self, slot: Slot) -> torch.Tensor:
        """A view of the bucket's storage, which need not have memory."""
        return self._views[id(slot)] if slot.size else torch.empty(slot.shape, dtype=self.dtype, device=self.device)

    def fill(self, slot: Slot, values: torch.Tensor) -> None:
        flat = values.reshape(-1)
        for part in self.parts:
            run = part.run_of(slot)
            if run is not None:
                run.of(part.master).copy_(flat[run.first : run.first + run.size])
                if part.mixed:
                    run.of(part.working).copy_(run.of(part.master))


@dataclass(eq=False)
class Walk:
    """The blocks that one forward visited, in order, and how far back its backward has come."""

    visits: list[nn.Module] = field(default_factory=list)
    reached: int | None = None


class GatheredParameters(ShardedParameters):
    """Flat parameters of which this rank keeps its pieces, and gathers the others while the model computes.

    overlap: gather one block ahead, else when it is needed; the same bits. once: keep what was gathered for the first
    forward of a step to the last backward.
    """

    groups: list[GatheredGroup]  # type: ignore[assignment]  # all that `_new_group` makes here

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, once: bool, **options: Any):
        self.once = once
        self.finished: Callable[[set[Part]], None] = lambda parts: None
        """Called in backward, with parts whose gradients are complete for this micro-step."""
        self.backward: Callable[[], bool] = lambda: False
        """Whether a backward is going on."""
        self._walk = Walk()
        self._routes: dict[nn.Module, list[nn.Module]] = {}
        self._ends: set[nn.Module] = set()
        """Blocks with which a forward ends."""
        self._ahead: set[Part] = set()
        self._whole = False
        """Whether the model's parameters are whole masters at present."""
        super().__init__(model, group, **options)
        self._staged = self.offload == "parameters"
        """Whether weights are copied from the host while the host goes on."""
        stream = devices.stream(self.groups[0].device) if self._staged else None
        for part in self.parts:
            part.stream = stream

    def _cut(self, slots: Sequence[Slot], align: int, limit: int) -> list[list[Slot]]:
        """A bucket a unit, however large."""
        return cut_runs(slots, align, float("inf"), lambda slot: slot.unit)

    def _new_group(self, *args: Any, **options: Any) -> GatheredGroup:
        return GatheredGroup(*args, shards=self._shards_of(args[2]), **options)

    def publish(self, updated: Range) -> None:
        """Others gather them when they need them; what was gathered before is stale."""
        assert isinstance(updated, GatheredPart)  # `ranges` has no others
        updated.release()

    def settle(self) -> None:
        """Nothing is on its way between the uses of a unit; but copies from host memory that is overwritten next may be."""
        if self._staged:
            devices.synchronize(self.groups[0].device)

    def settle_shared(self) -> None:
        """They are gathered when the model runs."""

    def working(self) -> Iterator[tuple[Run, torch.Tensor]]:
        return ((run, run.of(part.working)) for part in self.ranges for run in part.runs())

    def _gather(self, group: Group) -> torch.Tensor:
        assert isinstance(group, ShardedGroup)  # `_new_group` makes no others
        return self._gather_masters(group)

    # ---- forward

    def _hook_forward(self) -> None:
        self.model.register_forward_pre_hook(lambda *_: self._enter())
        for block in self._blocks:
            block.register_forward_pre_hook(lambda module, _: self._before(module))
            block.register_forward_hook(lambda module, _, output: self._after(module, output))
        self.model.register_forward_hook(lambda *_: self._leave())
        for module in self.model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                module.register_state_dict_pre_hook(lambda *_: self._check_whole())

    def _check_whole(self) -> None:
        """Raises MeshwrightError but inside `masters`: what a state_dict would hand out has no memory, or has none soon."""
        if not self._whole:
            raise MeshwrightError(
                "state_dict under ZeRO-3: the model has no weights between the uses of a block. Take them from a checkpoint, "
                "from engine.parameters_state() (this rank's pieces), or inside engine.masters() (all of them)"
            )

    @contextmanager
    def masters(self) -> Iterator[None]:
        with super().masters():
            self._whole = True
            try:
                yield
            finally:
                self._whole = False

    def _enter(self) -> None:
        self._walk = Walk()
        self._start(self._shared)
        if len(self._routes) == 1:
            self._prefetch(next(iter(self._routes)))
        self._have(self._shared)

    def _before(self, block: nn.Module) -> None:
        self._have(self._blocks[block])
        if self.backward():  # the block is computed again, its backward has begun
            return
        self._walk.visits.append(block)
        following = self._following()
        if following is not None:
            self._prefetch(following)

    def _after(self, block: nn.Module, output: Any) -> None:
        if self.backward():
            return
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        walk, number = self._walk, len(self._walk.visits) - 1
        for tensor in watched:
            tensor.register_hook(lambda _: self._reached(walk, number))
        following = self._following()
        last = following is None and block in self._ends  # not in the first forward, which knows no end
        if watched and (self.once or last):
            return  # backward begins with the last block
        self._release(self._blocks[block], but=() if following is None else self._blocks[following])

    def _following(self) -> nn.Module | None:
        """The block that comes next, if this forward goes where one before it went."""
        visits = self._walk.visits
        route = self._routes.get(visits[0], [])
        return route[len(visits)] if len(visits) < len(route) else None

    def _leave(self) -> None:
        visits = self._walk.visits
        if visits:
            self._routes[visits[0]] = visits
        self._ends = {route[-1] for route in self._routes.values()}
        self._release(self._ahead)
        if not torch.is_grad_enabled():
            self._release(self.parts)

    # ---- backward

    def begin(self, chunk: int) -> None:
        """Before the backward of a chunk: gathers what lies outside of blocks, where it is not there any more."""
        self._have([part for part in self.parts if part in self._shared and part.chunk in (chunk, -1)])

    def _reached(self, walk: Walk, number: int) -> None:
        """Backward has come to the output of a visit: all that was visited later, and not before, is finished."""
        if walk.reached is not None and walk.reached <= number:  # by another of its outputs
            return
        walk.reached = number
        needed = {part for block in walk.visits[: number + 1] for part in self._blocks[block]} | self._needed_beside(walk)
        done = {part for block in walk.visits[number + 1 :] for part in self._blocks[block]} - needed
        if not self.once:
            self._release(done)
        self._have(self._blocks[walk.visits[number]])
        if number:
            self._prefetch(walk.visits[number - 1])
        self.finished(set(done))

    def _needed_beside(self, walk: Walk) -> set[Part]:
        """What the same backward still needs for other forwards than `walk`. Our models run one forward for each backward."""
        return set()

    def end(self, chunk: int, last: bool) -> None:
        """After the backward of a chunk; `last`: of the step."""
        self._release(self._ahead)
        if last or not self.once:
            self._release([part for part in self.parts if part.chunk == chunk or (part.chunk < 0 and not self.once)])

    def release(self) -> None:
        """Keeps nothing but this rank's pieces."""
        self._release(self.parts)

    # ---- memory

    @property
    def parts(self) -> list[GatheredPart]:  # type: ignore[override]  # all that its groups make
        return [part for group in self.groups for part in group.parts]

    def _start(self, parts: Iterable[Part]) -> None:
        for part in parts:
            assert isinstance(part, GatheredPart)
            part.gather()

    def _have(self, parts: Iterable[Part]) -> None:
        parts = list(parts)
        self._start(parts)
        for part in parts:
            assert isinstance(part, GatheredPart)
            part.wait()
            self._ahead.discard(part)

    def _prefetch(self, block: nn.Module) -> None:
        if self.overlap:
            parts = [part for part in self._blocks[block] if isinstance(part, GatheredPart) and not part.there]
            self._start(parts)
            self._ahead.update(parts)

    def _release(self, parts: Iterable[Part], but: Sequence[Part] = ()) -> None:
        for part in list(parts):
            if part not in but:
                assert isinstance(part, GatheredPart)
                part.release()
                self._ahead.discard(part)


class GatheredGradients(StreamedGradients):
    """ZeRO-3: as ZeRO-2, but a unit's buckets are reduced when backward has left the unit, in that order."""

    parameters: GatheredParameters

    def __init__(self, parameters: GatheredParameters, *args: Any, **options: Any):
        super().__init__(parameters, *args, **options)
        self._settled = True
        self._flushed: set[Bucket] = set()
        """Reduced in the present scope of their chunk."""
        parameters.finished = self._finished
        parameters.backward = lambda: self._scope is not None

    def zero(self) -> None:
        super().zero()
        self._flushed.clear()
        self.parameters.release()

    def _begin(self, scope: Any) -> None:
        super()._begin(scope)
        if scope.part != "input":
            self._flushed.difference_update(scope.lane.buckets)
        if scope.part != "weight":
            self.parameters.begin(scope.lane.chunk)

    def _end(self, scope: Any) -> None:
        super()._end(scope)
        self.parameters.end(scope.lane.chunk, scope.last)

    def finish(self, *wait: Any) -> None:
        super().finish(*wait)
        self.parameters.release()

    def _count(self, scope: Any, slot: Slot) -> None:
        lane = scope.lane
        if slot.unit[0] == lane.chunk and lane.buckets[self._bucket[id(slot)]] in self._flushed and scope.part != "input":
            raise second_gradient(slot)

    @property
    def _lag(self) -> int:
        return len(self.buckets) if self.overlap else 0

    def _finished(self, parts: set[Part]) -> None:
        """One unit is on its way while the next is filled: what left before is waited for."""
        scope = self._scope
        if scope is not None and scope.part == "whole":
            self._land_all()
            for bucket in scope.lane.buckets:
                if self._part(bucket) in parts:
                    self._flush(scope.lane, bucket)

    def _launch(self, lane: Lane, stop: int) -> None:
        self._land_all()
        for bucket in lane.buckets[:stop]:
            self._flush(lane, bucket)

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _flush(self, lane: Lane, bucket: Bucket) -> None:
        if bucket in self._flushed:
            return
        self._flushed.add(bucket)
        self._zero_rest(bucket)
        if self.measure_noise and lane.scopes == 1:
            self._measure_one(bucket)
        self._reduce(lane, bucket)
