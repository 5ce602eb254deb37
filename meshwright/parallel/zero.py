"""ZeRO-1 and ZeRO-2 (arXiv:1910.02054): every rank computes with whole weights, and updates one range of them.

The buckets of the flat buffers are cut into as many equal pieces as `dp_shard` x `cp` has ranks; rank r keeps master, moments
and average of piece r of every bucket, and nothing of them beside it. With P trainable parameters, N = dp_shard cp, R =
dp_replicate, w bytes a weight, g = max(w, 4) bytes a summed gradient and M micro-steps, a rank holds and sends a step:

                      gradients held      reduce-scatter          all-reduce of the piece      all-gather of weights
    data parallel     g P                 -                       2 (D-1)/D g P, D = R         -
    ZeRO-1            g P                 (N-1)/N g P             2 (R-1)/R g P / N            (N-1)/N w P
    ZeRO-2            g P / N + staging   M (N-1)/N g P           2 (R-1)/R g P / N            (N-1)/N w P

in one message a bucket each (ZeRO-2: M reduce-scatters a bucket). A bucket's piece goes on to the replicas while the buckets
behind it are reduced. ZeRO-2 fills a buffer a bucket, reduces it as soon as it is full, adds the piece to the rank's range
and gives the buffer back (section 5.2 of the paper); a micro-step reduces every bucket, which is what accumulation costs.

Updated pieces are gathered into the weights in the order in which forward needs them: those outside of `model.layers` before
`Engine.zero` returns, a block's before the block runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.compat import all_gather_single, reduce_scatter_single
from meshwright.parallel.blocks import Blocks, find_blocks
from meshwright.parallel.buffers import Bucket, Group, Kind, Range, Run, Slot, master_dtype
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.replicate import Gradients, Lane

__all__ = ["Part", "ShardedGradients", "ShardedParameters", "StreamedGradients"]

LAG = 2
"""Reductions under way before the oldest is waited for: enough to keep a link busy, few enough to bound what is staged."""


class Part:
    """This rank's piece of one bucket: elements [start, start + size) of its group. A `Range`. shards: the ranks that have the
    other pieces; None: there are none."""

    def __init__(self, group: Group, begin: int, end: int, shards: dist.ProcessGroup | None):
        rank, ways = (shards.rank(), shards.size()) if shards is not None else (0, 1)
        self.group = group
        self.shards = shards
        self.begin, self.end = begin, end
        self.size = (end - begin) // ways
        self.start = begin + rank * self.size
        self.decay, self.shared, self.counted, self.mixed = group.decay, group.shared, group.counted, group.mixed
        self.domain, self.label, self.offload = group.domain, group.label, group.offload
        self.working = self._keep()
        self.master = self.buffer() if self.mixed else self.working
        self._own: torch.Tensor | None = None

    def _keep(self) -> torch.Tensor:
        return self.piece(self.group.working)

    def piece(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its elements in a buffer of the group."""
        return buffer[self.start : self.start + self.size]

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's elements in a buffer of the group."""
        return buffer[self.begin : self.end]

    def buffer(self) -> torch.Tensor:
        return self.group.state(self.size)

    @property
    def gradient(self) -> torch.Tensor:
        return self.piece(self.group.gradient) if self._own is None else self._own

    def own_gradient(self) -> torch.Tensor:
        """From now on the gradient is a buffer of this piece alone, not a view of the group's."""
        if self._own is None:
            self._own = torch.zeros(self.size, dtype=master_dtype(self.group.dtype), device=self.group.device)
        return self._own

    def run_of(self, slot: Slot) -> Run | None:
        """What of a parameter lies in it."""
        first, last = max(slot.start, self.start), min(slot.start + slot.size, self.start + self.size)
        return Run(slot, first - slot.start, first - self.start, last - first) if first < last else None

    def runs(self) -> Iterator[Run]:
        return (run for run in map(self.run_of, self.group.slots) if run is not None)


class ShardedGroup(Group):
    """A group whose masters exist in parts only."""

    def __init__(self, slots: list[Slot], edges: list[int], kind: Kind, *, shards: dist.ProcessGroup | None, **options: Any):
        self._share = (edges, shards)
        super().__init__(slots, edges, kind, **options)

    def _allocate(self) -> None:
        edges, shards = self._share
        self.working = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.parts: Sequence[Part] = [Part(self, begin, end, shards) for begin, end in itertools.pairwise(edges)]

    def fill(self, slot: Slot, values: torch.Tensor) -> None:
        slot.of(self.working).copy_(values)
        flat = values.reshape(-1)
        for part in self.parts:
            run = part.run_of(slot)
            if run is not None:
                run.of(part.master).copy_(flat[run.first : run.first + run.size])


class ShardedParameters(FlatParameters):
    """Flat parameters of which this rank updates its pieces. group: the ranks along dp_shard and cp; what belongs to a domain
    (`sharing.domains`) is cut among the shards of that.

    overlap: forward waits for new weights where it needs them, else they are waited for at once; the same bits.
    """

    groups: list[ShardedGroup]  # type: ignore[assignment]  # all that `_new_group` makes here

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, bucket_bytes: int, overlap: bool, **options: Any):
        self.group = group
        self.overlap = overlap
        self._under_way: dict[Part, dist.Work] = {}
        super().__init__(model, ways=group.size(), bucket_bytes=bucket_bytes, **options)
        self._shared, self._blocks = self._users()
        inside = [part for parts in self._blocks.values() for part in parts]
        self._order = list(dict.fromkeys([*self._shared, *inside]))
        self._hook_forward()

    @property
    def parts(self) -> list[Part]:
        return [part for group in self.groups for part in group.parts]

    @property
    def ranges(self) -> Sequence[Part]:
        """In the order in which forward needs their weights."""
        return self._order

    def publish(self, updated: Range) -> None:
        """Starts gathering a piece's weights from all ranks. Collective, in the order of `ranges`."""
        assert isinstance(updated, Part)  # `ranges` has no others
        if updated.shards is None:
            return
        target = updated.whole(updated.group.working)
        work = all_gather_single(target, updated.working, group=updated.shards, async_op=True)
        assert work is not None  # asynchronous, on a group that this rank is in
        self._under_way[updated] = work
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        self._wait(list(self._under_way))

    def settle_shared(self) -> None:
        self._wait(self._shared)

    def _gather(self, group: Group) -> torch.Tensor:
        assert isinstance(group, ShardedGroup)  # `_new_group` makes no others
        if not group.mixed:
            return group.working
        return self._gather_masters(group)

    def _gather_masters(self, group: ShardedGroup) -> torch.Tensor:
        whole = torch.zeros(group.size, dtype=master_dtype(group.dtype), device=group.device)
        for part in group.parts:
            if part.shards is None:
                part.whole(whole).copy_(part.master)
            else:
                all_gather_single(part.whole(whole), part.master.to(group.device), group=part.shards)
        return whole

    def _scatter(self, group: Group, whole: torch.Tensor) -> None:
        assert isinstance(group, ShardedGroup)
        for part in group.parts:
            if part.piece(whole).data_ptr() != part.master.data_ptr():
                part.master.copy_(part.piece(whole))

    def _wait(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part in self._under_way:
                self._under_way.pop(part).wait()

    def _users(self) -> tuple[list[Part], dict[nn.Module, list[Part]]]:
        """Parts with a weight that something outside of `model.layers` uses, and those of each block that have none."""
        blocks = self._visited(find_blocks(self.model)).here
        weights = {block: {id(parameter) for parameter in block.parameters()} for block in blocks}
        within = {module for block in blocks for module in block.modules()}
        elsewhere = (module for module in self.model.modules() if module not in within)
        outside = {id(parameter) for module in elsewhere for parameter in module.parameters(recurse=False)}
        shared: list[Part] = []
        used: dict[nn.Module, list[Part]] = {block: [] for block in blocks}
        for part in self.parts:
            members = {id(s.parameter) for s in part.group.slots if part.begin <= s.start < part.end}
            if members & outside:
                shared.append(part)
                continue
            for block in blocks:
                if members & weights[block]:
                    used[block].append(part)
        return shared, used

    def _visited(self, blocks: Blocks) -> Blocks:
        """Those that may wait for weights of their own. A model that does not say which its blocks are may use a weight without
        calling its block."""
        return blocks if blocks.declared else Blocks()

    def _hook_forward(self) -> None:
        for block, parts in self._blocks.items():
            block.register_forward_pre_hook(lambda module, inputs, parts=parts: self._wait(parts))
        self.model.register_state_dict_pre_hook(lambda *_: self.settle())

    def _new_group(self, *args: Any, **options: Any) -> ShardedGroup:
        """The working weights are whole on every rank."""
        return ShardedGroup(*args, shards=self._shards_of(args[2]), **options)

    def _shards_of(self, kind: Kind) -> dist.ProcessGroup | None:
        return self.sharing.domains[kind.domain].shards if kind.domain else self.group

    def _ways_of(self, kind: Kind) -> int:
        shards = self._shards_of(kind)
        return 1 if shards is None else shards.size()


class ShardedGradients(Gradients):
    """ZeRO-1: whole gradients, reduce-scattered in place in the last micro-step; a rank then owns its pieces of the sum.

    data: all ranks that see different samples. replicas: those that own the same pieces; None for one. What belongs to a
    domain is reduced over that.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        data: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        *,
        bucket_bytes: int,
        overlap: bool,
    ):
        super().__init__(parameters, data, bucket_bytes=bucket_bytes, overlap=overlap)
        domains = parameters.sharing.domains
        self._replicas = {"": replicas} | {name: domain.replicas for name, domain in domains.items()}
        self._passes_on = any(group is not None for group in self._replicas.values())
        self._parts = {(id(part.group), part.begin): part for part in parameters.parts}
        self._started: list[tuple[dist.Work | None, Part]] = []

    def _part(self, bucket: Bucket) -> Part:
        return self._parts[id(bucket.group), bucket.start]

    def _reduce(self, lane: Lane, bucket: Bucket) -> None:
        part = self._part(bucket)
        self._started.append((self._scatter(part, part.gradient, bucket.gradient), part))
        if self._passes_on and len(self._started) > LAG:
            self._pass_on()

    def _scatter(self, part: Part, output: torch.Tensor, whole: torch.Tensor) -> dist.Work | None:
        if part.shards is None:
            if output.data_ptr() != whole.data_ptr():
                output.copy_(whole)
            return None
        work = reduce_scatter_single(output, whole, group=part.shards, async_op=True)
        assert work is not None  # asynchronous, on a group that this rank is in
        return work

    def _pass_on(self) -> None:
        """Waits for the oldest reduction and starts the sum of its piece over the replicas."""
        work, part = self._started.pop(0)
        if work is not None:
            work.wait()
        self._sum_replicas(part)

    def _sum_replicas(self, part: Part) -> None:
        self._start_replicas(part, part.gradient, self._replicas[part.domain])

    def join(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> None:
        super().join(group, replicas)
        self._replicas[""] = replicas

    def _complete(self) -> None:
        while self._started:
            self._pass_on()
        super()._complete()


@dataclass(frozen=True, eq=False)
class _Flight:
    """A bucket on its way. piece: where its sum arrives, to be added to the part; None: in the part's own buffer. last:
    whether the step's sum is then whole."""

    work: dist.Work | None
    part: Part
    bucket: torch.Tensor
    piece: torch.Tensor | None
    last: bool


class StreamedGradients(ShardedGradients):
    """ZeRO-2: a rank keeps the sum of its own pieces; a bucket exists from its first gradient until it is reduced.

    Without overlap a bucket is waited for as soon as it is started: keeping all until the end would be no ZeRO-2.
    """

    _in_place = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._at_once = True
        self._staged: dict[Bucket, torch.Tensor] = {}
        self._summed: set[Part] = set()
        """Parts whose own buffer holds gradients of this step."""
        self._flying: list[_Flight] = []

    @property
    def noise_of_one_micro_step(self) -> bool:
        return True

    def _reduces(self, scope: Any) -> bool:
        return scope.part != "input"

    def finish(self, wait: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        super().finish(wait)
        if not self._settled:
            self._settle()

    def zero(self) -> None:
        super().zero()
        self._summed.clear()

    def _prepare(self, alone: bool) -> None:
        """Buckets are made when they are filled."""

    def _begin(self, scope: Any) -> None:
        super()._begin(scope)
        if scope.part != "input":
            scope.lane.launched = 0

    def _end(self, scope: Any) -> None:
        self._launch(scope.lane, len(scope.lane.buckets))

    def _view(self, group: Group, slot: Slot) -> torch.Tensor:
        bucket = self._lanes[slot.unit[0]].buckets[self._bucket[id(slot)]]
        if bucket not in self._staged:
            self._staged[bucket] = self._stage(bucket)
        start = slot.start - bucket.start
        return self._staged[bucket][start : start + slot.size].view(slot.shape)

    def _stage(self, bucket: Bucket) -> torch.Tensor:
        """A buffer for a bucket with zeros in the gaps, which are summed like everything else."""
        group = bucket.group
        buffer = torch.empty(bucket.stop - bucket.start, dtype=master_dtype(group.dtype), device=group.device)
        stop = bucket.stop
        for slot in bucket.slots:  # from the last one on
            end = slot.start + slot.size
            if end < stop:
                buffer[end - bucket.start : stop - bucket.start].zero_()
            stop = slot.start
        return buffer

    def _source(self, bucket: Bucket) -> torch.Tensor:
        return self._staged[bucket]

    def _measure(self, lane: Lane, stop: int) -> None:
        if lane.scopes == 1:
            super()._measure(lane, stop)

    @property
    def _lag(self) -> int:
        return LAG if self.overlap else 0

    def _reduce(self, lane: Lane, bucket: Bucket) -> None:
        part, buffer = self._part(bucket), self._staged.pop(bucket)
        for slot in bucket.slots:
            slot.touched = False
        piece = None
        if part in self._summed:  # the sum of the micro-steps before is in the part's own buffer
            piece = buffer[part.start - part.begin :][: part.size]
        work = self._scatter(part, part.own_gradient() if piece is None else piece, buffer)
        self._summed.add(part)
        self._flying.append(_Flight(work, part, buffer, piece, lane.done))
        while len(self._flying) > self._lag:
            self._land()

    def _land(self) -> None:
        """Waits for the oldest reduction and gives its bucket back."""
        flight = self._flying.pop(0)
        if flight.work is not None:
            flight.work.wait()
        if flight.piece is not None:
            flight.part.own_gradient().add_(flight.piece)
        if flight.last:
            self._sum_replicas(flight.part)

    def _complete(self) -> None:
        while self._flying:
            self._land()
        super()._complete()
