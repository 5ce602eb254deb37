"""Recorded blocks on data ranks: weights that arrive, and gradients that leave, where the recording has them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.distributed import device as devices
from meshwright.spec.layout import Layout
from tests.ranks.pool import layout_mesh
from tests.unit import test_parallel_graphs as alone

LAYOUTS = {
    "replicated": Layout(dp_replicate=2),
    "zero-1": Layout(dp_shard=2, zero=1),
    "zero-2": Layout(dp_shard=2, zero=2),
}


def trained(layout: Layout, graphs: bool) -> tuple[list[torch.Tensor], int]:
    """What `train` saw, of rows of this rank's own, and how often something was replayed."""
    made: list[alone.Standing] = []

    def make(device: torch.device) -> alone.Standing:
        made.append(alone.Standing(device))
        return made[-1]

    with mock.patch.object(devices, "Recorder", make), mock.patch.object(devices, "records", lambda device: True):
        engine = alone.engine_of("decoder", graphs=graphs, precision="bf16", layout=layout, mesh=layout_mesh(layout))
        rank = dist.get_rank()
        own = {"between": False, "extra": lambda step, n: alone.batch(step, 10 + 2 * n + rank)}  # nothing settles the weights
        seen = alone.train(engine, steps=3, micro=2, **own)
    return seen, sum(each.replayed for each in made)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_to_the_same_bits(ranks, name):
    # Red when the gradient of the last output is not copied in.
    ours, plain = (ranks(2).run(trained, LAYOUTS[name], graphs) for graphs in (True, False))
    for (mine, replayed), (called, _) in zip(ours, plain, strict=True):
        assert alone.same(mine, called) and replayed == 2 * alone.LAYERS * 5
    assert not torch.equal(ours[0][0][0], ours[1][0][0])
