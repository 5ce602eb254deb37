"""What tests of a user's own script share: a small module, its rows, a plain torch loop as the oracle, the same by a `Run`."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright.runtime.run import Run
from tests.ranks.pool import joined

ROWS = 11
"""With batches of 4: 4, 4 and 3 rows, so that the last one leaves one of four ranks without any."""


class Tagger(nn.Module):
    """A user's transformer: one layer with attention, a tied head, a frozen scale and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.shift = nn.Parameter(torch.randn(8) / 4)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.shift) + self.shift) * self.scale


def module() -> nn.Module:
    torch.manual_seed(3)
    return Tagger().double()


def rows() -> TensorDataset:
    """Tokens and targets [rows, 5]; -1 is no target, and their number differs from row to row."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(7, (ROWS, 5), generator=draw)
    targets = torch.randint(7, (ROWS, 5), generator=draw)
    for row in range(ROWS):
        targets[row, : row % 4] = -1
    return TensorDataset(tokens, targets)


def loader() -> DataLoader:
    return DataLoader(rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))


def loss_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = batch
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return loss, (targets >= 0).sum()


def optimizer(model: nn.Module, kind: str = "adamw", **more: Any) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    bare = [p for name, p in model.named_parameters() if p.requires_grad and ("norm" in name or "bias" in name)]
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is other for other in bare)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": bare, "lr": 3e-3, "weight_decay": 0.0}]
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if kind == "adagrad":  # the key's bias has no gradient but rounding, which its first step would divide by itself
        more = {"eps": 1e-6, **more}
    return made[kind](groups, lr=1e-2, **more)


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def difference(self, other: Outcome) -> float:
        assert len(self.losses) == len(other.losses) and self.weights.keys() == other.weights.keys()
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=True)]
        far = [float((self.weights[name] - value).abs().max()) for name, value in other.weights.items()]
        return max([abs(a - b) for a, b in pairs] + far)


@functools.cache
def oracle(epochs: int = 2, clip: float = 0.5, kind: str = "adamw", skip: int = 0, **more: Any) -> Outcome:
    """Plain torch on one device: nothing of ours."""
    model, made = module(), Outcome()
    opt = optimizer(model, kind, **more)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    data = loader()
    for _ in range(epochs):
        for batch in data:
            total, count = loss_sum(model, batch)
            loss = total / count
            opt.zero_grad()
            loss.backward()
            made.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            made.losses.append(float(loss.detach()))
            opt.step()
        schedule.step()
    made.weights = copy.deepcopy(dict(model.state_dict()))
    made.losses, made.norms = made.losses[skip:], made.norms[skip:]
    return made


def by_step(plan: Any, options: dict[str, Any], kind: str = "adamw", epochs: int = 2, **more: Any) -> Outcome:
    """On every rank: `run.step`."""
    run, model, made = Run(joined()), module(), Outcome()
    opt = optimizer(model, kind, **more)
    before = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)  # made before parallelize: it holds the user's own object
    model, opt, data = run.parallelize(model, opt, loader(), plan=plan, clip=0.5, **options)
    assert len(data) == 3
    for _ in range(epochs):
        for batch in data:
            made.losses.append(float(run.step(batch, loss_sum)))
            assert run.result is not None
            made.norms.append(float(run.result.grad_norm))
        before.step()
    made.weights = run.state_dict()
    return made


def by_hand(plan: Any, accumulate: int = 1, epochs: int = 2) -> Outcome:
    """On every rank: a loop of one's own; the loader's batches are halved by the user, unevenly."""
    run, model, made = Run(joined()), module(), Outcome()
    opt = optimizer(model)
    model, opt, data = run.parallelize(model, opt, loader(), plan=plan, accumulate=accumulate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    for _ in range(epochs):
        for tokens, targets in data:
            parts = [(tokens, targets)] if accumulate == 1 else [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]
            for number, part in enumerate(parts):
                with run.micro_batch(last=None if accumulate == 1 else number == 1):
                    run.backward(loss_sum(model, part))
            made.norms.append(float(run.clip(0.5)))
            made.losses.append(float(run.update().loss))
        schedule.step()
    made.weights = run.state_dict()
    return made
