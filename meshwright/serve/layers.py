"""The model's forward of a step: its parameters, one kernel for what lies between two matrices, keys and values in pages.

All tokens of a step lie behind each other. What a layer adds to the residual stream is added by the norm that follows, be it
that of the next layer. Matrices, experts, embedding and head are the model's own modules, so what splits them over ranks by
features does so here too; positions are never split.

Shapes: T new tokens, D width, H query heads, K key/value heads, E features of a head, V vocabulary, S selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch

from meshwright.kernels.fused import Heads, add_norm
from meshwright.kernels.one_row import gate_linear, heads_linear, linear, vocabulary_linear
from meshwright.kernels.paged_attention import Pages, Singles, paged_attention
from meshwright.models.heads import LanguageHead
from meshwright.models.layers import Layer
from meshwright.models.moe import MoE
from meshwright.models.trunk import Trunk

__all__ = ["Forward"]


class Forward:
    """Layers [first, stop) of a model, with the embedding before the first of all, and norm and head after the last.

    cache: keys and values of every layer that is here, [P, N, K, E] each; may be changed between steps.
    """

    def __init__(self, model: Trunk, span: tuple[int, int]):
        self.model, self.span = model, span
        self.cache: Listed[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        assert len(self._layers) == span[1] - span[0], "a layer of the span is not here"

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        pages: Pages | Singles,
        *,
        select: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions int64 [T]. Logits [T, V] (of `select`, [S, V]); of layers before the last hidden states [T, D].

        hidden: [T, D] of the layer before, where the first one is not here. out: where logits go
        """
        model = self.model
        x = model.embed(tokens[None], positions[None], None) if hidden is None else hidden[None]
        cos, sin = self._angles(positions, x.dtype)
        branch: torch.Tensor | None = None
        for layer, (keys, values) in zip(self._layers, self.cache, strict=True):
            attention = layer.attention
            heads = Heads(attention.group, attention.q_norm, attention.k_norm, cos, sin)  # type: ignore[arg-type]  # RMS
            before = None if layer.post else layer.attention_norm
            x, q_THE = heads_linear(x, branch, before, attention.qkv, heads, keys, values, pages.slots)
            attended = paged_attention(q_THE, keys, values, pages, window=attention.window)
            x, branch = linear(attended.flatten(1)[None], attention.out, x)
            if layer.post:
                x, branch = add_norm(x, branch, layer.attention_norm)[1], None
            x, branch = self._feed_forward(layer, x, branch)
            if layer.post:
                x, branch = add_norm(x, branch, layer.mlp_norm)[1], None
        if self.span[1] < len(model.layers):
            return (x if branch is None else x + branch)[0]
        return self._logits(x, branch, select, out)

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[T, E/2] both, by position alone: the tokens of a step are no sequence whose length could matter."""
        if self.model.rope is None:
            return None, None
        cos, sin = self.model.rope(1, positions[None], positions.device, torch.promote_types(dtype, torch.float32))
        return cos.view(positions.shape[0], -1), sin.view(positions.shape[0], -1)

    def _feed_forward(
        self, layer: Layer, x: torch.Tensor, branch: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream behind the feed-forward layer."""
        norm, mlp = None if layer.post else layer.mlp_norm, layer.mlp
        if isinstance(mlp, MoE):
            x, y = (x, x) if norm is None else add_norm(x, branch, norm)
            return x, mlp(y, None)[0]
        x, inner = gate_linear(x, branch, norm, mlp.up, self.model.config.activation, mlp.gate_rows, mlp.down)
        return linear(inner, mlp.down, x)

    def _logits(
        self, x: torch.Tensor, branch: torch.Tensor | None, select: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        norm, head = self.model.norm, self.model.head
        if select is None and type(head) is LanguageHead and head.transform is None:
            return vocabulary_linear(x, branch, norm, head.weight, head.bias, out)[0]
        if norm is not None:
            x = add_norm(x, branch, norm)[1]
        elif branch is not None:
            x = x + branch
        logits = head(x, None if select is None else select[None])[0]
        return logits if out is None else out.copy_(logits)
