"""What is learned: from a model and a batch to a loss sum, and from evaluation sums to named figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.config.schema import ObjectiveConfig
from meshwright.data.batch import IGNORE, Batch
from meshwright.errors import ConfigError, Finding

__all__ = ["Objective", "make_objective", "objective_names", "register_objective"]


@dataclass(frozen=True)
class Objective:
    """A loss that is a sum over targets, so that any split of a batch gives the same gradient.

    task: the head that the model gets ("lm", "mlm", "classify").
    classes: number of labels where evaluation wants a confusion matrix, else 0.
    """

    config: ObjectiveConfig
    task: str
    classes: int = 0

    def loss(self, model: nn.Module, batch: Batch, dropout_key: torch.Tensor | None) -> Any:
        """LossParts: sums over the targets of this micro-batch (0-d tensors, at least fp32)."""
        return model(
            batch.tokens,
            documents=batch.documents,
            cu_seqlens=batch.cu_seqlens,
            positions=batch.positions,
            select=batch.select,
            labels=batch.labels,
            dropout_key=dropout_key,
            smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss,
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """fp64 sums [loss, targets, correct, confusion...], to be added over batches and ranks.

        The held-out loss is the plain cross-entropy: no label smoothing, no z-loss."""
        targets = (batch.labels != IGNORE).sum()
        inputs = {
            "documents": batch.documents,
            "cu_seqlens": batch.cu_seqlens,
            "positions": batch.positions,
            "select": batch.select,
        }
        if not self.classes:
            parts = model(batch.tokens, labels=batch.labels, **inputs)
            return torch.stack([parts.loss_sum.double(), targets.double(), parts.correct.double()])
        logits = model(batch.tokens, **inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="sum")
        real = batch.labels != IGNORE
        predicted = logits.argmax(-1)
        cells = (batch.labels * self.classes + predicted)[real]
        confusion = torch.bincount(cells, minlength=self.classes**2).double()
        correct = (predicted == batch.labels)[real].sum().double()
        return torch.cat([torch.stack([loss.double(), targets.double(), correct]), confusion])

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        """Held-out figures from summed `evaluate` vectors.

        loss = sum / targets; perplexity = exp(loss); accuracy = correct / targets;
        f1 = mean over the classes that occur of 2 tp / (2 tp + fp + fn).
        """
        loss_sum, targets, correct = sums[:3].tolist()
        if targets == 0:
            return {"val_loss": math.nan, "val_targets": 0.0}
        loss = loss_sum / targets
        out = {"val_loss": loss, "val_targets": targets}
        if self.task == "classify":
            out["val_accuracy"] = correct / targets
            out["val_f1"] = _macro_f1(sums[3:].view(self.classes, self.classes)) if self.classes else math.nan
        else:
            out["val_perplexity"] = math.exp(min(loss, 700.0))  # exp(710) is past the largest double
            out["val_masked_accuracy" if self.task == "mlm" else "val_accuracy"] = correct / targets
        return out


def _macro_f1(confusion: torch.Tensor) -> float:
    """confusion [C, C]: rows are labels, columns predictions."""
    true_positive = confusion.diag()
    denominator = confusion.sum(0) + confusion.sum(1)  # 2 tp + fp + fn
    present = denominator > 0
    return float((2 * true_positive[present] / denominator[present]).mean())


Factory = Callable[[ObjectiveConfig, int], Objective]
_FACTORIES: dict[str, Factory] = {
    "causal_lm": lambda config, classes: Objective(config, "lm"),
    "masked_lm": lambda config, classes: Objective(config, "mlm"),
    "classify": lambda config, classes: Objective(config, "classify", classes),
}


def register_objective(name: str, factory: Factory) -> None:
    """Make `objective.kind: name` available; `factory(config, classes)` returns an Objective (or a subclass)."""
    _FACTORIES[name] = factory


def objective_names() -> list[str]:
    return sorted(_FACTORIES)


def make_objective(config: ObjectiveConfig, classes: int) -> Objective:
    """Raises ConfigError for a name nobody registered."""
    if config.kind not in _FACTORIES:
        raise ConfigError(
            findings=[Finding("objective.kind", f"{config.kind!r} is not known", f"Known: {', '.join(objective_names())}")]
        )
    return _FACTORIES[config.kind](config, classes)
