"""A model and an objective of one's own, in one file: `meshwright train examples/custom_model.yaml`.

The model is ordinary single-device PyTorch. What it must keep to, and why, is in docs/architecture.md.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.config.schema import ModelConfig
from meshwright.data.batch import IGNORE, Batch
from meshwright.kernels.cross_entropy import linear_cross_entropy
from meshwright.models import LossParts, register_model
from meshwright.train.objectives import Objective, register_objective


class Mixer(nn.Module):
    """Each feature sees itself at the last `reach` positions of its own document, then a gated feed-forward."""

    def __init__(self, width: int, ffn: int, reach: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.taps = nn.Parameter(torch.randn(reach, width) / reach)
        self.up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """x [rows, positions, width]; documents [rows, positions]: number of each position's document within its row."""
        normed = self.norm(x)
        mixed = normed * self.taps[0]
        for distance in range(1, min(len(self.taps), x.shape[1])):
            earlier = normed[:, :-distance] * self.taps[distance]
            if documents is not None:  # a packed row holds several documents, which must not see each other
                earlier = earlier * (documents[:, :-distance] == documents[:, distance:]).unsqueeze(-1)
            mixed = mixed + F.pad(earlier, (0, 0, distance, 0))
        gate, value = self.up(mixed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class ShiftMixer(nn.Module):
    """A language model without attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.vocab is not None  # the tokenizer's size is filled in before a model is built
        self.embedding = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embedding.weight, std=config.init_std)
        self.layers = nn.ModuleList(
            Mixer(config.width, config.ffn, int(config.options.get("reach", 8))) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        documents: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        select: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        dropout_key: torch.Tensor | None = None,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor | LossParts:
        """Logits [rows, positions, vocabulary], or the sums of the loss where labels are given."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, documents)
        x = self.norm(x)
        if labels is None:
            return F.linear(x, self.embedding.weight)
        hidden, targets = x.flatten(0, 1), labels.flatten()
        return LossParts(
            *linear_cross_entropy(hidden, self.embedding.weight, None, targets, smoothing=smoothing, z_loss=z_loss)
        )


class FocalLoss(Objective):
    """(1 - p)^2 times the cross-entropy: tokens that are already predicted well count less (Lin et al. 2017, equation 4)."""

    def loss(self, model: nn.Module, batch: Batch, dropout_key: torch.Tensor | None) -> LossParts:
        """Sums over the targets, never means: who calls this divides by the number of targets of the whole step."""
        logits = model(
            batch.tokens, documents=batch.documents, cu_seqlens=batch.cu_seqlens, positions=batch.positions,
            dropout_key=dropout_key,
        )  # fmt: skip
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        labels = batch.labels.flatten()
        nll = F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")
        loss_sum = ((1 - torch.exp(-nll)) ** 2 * nll).sum()
        correct = ((wide.argmax(-1) == labels) & (labels != IGNORE)).sum()
        return LossParts(loss_sum, torch.zeros_like(loss_sum), correct)


register_model("shift-mixer", lambda config, task: ShiftMixer(config))
register_objective("focal_lm", lambda config, classes: FocalLoss(config, "lm"))
