"""ZeRO-1, ZeRO-2 and hybrid sharding compute what one process computes, hold what the formula says, and resume anywhere."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.parallel import update, zero
from meshwright.parallel.engine import Axes
from meshwright.spec.layout import Layout
from tests.ranks.replicas import Job, Outcome, oracle, train
from tests.ranks.test_replicate import difference

TOLERANCE = 1e-11
SHAPES = {"2": {"dp_shard": 2}, "4": {"dp_shard": 4}, "2x2": {"dp_replicate": 2, "dp_shard": 2}}


def job_of(shape: str, stage: int, **settings) -> Job:
    layout = Layout(**SHAPES[shape], zero=stage)
    return Job(world=layout.world, layout=layout, **settings)


def run(ranks, job: Job) -> list[Outcome]:
    return ranks(job.world).run(train, job)


@pytest.mark.parametrize("clip", [0.1, 0.0])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", [1, 2])
def test_three_steps_equal_one_process_of_plain_torch(ranks, stage, shape, accumulation, clip):
    # Tied head, a block used twice, a frozen and an unused weight, uneven masks. Red with each of the faults below.
    job = job_of(shape, stage, accumulation=accumulation, clip=clip)
    reference = oracle(job)
    for outcome in run(ranks, job):
        assert outcome.buckets >= 4
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-12)
        assert [float(norm) for norm in outcome.norms] == pytest.approx([float(n) for n in reference.norms], rel=1e-12)
        assert difference(outcome, reference) < TOLERANCE
        assert outcome.steps[-1]["sync"] is None
