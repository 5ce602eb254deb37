"""How context parallelism deals the positions of a row to its ranks, and by which method attention sees all of them. Integers.

ring        every rank keeps its queries; keys and values go round. A causal row of S positions is cut into 2 cp chunks and
            rank r has chunks r and 2 cp - 1 - r, so that all ranks have the same number of pairs of a query and a key
all_to_all  for attention a rank gets all positions of a part of the heads. Rank r has the r-th run of S / cp positions,
            as it has in a ring where attention goes both ways
"""

from __future__ import annotations

import math

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding
from meshwright.spec.plan import Plan
from meshwright.spec.sharding import head_split, nearest_multiples

__all__ = [
    "chunk_unit",
    "chunks_of",
    "context_findings",
    "context_method",
    "deals_in_pairs",
    "heads_divide",
    "length_finding",
    "resolved",
]


def heads_divide(model: ModelConfig, tp: int, cp: int) -> bool:
    """Whether every tensor-parallel rank can deal its heads to cp ranks: its query heads divide by cp, and its key/value heads
    do too, or are so few that each goes to several ranks alike."""
    kv_heads = model.kv_heads or model.heads
    splits = [head_split(model.heads, kv_heads, tp, rank) for rank in range(tp)]
    return all(split.queries[1] % cp == 0 and (split.keys[1] % cp == 0 or cp % split.keys[1] == 0) for split in splits)


def context_method(asked: str, model: ModelConfig, tp: int, cp: int) -> str:
    """ "ring" or "all_to_all" for `plan.context`: all_to_all where the heads of every rank divide, since attention is then one
    call on whole rows; else ring, which any number of heads allows."""
    if asked != "auto":
        return asked
    return "all_to_all" if tp <= model.heads and heads_divide(model, tp, cp) else "ring"


def resolved(plan: Plan, model: ModelConfig) -> str:
    """`plan.context` with nothing left open where there are context-parallel ranks."""
    if plan.layout.cp == 1:
        return plan.context
    return context_method(plan.context, model, plan.layout.tp, plan.layout.cp)


def deals_in_pairs(method: str, arch: str) -> bool:
    """Whether a rank has two chunks of a row, one from each end: what balances a causal ring."""
    return method == "ring" and arch == "decoder"


def chunk_unit(ranks: int, pairs: bool) -> int:
    """What the length of a row must divide by."""
    return 2 * ranks if pairs else ranks


def chunks_of(length: int, ranks: int, rank: int, pairs: bool) -> tuple[tuple[int, int], ...]:
    """(start, size) of the runs of positions that a rank has, in rising order."""
    size = length // chunk_unit(ranks, pairs)
    if not pairs:
        return ((rank * size, size),)
    return ((rank * size, size), ((2 * ranks - 1 - rank) * size, size))


def context_findings(plan: Plan, model: ModelConfig, seq_len: int) -> list[Finding]:
    """Every reason why the positions of rows of `seq_len` cannot be dealt as the plan says, with the nearest that can."""
    layout = plan.layout
    if layout.cp == 1 or layout.tp > model.heads:  # the latter is refused for itself
        return []
    found = []
    method = resolved(plan, model)
    if plan.context == "all_to_all" and not heads_divide(model, layout.tp, layout.cp):
        what = f"all_to_all, but {model.heads} query and {model.kv_heads or model.heads} key/value heads"
        what += f" over tp {layout.tp} do not divide by cp {layout.cp}"
        found.append(Finding("plan.context", what, "Use context: ring, or leave it out"))
    if method == "ring" and model.attention_dropout:
        what = (
            f"ring, but with model.attention_dropout {model.attention_dropout} no rank has a whole row of weights to drop from"
        )
        fix = "Use attention_dropout: 0, or a cp that divides the heads (context: all_to_all)"
        found.append(Finding("plan.context", what, fix))
    pairs = deals_in_pairs(method, model.arch)
    if finding := length_finding(seq_len, layout.cp, pairs, layout.tp if plan.sequence_parallel else 1):
        found.append(finding)
    return found


def length_finding(length: int, ranks: int, pairs: bool, tp: int = 1) -> Finding | None:
    """What is wrong with rows of `length` tokens. tp: ranks that share the positions of each rank once more."""
    chunk = chunk_unit(ranks, pairs)
    unit = ranks * math.lcm(chunk // ranks, tp)
    if length % unit == 0:
        return None
    how = f"{chunk} chunks, two a rank, of cp {ranks}" if pairs else f"cp {ranks} ranks"
    how += f", each over tp {tp}" if tp > 1 else ""
    fix = f"Use data.seq_len {nearest_multiples(length, unit)}, or another cp"
    return Finding("layout.cp", f"rows of {length} tokens do not divide into {how}", fix)
