"""Optimizer state, and ZeRO-3's pieces of weights, in host memory: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.errors import LayoutError
from meshwright.parallel import offload
from meshwright.parallel.apply import parallelize
from meshwright.parallel.flat import Range
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.replicas import Job, Outcome, make_model, oracle, train
from tests.ranks.test_replicate import difference
from tests.ranks.test_zero import TOLERANCE, job_of

WHERE = [(0, "optimizer"), (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]


def job(stage: int, where: str, **settings: object) -> Job:
    made = job_of("2", stage, **settings) if stage else Job(world=2, **settings)  # type: ignore[arg-type]
    return replace(made, offload=where)


def train_in_windows(case: Job, fault: str = "") -> Outcome:
    """Windows of 70 elements: ranges are cut, with rests."""
    patches = {
        "": mock.patch.object(offload, "WINDOW", 70),
        "weights stay": mock.patch.object(offload.HostStage, "windows", _lost),
    }
    with mock.patch.object(offload, "WINDOW", 70), patches[fault]:
        return train(case)


_windows = offload.HostStage.windows


def _lost(self: offload.HostStage, part: Range) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
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
