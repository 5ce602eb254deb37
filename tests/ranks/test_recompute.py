"""Recompute under data parallelism and ZeRO, and with collectives inside of blocks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.recompute import recompute_blocks
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks import replicas
from tests.ranks.replicas import Job, Outcome

PLANS = {
    "selective": Plan(recompute="selective"),
    "full": Plan(recompute="full", recompute_every=2),
    "offload": Plan(recompute="full", offload_activations=True),
}


def train(job: Job, plan: Plan) -> Outcome:
    plain = replicas.make_model

    def wrapped(*args) -> nn.Module:
        model = plain(*args)
        recompute_blocks(model, plan)
        return model

    with mock.patch.object(replicas, "make_model", wrapped):
        return replicas.train(job)


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2, zero=2)], ids=["replicated", "zero"])
def test_two_ranks_train_to_the_same_bits_with_recompute(ranks, how, layout):
    # Red when a recomputed block's generator or weights differ; one block of the model is used twice.
    job = Job(world=2, layout=layout, accumulation=2)
    for ours, plain in zip(ranks(2).run(train, job, PLANS[how]), ranks(2).run(train, job, Plan()), strict=True):
        assert ours.losses == plain.losses
        assert all(torch.equal(ours.state[name], value) for name, value in plain.state.items())


class Summed(torch.autograd.Function):
    """Sum over the ranks, as after the second matrix of a tensor-parallel layer."""

    @staticmethod
    def forward(ctx, x, copy):
        out = x.clone() if copy else x
        dist.all_reduce(out)
        return out if copy else out.view_as(out)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Parallel(nn.Module):
    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.up, self.down, self.copy = nn.Linear(4, 6), nn.Linear(6, 4), copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Summed.apply(self.down(torch.tanh(self.up(x))), self.copy)
        return torch.tanh(y) * y


def with_collective(how: str, copy: bool) -> torch.Tensor | str:
    """Gradient of `up`, or the error."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Parallel(copy)]).double()
    recompute_blocks(model, Plan(recompute=how))
    x = torch.randn(3, 4, dtype=torch.float64)
    try:
        model.layers[0](x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return model.layers[0].up.weight.grad


def test_collectives_are_repeated_and_one_that_overwrites_a_kept_output_is_seen(ranks):
    # Red without the version count: "selective" then reduces the kept, already reduced output once more, without a word.
    for copy in (True, False):
        plain = ranks(2).run(with_collective, "none", copy)
        assert all(torch.equal(a, b) for a, b in zip(plain, ranks(2).run(with_collective, "full", copy), strict=True))
        selective = ranks(2).run(with_collective, "selective", copy)
        if copy:
            assert all(torch.equal(a, b) for a, b in zip(plain, selective, strict=True))
        else:
            assert all("has been mutated" in str(each) for each in selective)
