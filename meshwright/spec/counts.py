"""How many parameters a model has, from its numbers alone."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config.schema import ModelConfig
from meshwright.spec.layout import Layout

__all__ = ["RankParameters", "parameter_count", "parameter_groups", "rank_parameters"]


def parameter_groups(config: ModelConfig, task: str) -> dict[str, int]:
    """Parameters by group; every parameter is in one group, a tied matrix in `embedding` only.

    embedding   token, position and type tables
    attention   projections of all layers, with biases, without norms
    mlp         the same of the feed-forward layers
    norms       every norm but the one inside a masked-LM head
    head        output matrix and bias, transform and its norm; or pooler and classifier
    """
    if config.vocab is None:
        raise ValueError("the vocabulary size is needed to count parameters")
    width, layers = config.width, config.layers
    head_dim = config.head_dim or width // config.heads
    queries = config.heads * head_dim
    keys = (config.kv_heads or config.heads) * head_dim
    norm = width * (2 if config.norm == "layer" else 1)
    ups = config.ffn * (2 if config.activation == "swiglu" else 1)

    tables = config.vocab + config.token_types
    if config.positions == "learned":
        tables += config.max_len + config.position_offset
    attention = width * (queries + 2 * keys) + queries * width
    attention += (queries + 2 * keys) * config.qkv_bias + width * config.attention_bias
    mlp = width * ups + config.ffn * width + (ups + width) * config.mlp_bias
    norms = layers * (2 * norm + 2 * head_dim * config.qk_norm) + norm * (config.final_norm + config.embed_norm)
    if task == "classify":
        if config.classes is None:
            raise ValueError("the number of classes is needed to count parameters")
        head = (width + 1) * (config.classes + width * config.pooler)
    else:
        head = config.vocab * (width * (not config.tied) + config.head_bias)
        head += (width * width + width + norm) * config.head_transform
    return {"embedding": tables * width, "attention": layers * attention, "mlp": layers * mlp, "norms": norms, "head": head}


def parameter_count(config: ModelConfig, task: str) -> int:
    """All parameters, tied ones once."""
    return sum(parameter_groups(config, task).values())


class RankParameters(NamedTuple):
    """outside: of them, those outside of the layers. block: of one layer."""

    total: int
    outside: int
    block: int


def rank_parameters(config: ModelConfig, task: str, layout: Layout) -> RankParameters:
    """Parameters of the fullest rank before any data-parallel sharding: its pipeline stage's, split over tp.

    The fullest stage is taken to have a rounded-up share of the layers beside the larger of embedding and head (without a
    pipeline both; so has the first rank of zbv, which is not looked at here); norms and biases, a thousandth of a model, count
    as if they were split too.
    """
    groups = parameter_groups(config, task)
    tied = layout.pp > 1 and task != "classify" and config.tied  # then both ends have the matrix
    ends = groups["embedding"], groups["head"] + (groups["embedding"] if tied else 0)
    block = (groups["attention"] + groups["mlp"] + groups["norms"]) / config.layers / layout.tp
    outside = (max(ends) if layout.pp > 1 else sum(ends)) / layout.tp
    total = block * -(-config.layers // layout.pp) + outside
    return RankParameters(round(total), round(outside), round(block))
