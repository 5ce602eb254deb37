"""The training step and the evaluation around a pipeline: ranks that hold parts of one model count its rows once."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.data.loader import StepData
from meshwright.observe.clock import StepClock
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train import evaluate, step
from tests.ranks.pipelines import CLIP, LR, Job, make_batches, make_model, objective_of, oracle
from tests.ranks.pool import joined, layout_mesh
from tests.ranks.test_pipeline_engine import assemble

JOB = Job("tied", micros=2, steps=1)


def one_step(job: Job, layout: Layout) -> dict[str, Any]:
    engine, place = assemble(job, layout), 0
    if layout.dp > 1:
        mesh = layout_mesh(layout)
        place = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")
    mine = make_batches(replace(job, micros=job.micros * layout.dp), 0)[place :: layout.dp]
    rows = sum(len(batch.samples) for batch in mine)
    data = StepData(
        consumed_before=0,
        rows=rows * layout.dp,
        micro=mine,
        targets=sum(batch.targets() for batch in mine),
        tokens=sum(batch.tokens.numel() for batch in mine),
        local_rows=rows,
        dropped=0,
    )
    model = engine.model.config  # type: ignore[union-attr]
    run: Any = SimpleNamespace(
        config=SimpleNamespace(model=model, run=SimpleNamespace(seed=1), train=SimpleNamespace(noise_scale=True, clip=CLIP)),
        plan=Plan(layout),
        ranks=joined(),
        device=torch.device("cpu"),
        data_rank=place,
        engine=engine,
        clock=StepClock(),
        objective=objective_of(job),
        state=SimpleNamespace(step=0),
        stop=SimpleNamespace(local=torch.distributed.get_rank() == 1),
        recorder=SimpleNamespace(deferred=False),
        out_of_time=lambda: False,
    )
    agreed = step.agree(run, data)
    result = step.train_step(run, data, agreed, LR)
    loader: Any = SimpleNamespace(evaluate=lambda rows: mine * rows)
    figures = evaluate.evaluate(engine, run.objective, loader, rows=9, device=run.device)
    assert engine.model.training
    return {
        "agreed": asdict(agreed),
        "loss": float(result.loss),
        "norm": float(result.grad_norm),
        "noise": float(result.noise),
        "figures": figures,
    }


# red where `agree` lets every rank count, where the loss is not summed over the pipeline, and where the noise is
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_of_two_by_two_ranks_is_that_of_two(ranks, schedule):
    job = replace(JOB, schedule=schedule, chunks=2 if schedule == "zbv" else 1)
    found = ranks(4).run(one_step, job, Layout(pp=2, dp_replicate=2))
    (expected, again) = ranks(2).run(one_step, JOB, Layout(dp_replicate=2))
    assert expected == again and expected["agreed"]["stop"]
    for outcome in found:
        assert outcome["agreed"] == expected["agreed"]
        for key in ("loss", "norm", "noise"):
            assert outcome[key] == pytest.approx(expected[key], rel=1e-12), key
        assert outcome["figures"] == pytest.approx(expected["figures"], rel=1e-12)
    whole = replace(JOB, micros=4)
    plain, model, objective = oracle(whole), make_model(whole).eval(), objective_of(whole)
    model.load_state_dict(plain.weights, strict=False)
    with torch.no_grad():
        sums = sum(objective.evaluate(model, batch) for batch in make_batches(whole, 0))
    assert expected["figures"]["val_loss"] == pytest.approx(objective.figures(sums)["val_loss"], rel=1e-12)
    assert expected["figures"]["val_targets"] == 9 * float(sums[1])
    assert expected["loss"] == pytest.approx(plain.losses[0], rel=1e-12)
    assert expected["norm"] == pytest.approx(plain.norms[0], rel=1e-12)


# red (values of one reduction end in another) where a rank takes part in the noise's reduction only if it has measured:
# both ends of the V and the tie between them are on rank 0, whose first micro-step cannot be told apart
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, dp_shard=2, zero=2)], ids=["pp2", "zero2 pp2"])
def test_ranks_agree_on_whether_the_noise_is_measured(ranks, layout):
    job = replace(JOB, schedule="zbv", chunks=2, compile="eager")
    plain = oracle(replace(JOB, micros=JOB.micros * layout.dp))
    for outcome in ranks(layout.world).run(one_step, job, layout):
        assert math.isnan(outcome["noise"])
        assert outcome["loss"] == pytest.approx(plain.losses[0], rel=1e-12)
        assert outcome["norm"] == pytest.approx(plain.norms[0], rel=1e-12)
