"""What each parameter is made of, as data: the one table that weight initialisation, the optimizer, checkpoints,
conversion and (with the sharding axes) every parallel strategy read.

A *fused* parameter holds several logical ones, interleaved by groups so that a contiguous split of its first
dimension over r ranks (r dividing `groups`) gives every rank whole groups, hence a whole slice of every part.
Rows are laid out [group 0: part a rows, part b rows, ...][group 1: ...].
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Fused", "Part", "Rule", "Table"]


@dataclass(frozen=True)
class Part:
    """One logical parameter inside a fused one: its name and its rows in each group."""

    name: str
    rows: int


@dataclass(frozen=True)
class Fused:
    parts: tuple[Part, ...]
    groups: int = 1

    @property
    def group_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def slices(self, part: str) -> Iterable[tuple[slice, slice]]:
        """(rows of the logical parameter, rows of the fused one) for every group."""
        start = 0
        for p in self.parts:
            if p.name == part:
                for g in range(self.groups):
                    fused = g * self.group_rows + start
                    yield slice(g * p.rows, (g + 1) * p.rows), slice(fused, fused + p.rows)
                return
            start += p.rows
        raise KeyError(part)


@dataclass(frozen=True)
class Rule:
    """How one family of parameters is filled and split.

    pattern: `fnmatch` over the parameter's name. init: "normal" (std), "ones", "zeros".
    axes: (tensor dimension, what it runs over) of the dimension that tensor parallelism splits: "heads", "ffn" or "vocab";
    empty: every rank holds all of it.
    partial: where a parameter is held whole, over what its gradient is a sum whose terms may lie on several ranks: "heads",
    "ffn", "positions" (spread by sequence parallelism), or empty where every rank computes all of it.
    experts: whether the first dimension runs over experts, each of which is filled as a parameter of its own.
    """

    pattern: str
    init: str = "normal"
    std: float = 0.02
    fused: Fused | None = None
    axes: tuple[tuple[int, str], ...] = ()
    partial: str = ""
    experts: bool = False


@dataclass(frozen=True)
class Table:
    rules: tuple[Rule, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """(canonical name, other name) of parameters that are one tensor."""

    def rule(self, name: str) -> Rule:
        for rule in self.rules:
            if fnmatch.fnmatchcase(name, rule.pattern):
                return rule
        raise KeyError(f"no rule for parameter {name!r}")
