"""Layers of experts on one device, against a loop over tokens and against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.config.schema import ModelConfig
from meshwright.errors import ConfigError
from meshwright.models import build, initialize
from meshwright.models.initialize import fill, values_of
from meshwright.models.moe import MoE, Router
from meshwright.parallel.balance import Balance
from meshwright.spec.box import Box
from meshwright.spec.model_table import model_table
from meshwright.spec.placement import Placement

SIZES: dict[str, Any] = {"layers": 2, "width": 24, "heads": 4, "ffn": 40, "vocab": 67, "experts": 5, "init_std": 0.3}


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **changes})


def layer_of(config: ModelConfig) -> MoE:
    layer = MoE(config, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for module in (layer.router, layer.experts):
        for name, parameter in list(module.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
            setattr(module, name, torch.nn.Parameter(values))
    return layer


def inputs(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randn(rows, length, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one_by_one(layer: MoE, x_BSD: torch.Tensor, real_BS: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Every token by itself, with matrices whose gate and value are told apart by their rows."""
    out = torch.zeros_like(x_BSD)
    rows = layer.experts.gate_rows
    for b, s in real_BS.nonzero().tolist():
        p = (layer.router.weight @ x_BSD[b, s]).softmax(0)
        chosen = p.topk(config.experts_per_token).indices
        total = p[chosen].sum() if config.router_normalised else 1.0
        for e in chosen.tolist():
            hidden = layer.experts.up[e] @ x_BSD[b, s]
            if rows:
                hidden = hidden.view(-1, 2, rows)
                hidden = (F.silu(hidden[:, 0]) * hidden[:, 1]).flatten()
            else:
                hidden = F.gelu(hidden)
            out[b, s] = out[b, s] + p[e] / total * (layer.experts.down[e] @ hidden)
    return out


# Mutations, each red: results left in the order of the sorted rows; the weights not made to sum to 1; padding sent to experts.
@pytest.mark.parametrize(
    "changes", [{}, {"router_normalised": False, "experts_per_token": 3}, {"activation": "gelu", "moe_ffn": 17}]
)
def test_a_layer_is_its_experts_token_by_token(changes):
    config = config_of(**changes)
    layer, x = layer_of(config), inputs().requires_grad_()
    documents = torch.zeros(3, 7, dtype=torch.int32)
    documents[1, 4:] = -1
    expected = one_by_one(layer, x, documents >= 0, config)
    out, routing = layer(x, documents)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert routing.load_BE.sum(1).tolist() == [real * config.experts_per_token for real in (7, 4, 7)]
    wanted = [x, *layer.router.parameters(), *layer.experts.parameters()]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((out * weights).sum(), wanted), torch.autograd.grad((expected * weights).sum(), wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def router_of(logits_SE: torch.Tensor, **changes: Any) -> tuple[Router, torch.Tensor]:
    """A router that gives exactly these logits for the unit vectors."""
    length, experts = logits_SE.shape
    router = Router(config_of(width=length, experts=experts, **changes), torch.float64)
    router.weight = torch.nn.Parameter(logits_SE.t().contiguous())
    return router, torch.eye(length, dtype=torch.float64)[None]


def test_balance_by_hand():
    # 4 tokens, 3 experts, one each: two choose 0, two choose 1. f = 3 / 4 * (2, 2, 0); P = mean of p. Red when f is divided by
    # the experts, when the mean takes padding in, and when the z term is of p.
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    router, x = router_of(p.log(), experts_per_token=1, balance_coefficient=0.5)
    documents = torch.tensor([[0, 0, 0, 0, -1]])
    _, _, routing = router(x, documents)
    assert routing.load_BE.tolist() == [[2, 2, 0]] and routing.dropped_B.tolist() == [0]
    mean = p[:4].mean(0)
    assert float(routing.balance_B[0].detach()) == pytest.approx(0.5 * (1.5 * mean[0] + 1.5 * mean[1]).item(), rel=1e-14)
    shifted, x = router_of(p.log() + 2.0, experts_per_token=1, balance="none", router_z_loss=0.25)
    assert float(shifted(x, documents)[2].balance_B[0].detach()) == pytest.approx(0.25 * 4.0, rel=1e-14)  # logsumexp is 2
    even, x = router_of(torch.zeros(4, 2, dtype=torch.float64), experts_per_token=2, balance_coefficient=1.0)
    assert float(even(x, None)[2].balance_B[0].detach()) == pytest.approx(1.0, rel=1e-14)


def test_capacity_takes_the_first_tokens_of_a_row_and_counts_the_others():
    # All 6 tokens choose 0 first, 1 second. ceil(0.5 * 2 * 6 / 3) = 2 places an expert. Red when places are counted over the
    # batch, and when the last ones are taken.
    logits = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64).expand(6, 3).contiguous()
    router, x = router_of(logits, capacity=0.5)
    gates, ids, routing = router(x.expand(2, 6, 6), None)
    assert ids.tolist() == [[[0, 1], [0, 1], *[[3, 3]] * 4]] * 2
    assert routing.dropped_B.tolist() == [8, 8] and routing.load_BE.tolist() == [[6, 6, 0]] * 2
    assert (gates[:, 2:] == 0).all() and (gates[:, :2].sum(-1) - 1).abs().max() < 1e-15


def test_a_bias_steers_the_choice_and_not_the_weight():
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    router, x = router_of(p.log(), experts_per_token=1, balance="bias", router_normalised=False)
    router.bias += torch.tensor([0.0, 0.0, 0.4])
    gates, ids, routing = router(x, None)
    assert ids.item() == 2 and gates.item() == pytest.approx(0.2, rel=1e-12) and routing.balance_B is None


def test_biases_move_towards_the_mean_load():
    # Loads 6 2 4 0 0, mean 2.4. Red with the sign turned, and when a skipped step moves them.
    model = build(config_of(balance="bias", balance_coefficient=0.01), "lm")
    initialize(model, 0, "cpu")
    balance = Balance.of(model, None, None)
    assert balance is not None and Balance.of(build(config_of(experts=0), "lm"), None, None) is None
    balance.start()
    for layer in balance.layers:
        layer.load += torch.tensor([6, 2, 4, 0, 0])
        layer.dropped += 3
    assert balance.figures().tolist() == [6 / 2.4, 6.0]
    balance.update(torch.tensor(True))
    assert not balance.layers[0].router.bias.any()
    balance.update(torch.tensor(False))
    torch.testing.assert_close(balance.layers[1].router.bias, torch.tensor([-0.01, 0.01, -0.01, 0.01, 0.01]))
    balance.start()
    assert not balance.layers[0].load.any() and not balance.layers[0].dropped.any()


# Red when the terms of a batch are averaged over its rows, and when rows without a target count.
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_any_split_of_a_batch_gives_the_same_sums_and_loads(capacity):
    model = build(config_of(capacity=capacity, balance_coefficient=0.3, router_z_loss=0.1), "lm")
    initialize(model, 0, "cpu", torch.float64)
    tokens = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[0, 3:] = labels[2] = -100
    documents = torch.zeros(4, 9, dtype=torch.int32)
    documents[3, 5:] = -1

    def of(parts: list[slice]) -> tuple[torch.Tensor, list[torch.Tensor], list[int], list[int]]:
        model.zero_grad()
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        for layer in layers:
            layer.load.zero_(), layer.dropped.zero_()
        total = torch.zeros(())
        for part in parts:
            found = model(tokens[part], documents=documents[part], labels=labels[part])
            (found.loss_sum + found.balance_sum).backward()
            total = total + found.balance_sum.detach()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return total, gradients, layers[0].load.tolist(), [int(layer.dropped) for layer in layers]

    whole, apart = of([slice(0, 4)]), of([slice(0, 1), slice(1, 4)])
    assert float(whole[0]) == pytest.approx(float(apart[0]), rel=1e-12) and float(whole[0]) > 0
    assert whole[2:] == apart[2:] and sum(whole[2]) == 2 * (9 + 9 + 5), "a row without a target does not count"
    assert (whole[3] > [0, 0]) is (capacity is not None)
    for a, b in zip(whole[1], apart[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_what_is_evaluated_is_the_loss_alone():
    model = build(config_of(), "lm")
    initialize(model, 0, "cpu")
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        parts = model(tokens, labels=tokens)
    assert parts.balance_sum is None and not any(m.load.any() for m in model.modules() if isinstance(m, MoE))


def test_an_expert_has_values_of_its_own_whoever_holds_it():
    # Red when the number of an expert is that in the block, and when all experts are drawn under one name.
    config = config_of(experts=6)
    table, name, shape = model_table(config, "lm"), "layers.1.mlp.experts.up", (6, 80, 24)
    whole = values_of(table, Placement.whole(name, shape), 7)
    assert whole.std() == pytest.approx(0.3, rel=0.05) and len({float(expert[0, 0]) for expert in whole}) == 6
    block = Box((2, 16, 0), (3, 32, 24))
    assert torch.equal(values_of(table, Placement(name, shape, block), 7), whole[block.inside(Box.whole(shape))])
    gate = fill(table.rule("layers.0.mlp.router.weight"), "layers.1.mlp.experts.4.gate.weight", (40, 24), None, 7)
    assert torch.equal(whole[4].view(-1, 2, 8, 24)[:, 0].reshape(40, 24), gate)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"experts": 0, "capacity": 1.5, "moe_ffn": 8},
            r"model\.moe_ffn: 8 has no effect[\s\S]*model\.capacity: 1\.5 has no effect",
        ),
        ({"experts": 3, "experts_per_token": 4}, "4 is more than the 3 experts"),
        ({"mlp_bias": True}, "experts have no biases"),
        ({"arch": "encoder", "positions": "learned"}, "only a decoder has a router"),
        ({"balance": "none", "balance_coefficient": 0.5}, "no effect with balance: none"),
    ],
)
def test_what_cannot_be(changes, what):
    with pytest.raises(ConfigError, match=what):
        build(config_of(**changes), "mlm" if changes.get("arch") == "encoder" else "lm")
