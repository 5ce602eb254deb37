"""Architectures that a user might register: one that is right, and two that mix the rows of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.config.schema import ModelConfig
from meshwright.data.batch import IGNORE
from meshwright.models import LossParts, register_model


class Tagger(nn.Module):
    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        assert config.vocab is not None
        self.embedding = nn.Embedding(config.vocab, config.width)
        layer = nn.TransformerEncoderLayer(config.width, 2, 32, dropout=0.0, batch_first=kind != "sideways")
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.scale = nn.BatchNorm1d(config.width) if kind == "normed" else None
        self.output = nn.Linear(config.width, config.vocab)

    def forward(self, tokens: torch.Tensor, *, labels: torch.Tensor | None = None, **_: Any) -> torch.Tensor | LossParts:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embedding(tokens)
        x = self.encoder(x, mask=mask) if self.encoder.layers[0].self_attn.batch_first else self.encoder(x)
        if self.scale is not None:
            x = self.scale(x.transpose(1, 2)).transpose(1, 2)
        logits = self.output(x)
        if labels is None:
            return logits
        logits, labels = logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return LossParts(loss, torch.zeros_like(loss), (logits.argmax(-1) == labels).sum())


for kind in ("straight", "sideways", "normed"):
    register_model(kind, lambda config, task, kind=kind: Tagger(config, kind))
