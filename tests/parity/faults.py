"""The training code with one fault, by name, planted in every rank: each must turn cells of the array red."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.distributed.mesh import AxisGroups
from meshwright.parallel import axes, context, context_blocks, engine, expert, links, norm, replicate, tensor, zero
from meshwright.spec.pipeline import RECEIVE_GRADIENT
from meshwright.verify import cases
from tests.parity.cells import LAYOUTS, Cell

__all__ = ["FAULTS", "Fault", "planted"]


@dataclass(frozen=True)
class Fault:
    """plant: makes the patch. felt: cells that must see it."""

    plant: Callable[[], Any]
    felt: Callable[[Cell], bool]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Nothing is planted under the name ""."""
    with FAULTS[name].plant() if name else contextlib.nullcontext():
        yield


class _Done:
    def wait(self) -> None:
        """Nothing was started."""


def _no_gradient_all_reduce() -> Any:
    real = dist.all_reduce

    def quiet(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return _Done() if options.get("async_op") else real(tensor, *args, **options)

    return mock.patch.object(dist, "all_reduce", quiet)


def _no_reduce_scatter() -> Any:
    """Each rank keeps its own part of its own gradient."""

    def quiet(out: torch.Tensor, whole: torch.Tensor, *args: Any, group: Any, **options: Any) -> Any:
        out.copy_(whole.view(-1)[group.rank() * out.numel() :][: out.numel()])
        return _Done()

    return mock.patch.object(zero, "reduce_scatter_single", quiet)


def _mean_over_ranks() -> Any:
    real = dist.all_reduce

    def divided(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("async_op"):
            tensor.div_(2)
        return real(tensor, *args, **options)

    return mock.patch.object(dist, "all_reduce", divided)


def _square_of_a_tie_twice() -> Any:
    real = replicate.Gradients.square

    def doubled(self: replicate.Gradients, counted: bool = True, domain: str | None = None) -> torch.Tensor:
        total = real(self, counted, domain)
        for part in self.parameters.ranges:
            for run in part.runs():
                if run.slot.name == "embedding.weight":
                    total = total + norm.square_norm(run.of(part.gradient))
        return total

    return mock.patch.object(replicate.Gradients, "square", doubled)


def _norm_of_one_shard() -> Any:
    """The norm forgets the axes whose ranks hold different elements."""
    return mock.patch.object(engine, "reduce_sum", lambda value, groups: value)


def _every_copy_counts() -> Any:
    """Parameters that tensor-parallel ranks hold alike are in the norm once a rank."""
    real = replicate.Gradients.square
    return mock.patch.object(replicate.Gradients, "square", lambda self, counted=True, domain=None: real(self, False, domain))


def _no_shared_sum() -> Any:
    """Shares of a gradient stay with the ranks that made them."""
    return mock.patch.object(replicate.Gradients, "_share", lambda self: None)


def _shared_sum_twice() -> Any:
    real = replicate.Gradients._share

    def twice(self: replicate.Gradients) -> None:
        real(self)
        self._complete()
        real(self)

    return mock.patch.object(replicate.Gradients, "_share", twice)


def _no_sum_behind_columns() -> Any:
    """What the matrices split by columns gave is not summed over the tensor-parallel ranks."""
    return mock.patch.object(tensor, "all_sum", lambda x, key: x.clone())


def _no_gradient_message() -> Any:
    """A stage takes zeros for the gradient of its first micro-batch."""
    real = links.Mail.take

    def lost(self: links.Mail, receive: Any) -> torch.Tensor:
        taken = real(self, receive)
        return torch.zeros_like(taken) if receive.kind == RECEIVE_GRADIENT and receive.micro == 0 else taken

    return mock.patch.object(links.Mail, "take", lost)


def _rows_of_another_rank() -> Any:
    """The last data rank takes the rows of the first."""
    real = cases.data_rank

    def wrong(mesh: Any) -> tuple[int, int]:
        place, size = real(mesh)
        return (0 if place == size - 1 else place), size

    return mock.patch.object(cases, "data_rank", wrong)


def _late_bucket_forgotten() -> Any:
    real = replicate.Gradients._launch

    def short(self: replicate.Gradients, lane: replicate.Lane, stop: int) -> None:
        real(self, lane, min(stop, len(lane.buckets) - 1))

    return mock.patch.object(replicate.Gradients, "_launch", short)


def _later_micro_steps_weigh_less() -> Any:
    real = replicate.Gradients._arrive

    def halved(self: replicate.Gradients, parameter: torch.Tensor) -> None:
        late = self._lanes[0].scopes > 1
        real(self, parameter)
        if late:
            self._view(*self._home[id(parameter)]).mul_(0.5)

    return mock.patch.object(replicate.Gradients, "_arrive", halved)


def _ring_forgets_a_block() -> Any:
    """Keys of the last rank are seen by itself alone."""
    real = context_blocks.Tiles.forward

    def short(self: context_blocks.Tiles, k: torch.Tensor, v: torch.Tensor, source: int) -> None:
        if source == self.rank or source < len(self.runs) - 1:
            real(self, k, v, source)

    return mock.patch.object(context_blocks.Tiles, "forward", short)


def _no_gradient_of_other_keys() -> Any:
    """The gradient of keys that came from another rank is lost on the way home."""
    real = context_blocks.Tiles.backward

    def lost(self: context_blocks.Tiles, k: torch.Tensor, v: torch.Tensor, source: int) -> torch.Tensor:
        gradient = real(self, k, v, source)
        return gradient if source == self.rank else gradient.zero_()

    return mock.patch.object(context_blocks.Tiles, "backward", lost)


def _no_gradient_of_other_positions() -> Any:
    """All-to-all goes back with the gradients of a rank's own positions and heads only."""
    real = context.exchange

    def lost(x: torch.Tensor, split: int, join: int, key: str) -> torch.Tensor:
        out = real(x, split, join, key)
        return out.detach() + 0.0 * out

    return mock.patch.object(context, "exchange", lost)


def _targets_counted_by_each_context_rank() -> Any:
    return mock.patch.object(axes.Axes, "same_rows", property(lambda own: tuple(own.model.values())))


def _row_counted_by_each_context_rank() -> Any:
    """A classified row counts on every rank that has some of its positions."""
    real = context._Entrance.__call__

    def kept(self: Any, model: Any, args: Any, given: dict[str, Any]) -> Any:
        args, kwargs = real(self, model, args, given)
        return args, {**kwargs, "labels": given["labels"]}

    return mock.patch.object(context._Entrance, "__call__", kept)


def _positions_of_the_run() -> Any:
    """Angles are those of the place on the rank, not in the row."""

    def local(self: context._Rope, length: int, positions: Any, device: torch.device, dtype: torch.dtype) -> Any:
        return self.whole(length, None, device, dtype)

    return mock.patch.object(context._Rope, "__call__", local)


def _experts_over_all_ranks() -> Any:
    """Gradients of experts are summed over all data ranks, those that hold others included."""
    real = expert._groups

    def wrong(plan: Any, mesh: Any) -> Any:
        group, domain = real(plan, mesh)
        return group, replace(domain, data=AxisGroups(mesh).data)

    return mock.patch.object(expert, "_groups", wrong)


def _experts_not_summed() -> Any:
    """Each of the ranks that hold the same experts keeps what its own tokens gave."""
    real = expert._groups

    def wrong(plan: Any, mesh: Any) -> Any:
        group, domain = real(plan, mesh)
        return group, replace(domain, data=None, replicas=None)

    return mock.patch.object(expert, "_groups", wrong)


def _norm_of_own_experts() -> Any:
    real = expert._groups

    def wrong(plan: Any, mesh: Any) -> Any:
        group, domain = real(plan, mesh)
        return group, replace(domain, distinct=None)

    return mock.patch.object(expert, "_groups", wrong)


def _every_rank_counts_all_experts() -> Any:
    """The squares of everything, not of the experts alone, are summed over the ranks that share experts."""
    real = replicate.Gradients.square
    return mock.patch.object(replicate.Gradients, "square", lambda self, counted=True, domain=None: real(self, counted))


def _rows_of_experts_lost() -> Any:
    """The last row that a rank sends to another comes back as zeros."""
    real = expert.deal

    def lossy(x: torch.Tensor, send: list[int], receive: list[int], key: str) -> torch.Tensor:
        out = real(x, send, receive, key)
        return torch.cat((out[:-1], torch.zeros_like(out[-1:]))) if x.is_floating_point() and len(out) else out

    return mock.patch.object(expert, "deal", lossy)


def _balance_on_every_tensor_rank() -> Any:
    """Ranks that compute the same balance terms do not share them out."""
    real = tensor._Splitter._experts

    def whole(self: Any, module: Any, name: str, enter: Any) -> None:
        real(self, module, name, enter)
        module.router.share = 1.0

    return mock.patch.object(tensor._Splitter, "_experts", whole)


def _sized(cell: Cell, **sizes: bool) -> bool:
    """Whether each axis named is wider than 1 (True), or not (False)."""
    known = LAYOUTS[cell.layout].to_dict()
    return all((known[axis] > 1) == wide for axis, wide in sizes.items())


def _tied_over_stages(cell: Cell) -> bool:
    """Whether embedding and head are one matrix on two ranks; the V of zbv ends where it begins."""
    return cell.model in ("tied", "mlm", "dropout") and cell.layout in ("pp", "data-pp") and cell.schedule != "zbv"


def _experts_apart(cell: Cell) -> bool:
    """Whether experts are dealt, and each has several holders."""
    layout = LAYOUTS[cell.layout]
    return cell.model == "moe" and 1 < layout.ep < layout.dp


FAULTS: dict[str, Fault] = {
    "gradients of experts are summed over all ranks": Fault(
        _experts_over_all_ranks, lambda cell: cell.model == "moe" and cell.layout in ("ep2", "ep4", "ep2-tp2", "ep2-pp2")
    ),
    "gradients of experts are not summed": Fault(
        _experts_not_summed, lambda cell: _experts_apart(cell) and not LAYOUTS[cell.layout].zero
    ),
    "the norm knows one rank's experts": Fault(
        _norm_of_own_experts, lambda cell: cell.model == "moe" and LAYOUTS[cell.layout].ep > 1
    ),
    "the norm counts all as experts": Fault(
        _every_rank_counts_all_experts, lambda cell: cell.model == "moe" and LAYOUTS[cell.layout].ep > 1
    ),
    "a row of an expert is lost": Fault(
        _rows_of_experts_lost, lambda cell: cell.model == "moe" and LAYOUTS[cell.layout].ep > 1
    ),
    "balance terms count once a tensor rank": Fault(
        _balance_on_every_tensor_rank, lambda cell: cell.model == "moe" and LAYOUTS[cell.layout].tp > 1
    ),
    "a reduce is dropped": Fault(_no_gradient_all_reduce, lambda cell: cell.layout == "data"),
    "replicas are not summed": Fault(_no_gradient_all_reduce, lambda cell: cell.layout in ("hybrid1", "hybrid2")),
    "a reduce-scatter is dropped": Fault(_no_reduce_scatter, lambda cell: cell.layout in ("zero1", "zero2")),
    "the scale is wrong": Fault(_mean_over_ranks, lambda cell: cell.layout == "data"),
    "a tie is counted twice": Fault(
        _square_of_a_tie_twice, lambda cell: cell.model in ("tied", "mlm", "dropout") and cell.layout in ("data", "zero1")
    ),
    "the norm skips the shards": Fault(_norm_of_one_shard, lambda cell: cell.layout in ("zero1", "zero2")),
    "the norm skips tensor-parallel ranks": Fault(_norm_of_one_shard, lambda cell: cell.layout in ("tp", "data-tp")),
    "the norm skips stages": Fault(_norm_of_one_shard, lambda cell: cell.layout in ("pp", "data-pp")),
    "every copy counts": Fault(_every_copy_counts, lambda cell: cell.layout in ("tp", "tp4", "data-tp")),
    "partial gradients are not summed": Fault(
        _no_shared_sum, lambda cell: cell.layout in ("tp", "data-tp") and cell.sequence_parallel
    ),
    "shares of a kv head are not summed": Fault(_no_shared_sum, lambda cell: cell.model == "mqa" and _sized(cell, tp=True)),
    "a tie is not summed": Fault(_no_shared_sum, _tied_over_stages),
    "a tie is summed twice": Fault(_shared_sum_twice, _tied_over_stages),
    "a tensor-parallel sum is dropped": Fault(
        _no_sum_behind_columns, lambda cell: cell.layout in ("tp", "tp4") and not cell.sequence_parallel
    ),
    "a stage's gradient message is dropped": Fault(_no_gradient_message, lambda cell: cell.layout in ("pp", "zero1-pp")),
    "a rank has wrong rows": Fault(_rows_of_another_rank, lambda cell: LAYOUTS[cell.layout].dp > 1),
    "the last bucket stays": Fault(_late_bucket_forgotten, lambda cell: cell.layout == "data"),
    "positions of ranks are not summed": Fault(_no_gradient_all_reduce, lambda cell: cell.layout in ("cp", "cp4")),
    "the norm skips shards over positions": Fault(_norm_of_one_shard, lambda cell: cell.layout == "zero3-cp"),
    "the ring forgets a block": Fault(
        _ring_forgets_a_block, lambda cell: cell.context == "ring" and cell.model != "classifier"
    ),
    "keys of other ranks learn nothing": Fault(_no_gradient_of_other_keys, lambda cell: cell.context == "ring"),
    "all-to-all has no way back": Fault(_no_gradient_of_other_positions, lambda cell: cell.context == "all_to_all"),
    "targets are counted once a context rank": Fault(_targets_counted_by_each_context_rank, lambda cell: _sized(cell, cp=True)),
    "a row is counted once a context rank": Fault(
        _row_counted_by_each_context_rank, lambda cell: cell.model == "classifier" and _sized(cell, cp=True)
    ),
    "positions are those on the rank": Fault(
        _positions_of_the_run, lambda cell: cell.model in ("decoder", "tied", "gqa") and _sized(cell, cp=True)
    ),
    "later micro-steps weigh less": Fault(
        _later_micro_steps_weigh_less, lambda cell: cell.layout == "data" and cell.accumulation > 1
    ),
}
