"""The flat optimizer against torch.optim, parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.optimizer import FlatOptimizer


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"body": nn.Linear(5, 7), "norm": nn.LayerNorm(7), "embedding": nn.Embedding(3, 5)}).double()


def pair(config: OptimizerConfig, ema: float = 0.0):
    ours, theirs = model(), model()
    parameters = FlatParameters(ours, dtype=torch.float64, device=torch.device("cpu"), no_decay=config.no_decay, table=None)
    optimizer = FlatOptimizer(config, parameters, ema)
    named = dict(theirs.named_parameters())
    decayed = {"body.weight"}
    groups = [
        {"params": [named[name] for name in named if name in decayed], "weight_decay": config.weight_decay},
        {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
    ]
    if config.kind == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.eps)
    else:
        reference = torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    for group in parameters.groups:
        group.use_gradient(torch.float64)
    return parameters, optimizer, named, reference


CONFIGS = [
    OptimizerConfig(weight_decay=0.4),
    OptimizerConfig(weight_decay=0.0, betas=(0.8, 0.99), eps=1e-3),
    OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.2),
    OptimizerConfig(kind="sgd", weight_decay=0.2),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_updates_equal_torch_and_decay_leaves_bias_norm_and_embedding(config):
    # Red when decay reaches the no-decay group, when the scale is left out, and when the step count starts at 0.
    parameters, optimizer, named, reference = pair(config)
    never = torch.tensor(False)
    for step in range(4):
        torch.manual_seed(step)
        lr, scale = 0.1 / (step + 1), 0.5 + step
        for group, slot in parameters.each():
            gradient = torch.randn(slot.shape, dtype=torch.float64)
            slot.of(group.gradient).copy_(gradient)
            named[slot.name].grad = gradient * scale
        for settings in reference.param_groups:
            settings["lr"] = lr
        optimizer.step(lr, torch.tensor(scale, dtype=torch.float64), never)
        reference.step()
    for slot in parameters.slots:
        assert float((slot.parameter.detach() - named[slot.name].detach()).abs().max()) < 1e-13
    assert optimizer.updates == 4


@pytest.mark.parametrize("config", CONFIGS)
def test_a_skipped_update_changes_no_bit_and_does_not_count(config):
    parameters, optimizer, _, _ = pair(config, ema=0.5)
    one = torch.tensor(1.0, dtype=torch.float64)
    for group in parameters.groups:
        group.gradient.fill_(0.25)
    optimizer.step(0.1, one, torch.tensor(False))
    held = [group.master for group in parameters.groups] + optimizer.averages
    held += [tensor for moments in optimizer.moments for tensor in moments.values()]
    before = [tensor.clone() for tensor in held]
    for group in parameters.groups:
        group.gradient.fill_(torch.nan)
    optimizer.step(0.1, one, torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert optimizer.updates == 1


def test_padding_stays_zero_so_that_sums_over_a_buffer_are_sums_over_parameters():
    parameters, optimizer, _, _ = pair(OptimizerConfig())
    for step in range(3):
        for group, slot in parameters.each():
            slot.of(group.gradient).fill_(1.0 + step)
        optimizer.step(0.1, torch.tensor(1.0, dtype=torch.float64), torch.tensor(False))
    for group, moments in zip(parameters.groups, optimizer.moments, strict=True):
        used = torch.zeros(group.size, dtype=torch.bool)
        for slot in group.slots:
            slot.of(used).fill_(True)
        assert not used.all()
        for buffer in (group.master, group.gradient, *moments.values()):
            assert not buffer[~used].any()


def test_the_moments_kept_are_those_the_rule_needs():
    kinds = [set(pair(config)[1].moments[0]) for config in CONFIGS]
    assert kinds == [{"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq"}, {"momentum"}, set()]
