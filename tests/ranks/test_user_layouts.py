"""`run.parallelize` of a user's transformer over tensor, pipeline and context ranks: what plain torch gives on one process."""

from __future__ import annotations

import functools
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from meshwright.runtime.run import Run
from tests.ranks.foreign_models import KINDS, made
from tests.ranks.pool import joined

ROOT = Path(__file__).parents[2]
ROWS = 11
"""With batches of 4: 4, 4 and 3 rows: micro-batches of 2, 2 and 1 or 3, and of several data ranks one has more."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"layout": {"tp": 2}},
    "pp": {"layout": {"pp": 2}},
    "tp-pp": {"layout": {"tp": 2, "pp": 2}},
    "zero1-pp": {"layout": {"dp_shard": 2, "zero": 1, "pp": 2}},
    "zero3-pp": {"layout": {"dp_shard": 2, "zero": 3, "pp": 2}, "schedule": "zero_bubble"},
    "zero2-tp": {"layout": {"dp_shard": 2, "zero": 2, "tp": 2}, "sequence_parallel": False, "recompute": "full"},
    "cp": {"layout": {"cp": 2}, "context": "ring"},
    "cp-pp": {"layout": {"cp": 2, "pp": 2}},
}


@functools.cache
def simple_class() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "simple_transformer.py"))["SimpleTransformer"]


def module(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "simple":
        return simple_class()(17, 8, 2, 3, 8).double()
    model = made(KINDS[kind])
    if kind == "llama":  # their rotary angles are in fp32, whatever the model is in
        model.model.rotary_emb = Rotary(4)  # type: ignore[union-attr]  # a LlamaForCausalLM
    return model


class Rotary(nn.Module):
    """Of Llama, in the dtype of its input."""

    def __init__(self, width: int, theta: float = 10000.0):
        super().__init__()
        self.width, self.theta = width, theta

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        speeds = self.theta ** -(torch.arange(0, self.width, 2, dtype=x.dtype) / self.width)
        angles = (position_ids[..., None].to(x.dtype) * speeds).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def data() -> DataLoader:
    """Tokens, mask, labels [rows, 8]: rows of 5 to 8 real tokens, and as many targets or fewer."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, 17, (ROWS, 8), generator=draw)
    mask = (torch.arange(8)[None] < 5 + torch.arange(ROWS)[:, None] % 4).long()
    labels = torch.randint(3, (ROWS, 8), generator=draw).masked_fill(mask == 0, -100)
    return DataLoader(
        TensorDataset(tokens, mask, labels), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)
    )


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask, labels = batch
    logits = model(tokens) if getattr(model, "config", None) is None else model(tokens, attention_mask=mask).logits
    if logits.dim() == 2:
        labels = labels[:, 0]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


def meant(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, mask, labels = batch
    output = model(input_ids=tokens, attention_mask=mask, labels=labels)
    assert output["loss"] is output.loss and output[1] is output.logits
    return output.loss


def targets(batch: Any, shift: int) -> int:
    return int((batch[2][:, shift:] != -100).sum())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    bare = [p for name, p in model.named_parameters() if "norm" in name.lower() or "bias" in name or ".ln_" in name]
    rest = [p for p in model.parameters() if not any(p is other for other in bare)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": bare, "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None


def shift_of(kind: str) -> int:
    return 1 if kind in ("gpt2", "llama") else 0


def whole_batch() -> Any:
    return next(iter(DataLoader(data().dataset, batch_size=4)))


def logits_of(model: nn.Module) -> torch.Tensor:
    """In evaluation, outside of a step."""
    model.eval()
    with torch.no_grad():
        out = model(whole_batch()[0])
    return getattr(out, "logits", out)


@functools.cache
def oracle(kind: str, how: str = "sum") -> Outcome:
    """Plain torch: nothing of ours."""
    model, found = module(kind), Outcome()
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    for batch in data():
        if how == "sum":
            total, count = summed(model, batch)
            loss = total / count
        else:
            loss = meant_plainly(model, batch, shift_of(kind))
        opt.zero_grad()
        loss.backward()
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        found.losses.append(float(loss.detach()))
        opt.step()
        schedule.step()
    found.weights = {name: value.clone() for name, value in model.state_dict().items()}
    found.logits = logits_of(model)
    return found


def meant_plainly(model: nn.Module, batch: Any, shift: int) -> torch.Tensor:
    """Their own loss is computed in fp32, whatever the model is in; the test below compares it."""
    tokens, mask, labels = batch
    logits = model(input_ids=tokens, attention_mask=mask).logits
    logits = logits[:, : logits.shape[1] - shift] if logits.dim() == 3 else logits
    return F.cross_entropy(logits.flatten(0, -2), labels[:, shift:].flatten())


def trained(kind: str, layout: str, how: str, micro: int | None) -> Outcome:
    run, theirs, found = Run(joined()), module(kind), Outcome()
    torch.manual_seed(run.rank)
    if run.rank:  # parameters start as they are on rank 0
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) / 100)
    opt = optimizer(theirs)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    model, opt, batches = run.parallelize(theirs, opt, data(), plan=LAYOUTS[layout], clip=0.5, micro_batch=micro)
    assert model is not theirs and model.training
    for batch in batches:
        if how == "sum":
            loss = run.step(batch, summed)
        else:
            loss = run.step(batch, meant, weight_fn=lambda part: targets(part, shift_of(kind)))
        assert run.result is not None
        found.losses.append(float(loss))
        found.norms.append(float(run.result.grad_norm))
        schedule.step()
    found.weights = run.state_dict()
    found.logits = logits_of(model)
    assert run.give_back() is theirs
    assert all(torch.equal(value, found.weights[name]) for name, value in theirs.state_dict().items())
    return found


FAST = [
    ("simple", "tp-pp", "sum", 2),
    ("simple", "zero1-pp", "sum", None),
    ("simple", "cp", "sum", None),
    ("gpt2", "pp", "mean", 2),
    ("gpt2", "tp", "mean", None),
    ("bert", "tp-pp", "mean", 1),
    ("bert", "zero1-pp", "sum", 2),
]
SLOW = [
    (kind, layout, "sum" if kind in ("simple", "classifier") else "mean", micro)
    for kind in ("simple", "gpt2", "bert", "classifier", "llama")
    for layout in LAYOUTS
    for micro in (None, 1)
    if (kind, layout) not in [(k, where) for k, where, *_ in FAST]
]


# Mutations, each red: weights counted on every rank; the sums of cp counted on both; one label for all parameters; stand-ins
# that weigh; logits of cp in the order of the ranks; labels of a decoder not moved.
@pytest.mark.parametrize(
    ("kind", "layout", "how", "micro"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_users_transformer_trains_as_in_plain_torch(ranks, kind: str, layout: str, how: str, micro: int | None):
    reference = oracle(kind, how)
    sizes = LAYOUTS[layout]["layout"]
    world = functools.reduce(lambda a, b: a * b, (size for name, size in sizes.items() if name != "zero"))
    for found in ranks(world).run(trained, kind, layout, how, micro):
        assert found.losses == pytest.approx(reference.losses, rel=1e-12, abs=1e-12)
        assert found.norms == pytest.approx(reference.norms, rel=1e-11)
        assert found.weights.keys() == reference.weights.keys()
        for name, value in reference.weights.items():
            assert float((found.weights[name] - value).abs().max()) < 1e-11, name
        torch.testing.assert_close(found.logits, reference.logits, rtol=0, atol=1e-10)
