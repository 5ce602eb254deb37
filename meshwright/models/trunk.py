"""Embeddings, layers, final norm and a head: what decoder and encoder have in common.

Shapes: B rows, S positions, K selected positions, D width, V vocabulary, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.kernels.dropout import dropout
from meshwright.models.heads import LanguageHead, LossParts, linear_loss
from meshwright.models.layers import CLASSIFIER_SITE, EMBEDDING_SITE, Layer, layer_keys, make_norm
from meshwright.models.moe import MoE, Routing
from meshwright.models.rope import RopeTable
from meshwright.spec.labels import IGNORE
from meshwright.spec.model_table import model_table

__all__ = ["Hidden", "Trunk"]


class Hidden(NamedTuple):
    """What the layers before the last one leave: hidden states [B, S, D], and `LossParts.balance_sum` of these layers."""

    x_BSD: torch.Tensor
    balance_sum: torch.Tensor | None


class Trunk(nn.Module):
    """A transformer on the meta device; `initialize` gives it values. Use `Decoder` or `Encoder`.

    config, task  what it was built from
    max_len       longest sequence it is meant for
    table         how each parameter is filled and split
    split, merge  the identity on one device. Where positions are spread over ranks, `split` takes what has one entry a
                  position, [B or 1, S, ...], to the positions that are here, and `merge` hidden states back to whole rows

    A part of the model is the model with None in place of the modules that it lacks (`layers` keeps its length).
    """

    causal: bool

    def __init__(self, config: ModelConfig, task: str, dtype: torch.dtype = torch.float32):
        super().__init__()
        assert config.vocab is not None  # refused before: spec.model_rules
        self.config, self.task, self.max_len = config, task, config.max_len
        self.table = model_table(config, task)

        def embedding(rows: int) -> nn.Embedding:
            # without the values that a constructor draws: on meta that loads torch's compiler, 1.4 s of every start
            return nn.Embedding.from_pretrained(torch.empty(rows, config.width, device="meta", dtype=dtype), freeze=False)

        self.embedding = embedding(config.vocab)
        learned = config.positions == "learned"
        self.position_embedding = embedding(config.max_len + config.position_offset) if learned else None
        self.type_embedding = embedding(config.token_types) if config.token_types else None
        self.embedding_norm = make_norm(config, config.width, dtype) if config.embed_norm else None
        self.rope = RopeTable(config) if config.positions == "rope" else None
        self.layers = nn.ModuleList(Layer(config, dtype, causal=self.causal) for _ in range(config.layers))
        self.norm = make_norm(config, config.width, dtype) if config.final_norm else None
        if task == "classify":
            assert config.classes is not None  # refused before: spec.model_rules
            self.pooler = nn.Linear(config.width, config.width, device="meta", dtype=dtype) if config.pooler else None
            self.classifier = nn.Linear(config.width, config.classes, device="meta", dtype=dtype)
        else:
            self.head = LanguageHead(config, config.vocab, dtype)
            if config.tied:
                self.head.weight = self.embedding.weight
        self.split: nn.Module = nn.Identity()
        self.merge: nn.Module = nn.Identity()

    def embed(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None, key_BS: torch.Tensor | None) -> torch.Tensor:
        """Sum of the embeddings, normed and dropped out, [B, S, D]. Every token is of type 0."""
        x_BSD = self.embedding(tokens_BS)
        if self.position_embedding is not None:
            if positions_BS is None:
                positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
            x_BSD = x_BSD + self.position_embedding(self.split(positions_BS) + self.config.position_offset)
        if self.type_embedding is not None:
            x_BSD = x_BSD + self.type_embedding(torch.zeros_like(tokens_BS[:1, :1]))
        if self.embedding_norm is not None:
            x_BSD = self.embedding_norm(x_BSD)
        return dropout(x_BSD, layer_keys(key_BS, -1), EMBEDDING_SITE, self.config.dropout)

    def run_layers(
        self,
        x_BSD: torch.Tensor,
        span: tuple[int, int],
        tokens_BS: torch.Tensor,
        documents_BS: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        positions_BS: torch.Tensor | None,
        key_BS: torch.Tensor | None,
        routings: list[tuple[MoE, Routing]] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the layers [span[0], span[1]), [B, S, D]. routings: takes how experts were chosen in each."""
        cos, sin = None, None
        if self.rope is not None:
            wide = torch.promote_types(x_BSD.dtype, torch.float32)
            cos, sin = self.rope(tokens_BS.shape[1], positions_BS, x_BSD.device, wide)
        for index in range(*span):
            output = self.layers[index](x_BSD, cos, sin, documents_BS, cu_seqlens, layer_keys(key_BS, index))
            x_BSD = output[0] if self.config.experts else output
            if self.config.experts and routings is not None:
                routings.append((self.layers[index].mlp, output[1]))  # type: ignore[arg-type]  # of experts
        return x_BSD

    def balance(self, routings: list[tuple[MoE, Routing]], labels: torch.Tensor | None) -> torch.Tensor | None:
        """Balance terms of all rows, each times the targets of its row, so that a step divides them as it does the loss: their
        mean over rows, weighed by targets. Notes the load of the rows that have some. None where nothing is learned."""
        if labels is None or not routings or not torch.is_grad_enabled():
            return None
        targets_B = (labels.reshape(labels.shape[0], -1) != IGNORE).sum(1)
        total: torch.Tensor | None = None
        for moe, routing in routings:
            moe.note(routing, targets_B > 0)
            if routing.balance_B is not None:
                term = (routing.balance_B * targets_B).sum()
                total = term if total is None else total + term
        return total

    def pooled(self, x_BSD: torch.Tensor, documents_BS: torch.Tensor | None) -> torch.Tensor:
        """The position that stands for a row: the first, or the last real one where a position sees only its left."""
        if not self.causal:
            return x_BSD[:, 0]
        if documents_BS is None:
            return x_BSD[:, -1]
        last_B = (documents_BS >= 0).sum(dim=1).sub(1).clamp(min=0)
        return x_BSD[torch.arange(x_BSD.shape[0], device=x_BSD.device), last_B]

    def classify(
        self,
        x_BSD: torch.Tensor,
        documents_BS: torch.Tensor | None,
        labels_B: torch.Tensor | None,
        key_BS: torch.Tensor | None,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor | LossParts:
        """Logits [B, C], or with labels [B] the loss."""
        x_BD = self.pooled(x_BSD, documents_BS)
        if self.pooler is not None:
            x_BD = torch.tanh(self.pooler(x_BD))
        p = self.config.dropout if self.config.head_dropout is None else self.config.head_dropout
        key_B = None if key_BS is None else key_BS[:, 0]
        x_BD = dropout(x_BD, layer_keys(key_B, -1), CLASSIFIER_SITE, p)
        if labels_B is None:
            return self.classifier(x_BD)
        return linear_loss(x_BD, self.classifier.weight, self.classifier.bias, labels_B, smoothing, z_loss)

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
        hidden: torch.Tensor | None = None,
        span: tuple[int, int] | None = None,
    ) -> torch.Tensor | LossParts | Hidden:
        """Logits, or with `labels` the sums that make the loss. Tensors as in `data.batch.Batch`.

        tokens       int64 [B, S]
        select       int64 [B, K]: the head sees these positions only (not for classification, which sees one a row)
        labels       int64, of the positions that the head sees; already aligned, no shift happens here
        dropout_key  int32 [B, S] of `kernels.dropout.position_keys`; None: no dropout of any kind
        span         layers [first, stop) to run; None: all. The embedding comes before the first, norm and head after the last
        hidden       [B, S, D] what the layer before the span gave; needed where the span does not begin at 0
        Returns      logits [B, S or K, V] ([B, C] for classification) in the weights' dtype, or `LossParts`; for a span that
                     ends before the last layer the hidden states [B, S, D] (of the positions that are here); with experts
                     `Hidden`
        """
        first, stop = span or (0, len(self.layers))
        key_BS = None if dropout_key is None else self.split(dropout_key)
        x_BSD = self.embed(tokens, positions, key_BS) if hidden is None else hidden
        routings: list[tuple[MoE, Routing]] = []
        x_BSD = self.run_layers(x_BSD, (first, stop), tokens, documents, cu_seqlens, positions, key_BS, routings)
        balance = self.balance(routings, labels)
        if stop < len(self.layers):
            return Hidden(x_BSD, balance) if self.config.experts else x_BSD
        x_BSD = self.merge(x_BSD if self.norm is None else self.norm(x_BSD))
        if self.task == "classify":
            output = self.classify(x_BSD, documents, labels, dropout_key, smoothing, z_loss)
        else:
            output = self.head(x_BSD, select, labels, smoothing, z_loss)
        return output if balance is None else output._replace(balance_sum=balance)  # type: ignore[union-attr]  # has labels
