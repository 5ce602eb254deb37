"""A user's encoder under tensor and pipeline parallelism: trained weights are those of the user's own module in plain torch."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright.config.schema import OptimizerConfig
from meshwright.distributed.mesh import data_rank
from meshwright.models.adopt import adopt
from meshwright.parallel.apply import parallelize
from meshwright.parallel.whole import whole_weights
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.foreign_models import DECAY, EPS, KINDS, LR, ROWS, STEPS, made, rows_of
from tests.ranks.pool import layout_mesh

LAYOUTS = {
    "tp": Plan(Layout(tp=2), sequence_parallel=False),
    "pp": Plan(Layout(pp=2)),
    "zero2": Plan(Layout(dp_shard=2, zero=2)),
    "tp-pp": Plan(Layout(tp=2, pp=2), sequence_parallel=False),
    "zero3-pp": Plan(Layout(dp_shard=2, zero=3, pp=2), schedule="zero_bubble"),
    "data-tp": Plan(Layout(dp_replicate=2, tp=2), sequence_parallel=False, recompute="selective"),
}
CLIP = 0.3


def train(kind: str, layout: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """What is written back into the module, losses and norms."""
    theirs, plan = made(KINDS[kind]), LAYOUTS[layout]
    adopted, mesh = adopt(theirs), layout_mesh(plan.layout)
    place, ranks = data_rank(mesh)
    engine = parallelize(
        adopted.model,
        plan=Plan(**{**vars(plan), "precision": "fp64"}),
        mesh=mesh,
        table=adopted.model.table,
        optimizer=OptimizerConfig(weight_decay=DECAY, eps=EPS, no_decay=["bias", "norm"]),
        device=torch.device("cpu"),
    )
    losses, norms = [], []
    for step in range(STEPS):
        rows = {name: values.tensor_split(ranks)[place] for name, values in rows_of(KINDS[kind], step).items()}
        parts = [{name: values.tensor_split(2)[i] for name, values in rows.items()} for i in range(2)]
        total = torch.zeros((), dtype=torch.float64)
        engine.zero()
        engine.run(
            2,
            lambda model, i, parts=parts: model(**adopted.inputs(parts[i])),
            1.0 / ROWS,
            lambda _, taken, total=total: total.add_(taken.loss_sum.detach()),
        )
        engine.finish()
        norms.append(float(engine.update(LR, CLIP).grad_norm))
        dist.all_reduce(total)
        losses.append(float(total) / ROWS / plan.layout.tp)
    adopted.give_back(whole_weights(engine))
    return {name: p.detach() for name, p in theirs.named_parameters()}, losses, norms


@functools.cache
def oracle(kind: str) -> SimpleNamespace:
    model = made(KINDS[kind])
    every = dict(model.named_parameters())
    plain = [p for n, p in every.items() if "bias" in n or "norm" in n.lower() or ".ln_" in n]
    decayed = [p for p in every.values() if not any(p is other for other in plain)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        rows = rows_of(KINDS[kind], step)
        logits = model(rows["tokens"])
        logits, labels = getattr(logits, "logits", logits), rows["labels"]
        if kind == "gpt2":
            logits, labels = logits[:, :-1], labels[:, 1:]
        optimizer.zero_grad()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ROWS
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return SimpleNamespace(weights={name: p.detach() for name, p in every.items()}, losses=losses, norms=norms)


FAST = [("encoder", "tp-pp"), ("encoder", "zero3-pp"), ("gpt2", "tp"), ("bert", "pp")]
SLOW = [(kind, layout) for kind in ("encoder", "gpt2", "bert") for layout in LAYOUTS if (kind, layout) not in FAST]


# Mutation, red: what several tensor-parallel ranks hold is summed when weights are made whole.
@pytest.mark.parametrize(("kind", "layout"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_an_adopted_model_trains_as_the_module_that_it_was(ranks, kind, layout):
    reference = oracle(kind)
    for weights, losses, norms in ranks(LAYOUTS[layout].layout.world).run(train, kind, layout):
        assert losses == pytest.approx(reference.losses, rel=1e-12, abs=1e-12)
        assert norms == pytest.approx(reference.norms, rel=1e-11)
        for name, value in reference.weights.items():
            assert float((weights[name] - value).abs().max()) < 1e-11, name
