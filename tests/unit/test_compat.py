"""Canaries: what `meshwright.compat` hides still is as it believes. One that fails says what to look at after an upgrade."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.distributed.environment import World
from meshwright.distributed.world import init_world


def test_the_collectives_are_the_newest_names_and_do_not_warn():
    for name, old in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")):
        assert hasattr(dist, name) or hasattr(dist, old), f"neither {name} nor {old}: torch renamed it again"
    with init_world(World()), warnings.catch_warnings():
        warnings.simplefilter("error")
        out, source = torch.empty(3), torch.arange(3.0)
        compat.all_gather_single(out, source)
        assert torch.equal(out, source)
        compat.reduce_scatter_single(out, 2 * source)
        assert torch.equal(out, 2 * source)


def test_a_scheduler_sees_a_step_by_the_name_that_we_set():
    """Red when torch calls it otherwise: a scheduler's first step then warns."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compat.count_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
