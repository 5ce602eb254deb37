"""Decoder: GPT-2, Llama 2 and 3, Qwen 2 and 3, Mistral, by the switches of `ModelConfig`."""

from __future__ import annotations

from meshwright.models.trunk import Trunk

__all__ = ["Decoder"]


class Decoder(Trunk):
    """A position sees itself and what is left of it. Tasks: lm, classify (over the last real position of a row)."""

    causal = True
