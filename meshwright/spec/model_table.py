"""The parameter table of our own models: fused parts, initial values and the dimensions that may be split."""

from __future__ import annotations

import math

from meshwright.config.schema import ModelConfig
from meshwright.spec.parameters import Fused, Part, Rule, Table

__all__ = ["expert_name", "logical_name", "model_table"]


def logical_name(name: str, part: str) -> str:
    """Unfused name of a part: `layers.3.attention.qkv.weight`, `q` -> `layers.3.attention.q.weight`."""
    head, _, leaf = name.rpartition(".")
    return ".".join((*head.split(".")[:-1], part, leaf))


def expert_name(name: str, expert: int) -> str:
    """Name under which one expert of a grouped parameter is filled: `layers.3.mlp.experts.up`, 5 ->
    `layers.3.mlp.experts.5.up.weight`."""
    head, _, leaf = name.rpartition(".")
    return f"{head}.{expert}.{leaf}.weight"


def _feed_forward(config: ModelConfig, std: float, out_std: float) -> tuple[Rule, ...]:
    """Gate and value alternate in runs of up to 16 rows, in every expert alike."""
    width = config.moe_ffn or config.ffn if config.experts else config.ffn
    rows = math.gcd(width, 16)
    gated = config.activation == "swiglu"
    up = Fused((Part("gate", rows), Part("up", rows)), groups=width // rows) if gated else None
    if config.experts:
        return (
            Rule("layers.*.mlp.router.weight", std=std, partial="ffn"),
            Rule("layers.*.mlp.experts.up", std=std, fused=up, axes=((1, "ffn"),), experts=True),
            Rule("layers.*.mlp.experts.down", std=out_std, axes=((2, "ffn"),), experts=True),
        )
    return (
        Rule("layers.*.mlp.up.weight", std=std, fused=up, axes=((0, "ffn"),)),
        Rule("layers.*.mlp.up.bias", init="zeros", fused=up, axes=((0, "ffn"),)),
        Rule("layers.*.mlp.down.weight", std=out_std, axes=((1, "ffn"),)),
    )


def model_table(config: ModelConfig, task: str) -> Table:
    """Rules for every parameter of a decoder or encoder.

    Residual output projections start with std / sqrt(2 * layers) where the config asks for it (GPT-2, section 2.3), all
    other matrices with `init_std`, biases at 0, norm weights at 1.
    """
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    head_dim = config.head_dim or config.width // heads
    std = config.init_std
    out_std = std / math.sqrt(2 * config.layers) if config.init_depth_scaled else std
    parts = (Part("q", heads // kv_heads * head_dim), Part("k", head_dim), Part("v", head_dim))
    qkv = Fused(parts, groups=kv_heads)
    vocab = ((0, "vocab"),)
    rules = (
        Rule("embedding.weight", std=std, axes=vocab),
        Rule("*_embedding.weight", std=std, partial="positions"),
        Rule("layers.*.attention.qkv.weight", std=std, fused=qkv, axes=((0, "heads"),)),
        Rule("layers.*.attention.qkv.bias", init="zeros", fused=qkv, axes=((0, "heads"),)),
        Rule("layers.*.attention.out.weight", std=out_std, axes=((1, "heads"),)),
        Rule("layers.*.attention.[qk]_norm.weight", init="ones", partial="heads"),
        *_feed_forward(config, std, out_std),
        Rule("head.weight", std=std, axes=vocab),
        Rule("head.bias", init="zeros", axes=vocab),
        Rule("head.transform.weight", std=std),
        Rule("head.transform_norm.weight", init="ones"),
        Rule("head.*.bias", init="zeros"),
        Rule("pooler.weight", std=std),
        Rule("pooler.bias", init="zeros"),
        Rule("classifier.weight", std=std),
        Rule("classifier.bias", init="zeros"),
        Rule("*norm.weight", init="ones", partial="positions"),
        Rule("*.bias", init="zeros", partial="positions"),
    )
    tied = config.tied and task != "classify"
    return Table(rules, ties=(("embedding.weight", "head.weight"),) if tied else ())
