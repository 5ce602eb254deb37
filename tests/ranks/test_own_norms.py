"""Rows that stand in for none: what a BatchNorm of a user's module makes of them on ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright.runtime.run import Run
from tests.ranks.pool import joined


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def normed(how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two epochs of 10 rows in batches of 8: the last one has 2. how: "plain", by "step" or in a "loop" of one's own."""
    torch.manual_seed(3)
    model: nn.Module = Normed().double()
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    run, losses = Run(joined()), []
    if how != "plain":
        model, opt, batches = run.parallelize(model, opt, batches)
    loss_fn = lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[1]))
    for batch in [batch for _ in range(2) for batch in batches] if how == "plain" else itertools.chain(batches, batches):
        if how == "step":
            losses.append(float(run.step(batch, loss_fn)))
            continue
        opt.zero_grad()
        if how == "plain":
            total, count = loss_fn(model, batch)
            (total / count).backward()
            opt.step()
            losses.append(float(total.detach()) / count)
        else:
            with run.micro_batch():
                run.backward(loss_fn(model, batch))
            losses.append(float(run.update().loss))
    return losses, dict(model.state_dict()) if how == "plain" else run.state_dict()


@pytest.mark.parametrize("how", ["step", "loop"])
def test_a_row_that_stands_in_for_none_is_in_no_statistics_of_a_batch_norm(ranks, how: str):
    """Mutations tried: it counts in forward (5e-1); its gradient depends on the others' (9e-4)."""
    losses, weights = ranks(1).run(normed, "plain")[0]
    for found, state in ranks(4).run(normed, how):
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-12
        assert max(float((state[name] - value).abs().max()) for name, value in weights.items()) < 1e-12
