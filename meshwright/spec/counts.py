"""How many parameters a model has, from its numbers alone."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config.schema import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.spec.sharding import feature_width

__all__ = ["RankParameters", "active_parameters", "expert_parameters", "parameter_count", "parameter_groups", "rank_parameters"]


def parameter_groups(config: ModelConfig, task: str) -> dict[str, int]:
    """Parameters by group; every parameter is in one group, a tied matrix in `embedding` only.

    embedding   token, position and type tables
    attention   projections of all layers, with biases, without norms
    mlp         the same of the feed-forward layers, with routers and all experts
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

    tables = config.vocab + config.token_types
    if config.positions == "learned":
        tables += config.max_len + config.position_offset
    attention = width * (queries + 2 * keys) + queries * width
    attention += (queries + 2 * keys) * config.qkv_bias + width * config.attention_bias
    ups = config.ffn * (2 if config.activation == "swiglu" else 1)
    mlp = width * ups + config.ffn * width + (ups + width) * config.mlp_bias
    if config.experts:
        mlp = config.experts * (expert_parameters(config) + width)
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


def expert_parameters(config: ModelConfig) -> int:
    """Of one expert of one layer; 0 for a model without."""
    return feature_width(config) * config.width * (3 if config.activation == "swiglu" else 2) if config.experts else 0


def active_parameters(config: ModelConfig, task: str) -> int:
    """Parameters that compute for one token: all but those of the experts that it does not go to."""
    idle = config.experts - config.experts_per_token if config.experts else 0
    return parameter_count(config, task) - config.layers * idle * expert_parameters(config)


class RankParameters(NamedTuple):
    """outside: of them, those outside of the layers. block: of one layer. experts: of the total, those of experts; of a block,
    `expert_block`."""

    total: int
    outside: int
    block: int
    experts: int = 0
    expert_block: int = 0


def rank_parameters(config: ModelConfig, task: str, layout: Layout) -> RankParameters:
    """Parameters of the fullest rank before any data-parallel sharding: its pipeline stage's, split over tp, experts over ep.

    The fullest stage is taken to have a rounded-up share of the layers beside the larger of embedding and head (without a
    pipeline both; so has the first rank of zbv, which is not looked at here); norms and biases, a thousandth of a model, count
    as if they were split too.
    """
    groups = parameter_groups(config, task)
    tied = layout.pp > 1 and task != "classify" and config.tied  # then both ends have the matrix
    ends = groups["embedding"], groups["head"] + (groups["embedding"] if tied else 0)
    dense = (groups["attention"] + groups["mlp"] + groups["norms"]) / config.layers
    experts = config.experts * expert_parameters(config)
    mine = experts / layout.ep / layout.tp
    block = (dense - experts) / layout.tp + mine
    layers = -(-config.layers // layout.pp)
    outside = (max(ends) if layout.pp > 1 else sum(ends)) / layout.tp
    return RankParameters(round(block * layers + outside), round(outside), round(block), round(mine * layers), round(mine))
