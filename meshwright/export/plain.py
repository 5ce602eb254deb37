"""A model of ours as one function of (input_ids, attention_mask) that a tracer can follow: no packed documents, no dropout, no
table that grows, no number that depends on data.

Shapes: B rows, S positions, D width, E features of a head, H = E/2 frequencies, V vocabulary, C classes, X experts, k experts a
token, F width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import ConfigError, Finding
from meshwright.models.activations import gated
from meshwright.models.attention import block_mask
from meshwright.models.moe import MoE, Routing
from meshwright.models.registry import build
from meshwright.models.trunk import Trunk

__all__ = ["OUTPUTS", "PlainModel", "example", "refusals"]

OUTPUTS = ("logits", "embeddings")


def refusals(config: ModelConfig, task: str, output: str, target: str) -> list[Finding]:
    """Every reason why the graph of this model cannot be written. target: of --to."""
    found = []
    if output not in OUTPUTS:
        found.append(Finding("--output", f"{output!r} is unknown", f"Known: {', '.join(OUTPUTS)}"))
    elif output == "embeddings" and config.arch != "encoder":
        found.append(Finding("--output", "embeddings are an encoder's, and this model is a decoder", "Use logits"))
    if config.arch not in ("decoder", "encoder"):
        return found
    scaling = config.rope_scaling
    if config.positions == "rope" and scaling is not None and scaling.rope_type == "dynamic":
        original = scaling.original_max_position_embeddings or config.max_len
        if config.max_len > original:
            what = (
                f"dynamic with max_len {config.max_len} beyond the original {original}: its angles change with the length of a "
            )
            what += f"row, and a graph of --to {target} has one table of angles"
            fix = f"Set max_len to {original}, use another scaling, or export with --to hf"
            found.append(Finding("model.rope_scaling", what, fix))
    if config.experts and config.capacity is not None:
        what = f"{config.capacity}: whether an expert takes a token depends on the row's other tokens"
        found.append(Finding("model.capacity", what, f"Such a model cannot be written with --to {target}"))
    return found


def _attend(
    q_BSHE: torch.Tensor,
    k_BSKE: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    causal: bool,
    documents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """`models.attention.attention` with one path for every device, length and mask."""
    mask = block_mask(documents, q_BSHE.shape[1], causal=causal, window=window, device=q_BSHE.device)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class _EveryExpert(MoE):
    """Every expert computes every token, and those that were not chosen count zero: no sizes that depend on data."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, moe: MoE):
        super().__init__(config, dtype)
        self.router, self.experts = moe.router, moe.experts

    def forward(self, x_BSD: torch.Tensor, documents_BS: torch.Tensor | None) -> tuple[torch.Tensor, Routing]:
        gates_BSk, ids_BSk, routing = self.router(x_BSD, documents_BS)
        experts = self.experts
        chosen_BSX = gates_BSk.new_zeros(*gates_BSk.shape[:2], experts.up.shape[0] + 1).scatter(-1, ids_BSk, gates_BSk)[
            ..., :-1
        ]
        x_1ND = x_BSD.reshape(1, -1, x_BSD.shape[-1])
        hidden_XNF = gated(x_1ND @ experts.up.mT, experts.activation, experts.gate_rows)
        y_XND = hidden_XNF @ experts.down.mT
        weight_XN1 = chosen_BSX.flatten(0, 1).T[..., None].to(y_XND.dtype)
        return (y_XND * weight_XN1).sum(0).view_as(x_BSD), routing


class PlainModel(nn.Module):
    """input_ids, attention_mask (1 on real tokens, 0 on padding) int64 [B, S] -> logits [B, S, V], [B, C] for a classifier, or
    embeddings [B, D]: the mean of a row's last hidden states, of length 1.

    Positions count real tokens only, so padding may stand on either side; what comes out at padding means nothing. It shares
    the parameters of `model`, which is left as it is. Raises ConfigError with `refusals`.
    """

    def __init__(self, model: Trunk, output: str = "logits", target: str = "onnx"):
        super().__init__()
        config, dtype = model.config, next(model.parameters()).dtype
        findings = refusals(config, model.task, output, target)
        if findings:
            raise ConfigError(findings=findings)
        own = build(config, model.task, dtype)
        assert isinstance(own, Trunk)  # the type of `model`
        own.load_state_dict(model.state_dict(keep_vars=True), assign=True)
        self.model, self.output = own.eval(), output
        for layer in own.layers:
            layer.attention.attend = _attend  # type: ignore[union-attr]  # it is a Layer
            if isinstance(layer.mlp, MoE):
                layer.mlp = _EveryExpert(config, dtype, layer.mlp)
        self.cos: torch.Tensor | None
        self.sin: torch.Tensor | None
        cos = sin = None
        if own.rope is not None:
            device, wide = next(model.parameters()).device, torch.promote_types(dtype, torch.float32)
            cos, sin = (table[:, 0, 0].clone() for table in own.rope(config.max_len, None, device, wide))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        model = self.model
        positions_BS = (attention_mask.cumsum(1) - 1).clamp(min=0)
        documents_BS = attention_mask - 1
        cos = sin = None
        if self.cos is not None and self.sin is not None:
            cos, sin = self.cos[positions_BS][:, :, None, None], self.sin[positions_BS][:, :, None, None]
        x_BSD = model.embed(input_ids, positions_BS, None)
        for layer in model.layers:
            out = layer(x_BSD, cos, sin, documents_BS)
            x_BSD = out[0] if model.config.experts else out
        if model.norm is not None:
            x_BSD = model.norm(x_BSD)
        if self.output == "embeddings":
            return _mean(x_BSD, attention_mask)
        if model.task != "classify":
            return model.head(x_BSD)
        # of a causal row its last real position, where the count is largest first; else the first one
        place_B = (attention_mask.cumsum(1) if model.causal else attention_mask).argmax(1)
        x_B1D = x_BSD.gather(1, place_B[:, None, None].expand(-1, 1, x_BSD.shape[-1]))
        logits_BC = model.classify(x_B1D, None, None, None, 0.0, 0.0)
        assert isinstance(logits_BC, torch.Tensor)  # no labels are given
        return logits_BC


def _mean(x_BSD: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    x_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
    real_BS1 = (attention_mask > 0)[..., None]
    mean_BD = torch.where(real_BS1, x_BSD, 0.0).sum(1) / attention_mask.sum(1, keepdim=True)
    return F.normalize(mean_BD, dim=-1)


def example(model: PlainModel) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[dict[int, torch.export.Dim], ...]]:
    """(arguments to trace with, their dynamic dimensions): any number of rows and of positions up to the model's max_len."""
    longest = model.model.max_len
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    tokens_BS = torch.ones(2, min(8, longest), dtype=torch.int64)
    dims = {0: batch, 1: torch.export.Dim("sequence", min=1, max=longest)} if longest > 1 else {0: batch}
    return (tokens_BS, torch.ones_like(tokens_BS)), (dims, dims)
