"""Optimizer state, and ZeRO-3's pieces of weights, in host memory: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.distributed import device as devices
from meshwright.errors import LayoutError
from meshwright.parallel import buffers, offload_optimizer
from meshwright.parallel.apply import parallelize
from meshwright.parallel.buffers import Range, host_zeros
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.replicas import Job, Outcome, build, make_model, one_step, oracle, train
from tests.ranks.test_replicate import difference
from tests.ranks.test_zero import TOLERANCE, job_of

WHERE = [(0, "optimizer"), (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]


def job(stage: int, where: str, **settings: object) -> Job:
    made = job_of("2", stage, **settings) if stage else Job(world=2, **settings)  # type: ignore[arg-type]
    return replace(made, offload=where)


def train_in_windows(case: Job, fault: str = "") -> Outcome:
    """Windows of 70 elements: ranges are cut, with rests."""
    patches = {
        "": mock.patch.object(offload_optimizer, "WINDOW", 70),
        "weights stay": mock.patch.object(offload_optimizer.HostStage, "windows", _lost),
    }
    with mock.patch.object(offload_optimizer, "WINDOW", 70), patches[fault]:
        return train(case)


_windows = offload_optimizer.HostStage.windows


def _lost(self: offload_optimizer.HostStage, part: Range) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    for span, gradient, working in _windows(self, part):
        yield span, gradient, None if working is None else working.clone()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("stage", "where"), WHERE)
def test_training_equals_plain_torch(ranks, stage, where, kind):
    # Red when a window is used twice, and when working weights do not come back.
    case = job(stage, where, accumulation=2, optimizer=OptimizerConfig(kind=kind, momentum=0.9, weight_decay=0.0))
    reference = oracle(case)
    for outcome in ranks(2).run(train_in_windows, case):
        assert difference(outcome, reference) < TOLERANCE and outcome.steps[-1]["sync"] is None
    worst = max(difference(outcome, reference) for outcome in ranks(2).run(train_in_windows, case, "weights stay"))
    assert worst > 1e5 * TOLERANCE or where == "parameters"


@pytest.mark.parametrize(("stage", "where"), WHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_not_one_bit_differs(ranks, precision, stage, where):
    # Averages and skipped steps too.
    case = job(stage, where, precision=precision, ema=0.8, loss_scale=LossScaleConfig(initial=1024.0))
    if precision == "fp16":
        case = replace(case, inf=(1, 1, "layers.1.up.weight"))
    plain = ranks(2).run(train, replace(case, offload="none"))
    for ours, other in zip(ranks(2).run(train_in_windows, case), plain, strict=True):
        assert ours.losses == other.losses and ours.steps == other.steps
        assert all(torch.equal(ours.state[name], value) for name, value in other.state.items())


def snapshots(case: Job) -> list[tuple[str, bool]]:
    """What overwrites weights in host memory, and whether the device was waited for while they were still as before."""
    engine, seen = build(case), []
    one_step(engine, case, dist.get_rank(), 0, Outcome())

    def weights() -> torch.Tensor:
        return torch.cat([part.working.flatten().clone() for part in engine.parameters.ranges])

    def overwrite(name: str, action: Callable[[], None]) -> None:
        before, found = weights(), []
        with mock.patch.object(devices, "synchronize", lambda device: found.append(weights())):
            action()
        seen.append((name, bool(found) and torch.equal(found[0], before) and not torch.equal(weights(), before)))

    def by_hand() -> None:
        with engine.masters() as model, torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    def changed() -> None:
        for part in engine.parameters.ranges:
            if part.mixed:
                part.master.add_(1)
        engine.after_load()

    averaged = engine.averaged()
    overwrite("average in", averaged.__enter__)
    overwrite("average out", lambda: averaged.__exit__(None, None, None))
    overwrite("masters", by_hand)
    overwrite("fill", lambda: engine.fill(lambda name, placement: torch.full(placement.box.shape, 0.5)))
    if case.precision == "bf16":  # else the weights are the masters: nothing is left to do after a load
        overwrite("load", changed)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_memory_is_overwritten_only_when_no_copy_of_it_is_queued(ranks, precision):
    # Red without the wait in `settle`, or where `fill` or `refresh` does not settle first.
    for found in ranks(2).run(snapshots, job(3, "parameters", precision=precision, ema=0.5)):
        assert len(found) >= 4 and all(well for _, well in found), found


def test_everything_that_stays_on_the_host_is_pinned_alike():
    # Red when averages are cloned: their memory would be pageable.
    made: list[int] = []

    def noted(*args: Any) -> torch.Tensor:
        out = host_zeros(*args)
        made.append(out.data_ptr())
        return out

    with mock.patch.object(buffers, "host_zeros", noted):
        engine = build(Job(offload="optimizer", ema=0.5))
    parts = engine.parameters.ranges
    for kept in ([part.master for part in parts], engine.optimizer.averages, *map(dict.values, engine.optimizer.moments)):
        assert all(each.data_ptr() in made for each in kept) and kept
    for part, average in zip(parts, engine.optimizer.averages, strict=True):
        assert torch.equal(average, part.master) and average.any()


def test_parameters_stay_where_ranks_compute_with_whole_weights():
    with pytest.raises(LayoutError, match=r"plan\.offload"):
        parallelize(
            make_model(),
            plan=Plan(layout=Layout(), offload="parameters"),
            mesh=None,
            table=None,
            optimizer=OptimizerConfig(),
            device=torch.device("cpu"),
        )
