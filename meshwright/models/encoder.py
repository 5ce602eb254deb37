"""Encoder: BERT, RoBERTa, ERNIE and the plain `nn.TransformerEncoder`, by the switches of `ModelConfig`."""

from __future__ import annotations

from meshwright.models.trunk import Trunk

__all__ = ["Encoder"]


class Encoder(Trunk):
    """A position sees the whole document. Tasks: mlm, classify (over the first position of a row)."""

    causal = False
