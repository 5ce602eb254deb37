"""From hidden states to logits or to the loss: language model, masked language model, classification.

Shapes: B rows, S positions, K selected positions, D width, V vocabulary, C classes, N rows of whatever is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.kernels.cross_entropy import linear_cross_entropy
from meshwright.models.activations import activation
from meshwright.models.layers import make_norm

__all__ = ["LanguageHead", "LossParts", "linear_loss", "select_positions"]


class LossParts(NamedTuple):
    """Sums over the targets (labels that are not IGNORE), never means: who divides knows the global count.

    loss_sum  scalar in at least fp32, differentiable: cross-entropy and the z term
    z_sum     scalar, the z term alone, detached
    correct   int64 scalar: targets whose logit is the largest
    balance_sum  scalar, differentiable: what is learned beside the loss, times the targets of each row; None: nothing
    """

    loss_sum: torch.Tensor
    z_sum: torch.Tensor
    correct: torch.Tensor
    balance_sum: torch.Tensor | None = None


def select_positions(x_BSD: torch.Tensor, select_BK: torch.Tensor | None) -> torch.Tensor:
    """Hidden states of the selected positions, [B, K, D]; all of them where nothing is selected."""
    if select_BK is None:
        return x_BSD
    return x_BSD.gather(1, select_BK[..., None].expand(-1, -1, x_BSD.shape[-1]))


def linear_loss(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, smoothing: float, z_loss: float
) -> LossParts:
    """Cross-entropy of x [..., D] against labels [...], without ever holding all logits."""
    return LossParts(
        *linear_cross_entropy(x.reshape(-1, x.shape[-1]), weight, bias, labels.reshape(-1), smoothing=smoothing, z_loss=z_loss)
    )


class LanguageHead(nn.Module):
    """The output matrix, with BERT's dense + activation + norm before it where the config has it."""

    def __init__(self, config: ModelConfig, vocab: int, dtype: torch.dtype):
        super().__init__()
        width = config.width
        self.transform = nn.Linear(width, width, device="meta", dtype=dtype) if config.head_transform else None
        self.transform_norm = make_norm(config, width, dtype) if config.head_transform else None
        self.activation = activation(config.activation)
        self.weight: torch.Tensor = nn.Parameter(torch.empty(vocab, width, device="meta", dtype=dtype))
        self.bias = nn.Parameter(torch.empty(vocab, device="meta", dtype=dtype)) if config.head_bias else None

    def forward(
        self,
        x_BSD: torch.Tensor,
        select_BK: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor | LossParts:
        """Logits [B, S or K, V], or with labels [B, S or K] the loss."""
        x_BND = select_positions(x_BSD, select_BK)
        if self.transform is not None and self.transform_norm is not None:
            x_BND = self.transform_norm(self.activation(self.transform(x_BND)))
        if labels is None:
            return self.logits(x_BND)
        return self.loss(x_BND, labels, smoothing, z_loss)

    def logits(self, x_BND: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x_BND, self.weight, self.bias)

    def loss(self, x_BND: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float) -> LossParts:
        return linear_loss(x_BND, self.weight, self.bias, labels, smoothing, z_loss)
