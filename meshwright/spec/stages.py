"""Which layers each pipeline stage holds: balanced by operations before a run, by measured seconds after one.

A split is the number of layers of each stage, in the order of the model. Every stage has at least one layer: one without
would only pass on what it gets, and a message costs more than a layer that others could have been spared.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding
from meshwright.spec.counts import expert_parameters

__all__ = ["Costs", "balance", "check_split", "layer_costs", "rebalance", "spans"]


@dataclass(frozen=True)
class Costs:
    """layers: of each layer. first: what comes before them (embedding), last: what comes after (norm, head)."""

    layers: tuple[float, ...]
    first: float
    last: float


def layer_costs(config: ModelConfig, task: str, seq_len: int, head_positions: float | None = None) -> Costs:
    """Operations of forward and backward for one full row of one document, as `observe.flops` counts them.

    head_positions: a row (default: all; 1 for classification). Looking up embeddings multiplies nothing. Raises ValueError for
    a registered architecture, whose operations are not known, and while the vocabulary or the classes are open.
    """
    if config.arch not in ("decoder", "encoder"):
        raise ValueError(f"the operations of architecture {config.arch!r} are not known")
    outputs = config.classes if task == "classify" else config.vocab
    if outputs is None:
        raise ValueError("the vocabulary size or the number of classes is needed to weigh the head")
    if head_positions is None:
        head_positions = 1 if task == "classify" else seq_len
    width, heads, kv_heads = config.width, config.heads, config.kv_heads or config.heads
    head_dim = config.head_dim or width // heads
    matrices = width * head_dim * 2 * (heads + kv_heads)
    if config.experts:
        matrices += config.experts_per_token * expert_parameters(config) + config.experts * width
    else:
        matrices += (3 if config.activation == "swiglu" else 2) * width * config.ffn
    beyond = max(0, seq_len - (config.sliding_window or seq_len))
    causal = config.arch == "decoder"
    pairs = (seq_len**2 - beyond**2) / 2 if causal else seq_len**2 - beyond * (beyond + 1)
    dense = config.pooler if task == "classify" else config.head_transform
    layer = 6.0 * matrices * seq_len + 12.0 * heads * head_dim * pairs
    head = 6.0 * (width * outputs + width**2 * bool(dense)) * head_positions
    return Costs((layer,) * config.layers, 0.0, head)


def balance(costs: Sequence[float], first: float, last: float, stages: int) -> tuple[int, ...]:
    """Layers a stage, such that the dearest stage is as cheap as can be, and among those splits the stages as alike as can be
    (smallest sum of squares; then the later stages have the fewer layers).

    costs: of each layer. first, last: added to the first and to the last stage. Raises ValueError for fewer layers than
    stages: ask `check_split` before.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers are no {stages} stages")
    ends = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return ends[stop] - ends[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    dearest = _table(layers, stages, lambda so_far, here: max(so_far, here), cost)[0]
    limit = dearest * (1 + 1e-12)  # sums of the same costs in another order
    squares = _table(layers, stages, lambda so_far, here: so_far + here * here if here <= limit else float("inf"), cost)
    return squares[1]


def _table(
    layers: int, stages: int, join: Callable[[float, float], float], cost: Callable[[int, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Least value, and the split that has it, over all splits; `join` adds one stage's cost to the value of those before."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = (
                (join(value, cost(stage, start, stop)), (*split, stop - start))
                for start, (value, split) in best.items()
                if start < stop
            )
            following[stop] = min(options, key=lambda option: (option[0], [-count for count in option[1]]))
        best = following
    return best[layers]


def check_split(split: Sequence[int], layers: int, stages: int) -> list[Finding]:
    """Why a model of so many layers cannot be cut into so many stages, or not in this way (an empty split: balanced)."""
    if layers < stages:
        what = f"{stages} stages for {layers} layers; each stage needs one"
        return [Finding("layout.pp", what, f"Use pp * chunks <= {layers}")]
    if not split:
        return []
    findings = []
    if len(split) != stages:
        what = f"{list(split)} has {len(split)} stages, the layout has {stages}"
        findings.append(Finding("plan.split", what, f"Give {stages} numbers, or none to have it balanced"))
    if any(count < 1 for count in split):
        findings.append(Finding("plan.split", f"{list(split)} has a stage without a layer", "Give every stage at least one"))
    if sum(split) != layers:
        even = balance([1.0] * layers, 0.0, 0.0, stages)
        what = f"{list(split)} has {sum(split)} layers, the model {layers}"
        findings.append(Finding("plan.split", what, f"e.g. {list(even)}"))
    return findings


def spans(split: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Layers [first, stop) of each stage."""
    ends = [0, *itertools.accumulate(split)]
    return tuple(itertools.pairwise(ends))


def rebalance(seconds: Sequence[float], split: Sequence[int]) -> tuple[int, ...]:
    """A better split after stages of `split` took so many `seconds` each; the same one where none is better.

    Layers are alike. A stage in the middle is nothing else, so that its time tells what a layer costs there, slow devices
    included; what the first and the last stage take beyond their layers is the embedding's and the head's. With no stage in
    the middle a layer is taken for the cheapest that it can be.
    """
    stages = len(split)
    if len(seconds) != stages or any(second <= 0 for second in seconds):
        raise ValueError(f"{list(seconds)} are no measured seconds of {stages} stages")
    each = [second / count for second, count in zip(seconds, split, strict=True)]
    ends = (0, stages - 1)
    usual = statistics.median(each[1:-1]) if stages > 2 else min(each)
    layer = [min(usual, each[stage]) if stage in ends else each[stage] for stage in range(stages)]
    extra = [second - count * cost for second, count, cost in zip(seconds, split, layer, strict=True)]
    # time grows with every layer, so giving each to the stage that then takes the least is the best there is
    found = [1] * stages
    for _ in range(sum(split) - stages):
        after = [extra[stage] + (found[stage] + 1) * layer[stage] for stage in range(stages)]
        found[after.index(min(after))] += 1
    slowest = max(extra[stage] + found[stage] * layer[stage] for stage in range(stages))
    return tuple(found) if slowest < max(seconds) * (1 - 1e-9) else tuple(split)
