"""Models that mix the rows of a batch are found, and the module that does it is named; numbers that are not finite, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.verify.probe import first_nonfinite, mixes_rows
from tests.ranks.foreign_models import KINDS, made, rows_of


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(8, 11)
        self.transposed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.encoder(x.transpose(0, 1)).transpose(0, 1) if self.transposed else self.encoder(x)
        return self.output(x)


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 6), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def summed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def averaged(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


CALLS: list[tuple[Any, Any]] = [
    (logits, tokens()),
    (summed, (tokens(), tokens())),
    (averaged, {"tokens": tokens(), "labels": tokens()}),
]


# Mutations, each red: the four runs draw other random numbers; a row is compared with itself; the outermost module is named.
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("training", [True, False])
def test_batch_first_left_at_false_is_found_from_logits_sums_and_means(number: int, training: bool) -> None:
    call, batch = CALLS[number]
    torch.manual_seed(0)
    finding = mixes_rows(Encoder(batch_first=False).train(training), batch, call)
    assert finding is not None and "encoder.layers.0" in finding.where
    assert "batch_first=False" in finding.what and "batch_first=True" in finding.fix
    assert mixes_rows(Encoder(batch_first=True).train(training), batch, call) is None


def test_positions_first_is_no_fault_where_it_is_meant() -> None:
    model = Encoder(batch_first=False)
    model.transposed = True
    assert mixes_rows(model, tokens(), logits) is None


def test_batch_norm_is_found_in_training_alone_and_keeps_its_statistics() -> None:
    kind = KINDS["signals"]
    model = made(kind)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    finding = mixes_rows(model, rows_of(kind, 0), kind.loss)
    assert finding is not None and finding.where == "stem.1 (BatchNorm1d)" and "synchronised" in finding.fix
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert mixes_rows(model.eval(), rows_of(kind, 0), kind.loss) is None


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("signals", "odd", "branching")])
def test_models_without_it_are_not_accused(name: str) -> None:
    kind = KINDS[name]
    assert mixes_rows(made(kind), rows_of(kind, 0), kind.loss) is None
    assert mixes_rows(made(kind).float(), {k: _single(v) for k, v in rows_of(kind, 0).items()}, kind.loss) is None


def _single(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.is_floating_point() else values


def test_a_module_of_ones_own_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x - x.mean(0))

    model = nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2))
    finding = mixes_rows(model, torch.randn(4, 3), logits)
    assert finding is not None and finding.where == "1 (Centred)" and "first module" in finding.what
    assert mixes_rows(model, torch.randn(1, 3), logits) is None  # nothing to mix


def spoilt(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[0] = value
    return model


def test_where_numbers_stop_being_finite() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()

    model = nn.Sequential(nn.Linear(3, 3), Root(), nn.Linear(3, 1))
    batch = torch.ones(2, 3)
    find = functools.partial(first_nonfinite, batch=batch, call=logits)
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
    assert find(model).where == "1 (Root)"
    assert find(spoilt(nn.Linear(3, 1), torch.nan)).where == "weight"
    assert find(nn.Linear(3, 1)) is None
    assert first_nonfinite(nn.Linear(3, 1), batch * torch.inf, logits).where == "batch"
    assert first_nonfinite(nn.Linear(3, 1), batch, lambda model, x: model(x).sum() / 0).where == "loss"
