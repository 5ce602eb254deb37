"""How tensor parallelism deals a model's parameters to its ranks: integers from the config and the parameter table.

Nothing is padded. Where heads, feed-forward rows or vocabulary do not divide, ranks hold blocks of different sizes.

    attention   whole key/value heads with their queries. Fewer key/value heads than ranks: every one is held by several
                ranks, among which its queries are dealt; queries and keys+values are then two parameters of a rank
    mlp         groups of fused rows (gate and up of the same features together), the same ones of every expert
    vocabulary  rows of embedding and head
    the rest    is whole on every rank; `Rule.partial` says whether its gradient is then a part of the whole
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding
from meshwright.spec.box import Box
from meshwright.spec.model_rules import ARCHITECTURES
from meshwright.spec.model_table import model_table
from meshwright.spec.parameters import Fused, Rule
from meshwright.spec.placement import Placement

__all__ = [
    "HeadSplit",
    "expert_findings",
    "feature_width",
    "head_split",
    "nearest_divisors",
    "nearest_multiples",
    "parameter_shapes",
    "spread",
    "tensor_findings",
    "tensor_placements",
    "vocabulary_split",
]

VOCABULARY_ROWS = 64
"""Rows of the vocabulary come in multiples of it: tiles of a matrix product, and no odd rows at the start of a block."""
FEATURE_ROWS = 16
_ENOUGH = 8
"""Units a rank needs, so that dealing whole units costs at most an eighth of balance; below that single rows are dealt."""


def spread(total: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """(start, size) of each of `parts` runs of `total` things, as even as whole units allow, larger ones first.

    Every run but the last is a multiple of `unit`, where there are at least 8 units a part.
    """
    unit = unit if total >= _ENOUGH * unit * parts else 1
    units = -(-total // unit)
    out, start = [], 0
    for index in range(parts):
        size = min((units // parts + (index < units % parts)) * unit, total - start)
        out.append((start, size))
        start += size
    return out


@dataclass(frozen=True)
class HeadSplit:
    """A rank's heads: `queries` and `keys` are (first, count) of query and key/value heads.

    holders: the ranks that hold these key/value heads, in order; more than one where there are fewer of them than ranks.
    shared: whether there are fewer, in which case this rank's query and key/value rows are two blocks.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    holders: tuple[int, ...]
    shared: bool

    @property
    def group(self) -> int:
        """Query heads a key/value head on this rank."""
        return self.queries[1] // self.keys[1]


def head_split(heads: int, kv_heads: int, tp: int, rank: int) -> HeadSplit:
    """The heads of rank `rank` of `tp`. Legal for tp <= heads."""
    group = heads // kv_heads
    if kv_heads >= tp:
        first, count = spread(kv_heads, tp)[rank]
        return HeadSplit((first * group, count * group), (first, count), (rank,), False)
    for key, (start, count) in enumerate(spread(tp, kv_heads)):
        if start <= rank < start + count:
            first, queries = spread(group, count)[rank - start]
            return HeadSplit((key * group + first, queries), (key, 1), tuple(range(start, start + count)), True)
    raise ValueError(f"rank {rank} is not among {tp}")


def vocabulary_split(vocab: int, tp: int) -> list[tuple[int, int]]:
    """(first row, rows) of the vocabulary on each rank."""
    return spread(vocab, tp, VOCABULARY_ROWS)


def parameter_shapes(config: ModelConfig, task: str) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a decoder or encoder under its logical (fused) name, in the order of the model; a tied
    matrix once, under its canonical name."""
    assert config.vocab is not None  # refused before: spec.model_rules
    width, heads, kv_heads = config.width, config.heads, config.kv_heads or config.heads
    head_dim = config.head_dim or width // heads
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (width,)
        if config.norm == "layer":
            shapes[f"{name}.bias"] = (width,)

    linear("embedding", config.vocab, width, False)
    if config.positions == "learned":
        linear("position_embedding", config.max_len + config.position_offset, width, False)
    if config.token_types:
        linear("type_embedding", config.token_types, width, False)
    if config.embed_norm:
        norm("embedding_norm")
    for index in range(config.layers):
        layer = f"layers.{index}"
        norm(f"{layer}.attention_norm")
        linear(f"{layer}.attention.qkv", (heads + 2 * kv_heads) * head_dim, width, config.qkv_bias)
        linear(f"{layer}.attention.out", width, heads * head_dim, config.attention_bias)
        if config.qk_norm:
            shapes[f"{layer}.attention.q_norm.weight"] = shapes[f"{layer}.attention.k_norm.weight"] = (head_dim,)
        norm(f"{layer}.mlp_norm")
        ffn, ups = feature_width(config), 2 if config.activation == "swiglu" else 1
        if config.experts:
            linear(f"{layer}.mlp.router", config.experts, width, False)
            shapes[f"{layer}.mlp.experts.up"] = (config.experts, ffn * ups, width)
            shapes[f"{layer}.mlp.experts.down"] = (config.experts, width, ffn)
            continue
        linear(f"{layer}.mlp.up", ffn * ups, width, config.mlp_bias)
        linear(f"{layer}.mlp.down", width, ffn, config.mlp_bias)
    if config.final_norm:
        norm("norm")
    if task == "classify":
        assert config.classes is not None  # refused before: spec.model_rules
        if config.pooler:
            linear("pooler", width, width, True)
        linear("classifier", config.classes, width, True)
        return shapes
    if not config.tied:
        shapes["head.weight"] = (config.vocab, width)
    if config.head_bias:
        shapes["head.bias"] = (config.vocab,)
    if config.head_transform:
        linear("head.transform", width, width, True)
        norm("head.transform_norm")
    return shapes


def tensor_placements(config: ModelConfig, task: str, *, tp: int, rank: int, sequence_parallel: bool) -> dict[str, Placement]:
    """The block of every parameter on rank `rank` of `tp`, by the name that it has in that rank's model, in its order.

    Legal for numbers without `tensor_findings`. Groups in `Placement.shared`: "tp" all ranks, "kv" the holders of the same
    key/value heads.
    """
    table, cut = model_table(config, task), _Cut(config, tp, rank)
    out: dict[str, Placement] = {}
    for name, shape in parameter_shapes(config, task).items():
        rule = table.rule(name)
        if rule.axes and tp > 1:
            out.update(cut.blocks(name, shape, rule))
            continue
        partial = tp > 1 and (rule.partial in ("heads", "ffn") or (rule.partial == "positions" and sequence_parallel))
        out[name] = Placement(name, shape, Box.whole(shape), "tp" if partial else "", counted=rank == 0)
    return out


class _Cut:
    """Runs of rows or columns that one rank holds, by what they run over."""

    def __init__(self, config: ModelConfig, tp: int, rank: int):
        self.config, self.tp, self.rank = config, tp, rank
        self.heads = head_split(config.heads, config.kv_heads or config.heads, tp, rank)
        self.head_dim = config.head_dim or config.width // config.heads

    def blocks(self, name: str, shape: tuple[int, ...], rule: Rule) -> dict[str, Placement]:
        ((dim, over),) = rule.axes
        if over == "heads" and rule.fused is not None and self.heads.shared:
            return self._shared_heads(name, shape, rule.fused)
        start, size = self._run(over, shape[dim], rule)
        return {name: Placement(name, shape, _block(shape, dim, start, size))}

    def _run(self, over: str, total: int, rule: Rule) -> tuple[int, int]:
        if over == "vocab":
            return vocabulary_split(total, self.tp)[self.rank]
        if over == "heads":
            (first, count), each = (self.heads.queries, self.head_dim)
            if rule.fused is not None:
                (first, count), each = self.heads.keys, rule.fused.group_rows
            return first * each, count * each
        start, size = _features(self.config, self.tp)[self.rank]
        ratio = total // feature_width(self.config)  # 2 where gate and up lie in one parameter
        return start * ratio, size * ratio

    def _shared_heads(self, name: str, shape: tuple[int, ...], fused: Fused) -> dict[str, Placement]:
        """Rows of a group are its queries, then its key, then its value."""
        (key, _), (first, count) = self.heads.keys, self.heads.queries
        start = key * fused.group_rows
        group = self.config.heads // (self.config.kv_heads or self.config.heads)
        owner, _, leaf = name.rpartition(".")
        queries = _block(shape, 0, start + (first - key * group) * self.head_dim, count * self.head_dim)
        keys = _block(shape, 0, start + group * self.head_dim, 2 * self.head_dim)
        first_holder = self.rank == self.heads.holders[0]
        return {
            f"{owner}.q_{leaf}": Placement(name, shape, queries),
            f"{owner}.kv_{leaf}": Placement(name, shape, keys, "kv", counted=first_holder),
        }


def _features(config: ModelConfig, tp: int) -> list[tuple[int, int]]:
    """(first, count) of the feed-forward features on each rank."""
    rows = _feature_group(config)
    if rows == 1:
        return spread(feature_width(config), tp, FEATURE_ROWS)
    return [(start * rows, size * rows) for start, size in spread(feature_width(config) // rows, tp)]


def feature_width(config: ModelConfig) -> int:
    """Features of a feed-forward layer, or of one expert of it."""
    return config.moe_ffn or config.ffn if config.experts else config.ffn


def _feature_group(config: ModelConfig) -> int:
    """Features that stay together: gate and up alternate in runs of so many rows."""
    fused = model_table(config, "").rule("layers.0.mlp.experts.up" if config.experts else "layers.0.mlp.up.weight").fused
    return 1 if fused is None else fused.parts[0].rows


def _block(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    whole = Box.whole(shape)
    return Box(
        (*whole.offset[:dim], start, *whole.offset[dim + 1 :]),
        (*whole.shape[:dim], size, *whole.shape[dim + 1 :]),
    )


def tensor_findings(config: ModelConfig, tp: int) -> list[Finding]:
    """Every reason why tensor parallelism cannot split this model over `tp` ranks; any smaller number is legal where one is."""
    if tp == 1:
        return []
    if config.arch not in ARCHITECTURES:
        what = f"{tp} ranks cannot split arch {config.arch!r}: nothing says how its parameters are dealt"
        return [Finding("layout.tp", what, f"Use tp: 1, or one of {', '.join(ARCHITECTURES)}")]
    rows, vocab = _feature_group(config), config.vocab or 0
    key, ffn = "model.moe_ffn" if config.experts and config.moe_ffn else "model.ffn", feature_width(config)
    together = f" ({key} {ffn} in runs of {rows})" if rows > 1 else ""
    least = {
        f"{config.heads} query heads (model.heads)": config.heads,
        f"{ffn // rows} groups of feed-forward rows{together or f' ({key})'}": ffn // rows,
        f"{vocab} rows of the vocabulary (model.vocab)": vocab,
    }
    nearest = min(least.values())
    return [
        Finding("layout.tp", f"{tp} ranks, but only {what}: a rank would have none", f"Use tp: {nearest} or less")
        for what, count in least.items()
        if count < tp
    ]


def nearest_multiples(length: int, unit: int) -> str:
    """The multiples of `unit` next to `length`, below and above: "64 or 68"."""
    near = sorted({length // unit * unit or unit, -(-length // unit) * unit})
    return " or ".join(map(str, near))


def nearest_divisors(wanted: int, *numbers: int) -> str:
    """The common divisors of some numbers that are next to `wanted`, below and above: "2 or 4"."""
    common = math.gcd(*numbers)
    legal = [n for n in range(1, common + 1) if common % n == 0]
    near = [max((n for n in legal if n < wanted), default=1), min((n for n in legal if n > wanted), default=0)]
    return " or ".join(str(n) for n in near if n)


def expert_findings(config: ModelConfig, ep: int, data_ranks: int) -> list[Finding]:
    """Every reason why the experts of this model cannot be dealt to `ep` of `data_ranks`; with the nearest legal numbers."""
    if ep == 1:
        return []
    if not config.experts:
        what = f"{ep}, but every token goes through the same feed-forward layers (model.experts is 0)"
        return [Finding("layout.ep", what, "Use ep: 1")]
    near = f"Use ep: {nearest_divisors(ep, data_ranks, config.experts)}"
    if ep > config.experts:
        return [Finding("layout.ep", f"{ep} ranks, but only {config.experts} experts: a rank would have none", near)]
    if config.experts % ep:
        return [Finding("layout.ep", f"{config.experts} experts (model.experts) do not divide by {ep}", near)]
    return []
