"""Training in fp8: the ranks of a layout compute what one process does with the same micro-batches, and a model learns in it as
in bf16."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import ModelConfig, ObjectiveConfig, OptimizerConfig
from meshwright.data.batch import Batch
from meshwright.errors import LayoutError
from meshwright.models import build, initialize
from meshwright.parallel.apply import Engine, parallelize
from meshwright.parallel.fp8 import Fp8Linear
from meshwright.spec.box import Box
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.objectives import Objective
from tests.ranks.pool import layout_mesh

VOCAB, LENGTH, MICROS = 29, 12, 4
MODEL = ModelConfig(arch="decoder", layers=3, width=32, heads=2, ffn=48, vocab=VOCAB, max_len=16, mlp_bias=True)
OBJECTIVE = Objective(ObjectiveConfig(kind="causal_lm"), "lm", 0)


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    notes: list[str]
    pieces: list[tuple[str, Box, torch.Tensor]]
    """Of the gradients."""


def batches(step: int, rows: int = 2) -> list[Batch]:
    """Of a sequence in which the next token is mostly a function of this one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (MICROS * rows, LENGTH + 1), generator=generator)
    for place in range(LENGTH):
        follows = torch.rand(tokens.shape[0], generator=generator) < 0.8
        tokens[:, place + 1] = torch.where(follows, (7 * tokens[:, place] + 3) % VOCAB, tokens[:, place + 1])
    return [Batch(tokens=part[:, :-1], labels=part[:, 1:], samples=torch.arange(rows)) for part in tokens.split(rows)]


def assemble(plan: Plan, model: ModelConfig = MODEL) -> Engine:
    built: nn.Module = build(model, "lm")
    initialize(built, 3, "cpu")
    mesh = layout_mesh(plan.layout) if plan.layout.world > 1 else None
    cpu = torch.device("cpu")
    return parallelize(built, plan=plan, mesh=mesh, table=None, optimizer=OptimizerConfig(), device=cpu)


def one_step(engine: Engine, mine: list[Batch], total: int, lr: float = 3e-3) -> tuple[float, list[Any], float]:
    """Loss of these micro-batches, gradients, norm. total: targets of the step."""
    losses: list[float] = []
    engine.zero()
    engine.run(
        len(mine),
        lambda model, number: OBJECTIVE.loss(model, mine[number], None),
        1 / total,
        lambda number, parts: losses.append(float(parts.loss_sum.detach())),
        nullcontext,
    )
    engine.finish()
    found = [(piece.name, piece.box, piece.tensor.clone()) for piece in engine.gradient_state()]
    return sum(losses) / total, found, float(engine.update(lr, 1.0).grad_norm)


def train(plan: Plan, fault: str = "") -> Step:
    """One step, whose micro-batches are dealt to the data ranks in turn."""
    if fault == "one rank in bf16" and dist.get_rank():
        plan = replace(plan, precision="bf16")
    engine, layout, place = assemble(plan), plan.layout, 0
    if layout.world > 1:
        mesh = layout_mesh(layout)
        place = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")
    given = batches(0)
    loss, found, norm = one_step(engine, given[place :: layout.dp], sum(batch.targets() for batch in given))
    return Step(loss, norm, list(engine.notes), found)


def difference(ranks: Any, plan: Plan, fault: str = "") -> float:
    """The largest of gradients and norm from those of one process, relative to the largest element of a parameter."""
    expected = train(Plan(precision="fp8", micro_batch=2))
    whole = {name: values for name, _, values in expected.pieces}
    worst = 0.0
    for step in ranks(plan.layout.world).run(train, plan, fault):
        worst = max(worst, abs(step.norm / expected.norm - 1))
        for name, box, values in step.pieces:
            wanted = whole[name][box.inside(Box.whole(whole[name].shape))]
            worst = max(worst, float((values - wanted).abs().max() / whole[name].abs().max()))
    return worst


FP8 = Plan(precision="fp8", micro_batch=2)
PLANS = {
    "data": replace(FP8, layout=Layout(dp_replicate=2)),
    "zero2": replace(FP8, layout=Layout(dp_shard=2, zero=2)),
    "zero3 recomputed": replace(FP8, layout=Layout(dp_shard=2, zero=3), recompute="full"),
    "pipeline": replace(FP8, layout=Layout(pp=2), recompute="selective"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_process(ranks, name):
    # A sum of fp32 in another order. What would be seen: the next test.
    assert difference(ranks, PLANS[name]) < 2e-6


def test_a_rank_that_multiplies_in_bf16_would_be_seen(ranks):
    assert difference(ranks, PLANS["data"], "one rank in bf16") > 1e-3


def test_which_layers_are_converted():
    """Mutations tried, each red: the note with another number; evaluation in 8 bits."""
    engine, plain = assemble(FP8), assemble(replace(FP8, precision="bf16"))
    model = engine.model
    eight = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert eight == {
        f"layers.{n}.{leaf}" for n in range(3) for leaf in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.model.named_parameters()]
    assert any(note.startswith("12 linear layers multiply in fp8") and "emulated" in note for note in engine.notes)
    assert not any("fp8" in note for note in plain.notes)
    tokens = batches(0)[0].tokens
    with torch.no_grad():
        assert torch.equal(model(tokens), plain.model(tokens))
    assert not torch.equal(model(tokens), plain.model(tokens))


def test_sizes_that_do_not_divide_stay_in_bf16_and_are_named():
    # Red when such a layer is converted all the same, and when the note does not name it.
    odd = MODEL.model_copy(update={"ffn": 40})
    engine = assemble(FP8, odd)
    assert isinstance(engine.model.layers[0].mlp.up, Fp8Linear)  # 80 rows, of gate and up
    assert not isinstance(engine.model.layers[0].mlp.down, Fp8Linear)
    assert any("no multiples of 16: mlp.down (32 x 40)" in note for note in engine.notes)
    with pytest.raises(LayoutError, match=r"no linear layer.*attention\.qkv \(72 x 24\)"):
        assemble(FP8, MODEL.model_copy(update={"width": 24, "ffn": 40}))


def test_a_model_of_experts_has_its_attention_in_fp8():
    engine = assemble(FP8, MODEL.model_copy(update={"experts": 4, "moe_ffn": 32, "experts_per_token": 2, "mlp_bias": False}))
    eight = [name.split(".", 2)[2] for name, module in engine.model.named_modules() if isinstance(module, Fp8Linear)]
    assert eight == ["attention.qkv", "attention.out"] * 3


def test_a_foreign_model_is_refused():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    with pytest.raises(LayoutError, match="known of Meshwright's own models only"):
        parallelize(Other(), plan=FP8, mesh=None, table=None, optimizer=OptimizerConfig(), device=torch.device("cpu"))


@pytest.mark.slow
def test_a_model_learns_as_in_bf16():
    """Within 1% after 60 steps; 0.02% apart when written. Mutation tried, red: the gradient of the input without the scale of
    its rows (2.4%). Coarser numbers (e5m2: 0.1%) are seen by the tests of the layer, not by this one."""
    ends = {}
    for precision in ("bf16", "fp8"):
        engine, losses = assemble(replace(FP8, precision=precision)), []
        for step in range(60):
            given = batches(step, rows=8)
            losses.append(one_step(engine, given, sum(batch.targets() for batch in given), lr=1e-2)[0])
        ends[precision] = (losses[0], sum(losses[-10:]) / 10)
    assert ends["bf16"][1] < 0.6 * ends["bf16"][0]  # it does learn
    assert abs(ends["fp8"][1] / ends["bf16"][1] - 1) < 0.01, ends
