"""The training code with one fault, by name, planted in every rank: each must turn cells of the array red."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.parallel import engine, norm, replicate, zero
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

    def doubled(self: replicate.Gradients) -> torch.Tensor:
        total = real(self)
        for part in self.parameters.ranges:
            for run in part.runs():
                if run.slot.name == "embedding.weight":
                    total = total + norm.square_norm(run.of(part.gradient))
        return total

    return mock.patch.object(replicate.Gradients, "square", doubled)


def _norm_of_one_shard() -> Any:
    """The norm forgets the axes whose ranks hold different elements."""
    return mock.patch.object(engine, "reduce_sum", lambda value, groups: value)


def _rows_of_another_rank() -> Any:
    """The last data rank takes the rows of the first."""
    real = cases.data_rank

    def wrong(mesh: Any) -> tuple[int, int]:
        place, size = real(mesh)
        return (0 if place == size - 1 else place), size

    return mock.patch.object(cases, "data_rank", wrong)


def _late_bucket_forgotten() -> Any:
    real = replicate.Gradients._launch

    def short(self: replicate.Gradients, stop: int) -> None:
        real(self, min(stop, len(self.buckets) - 1))

    return mock.patch.object(replicate.Gradients, "_launch", short)


def _micro_steps_overwrite() -> Any:
    real = replicate.Gradients._arrive

    def overwriting(self: replicate.Gradients, group: Any, slot: Any, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and self._scopes > 1:
            parameter.grad = parameter.grad * 0.5
            slot.touched = False
        real(self, group, slot, parameter)

    return mock.patch.object(replicate.Gradients, "_arrive", overwriting)


def _sized(cell: Cell, **sizes: bool) -> bool:
    """Whether each axis named is wider than 1 (True), or not (False)."""
    known = LAYOUTS[cell.layout].to_dict()
    return all((known[axis] > 1) == wide for axis, wide in sizes.items())


def _stage(cell: Cell, *stages: int) -> bool:
    return LAYOUTS[cell.layout].zero in stages


FAULTS: dict[str, Fault] = {
    "a reduce is dropped": Fault(_no_gradient_all_reduce, lambda cell: cell.layout == "data"),
    "replicas are not summed": Fault(_no_gradient_all_reduce, lambda cell: cell.layout in ("hybrid1", "hybrid2")),
    "a reduce-scatter is dropped": Fault(_no_reduce_scatter, lambda cell: cell.layout in ("zero1", "zero2")),
    "the scale is wrong": Fault(_mean_over_ranks, lambda cell: cell.layout == "data"),
    "a tie is counted twice": Fault(
        _square_of_a_tie_twice, lambda cell: cell.model in ("tied", "mlm", "dropout") and cell.layout in ("data", "zero1")
    ),
    "the norm skips an axis": Fault(_norm_of_one_shard, lambda cell: _stage(cell, 1, 2)),
    "a rank has wrong rows": Fault(_rows_of_another_rank, lambda cell: LAYOUTS[cell.layout].dp > 1),
    "the last bucket stays": Fault(_late_bucket_forgotten, lambda cell: cell.layout == "data"),
    "micro-steps overwrite": Fault(_micro_steps_overwrite, lambda cell: cell.layout == "data" and cell.accumulation > 1),
}
