"""A small set of cases in which every two values meet: most faults of a combination are faults of two of its parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import numpy as np

__all__ = ["pairs_of", "pairwise"]

Value = tuple[str, Hashable]
Pair = tuple[Value, Value]


def pairs_of(case: Mapping[str, Hashable]) -> set[Pair]:
    """Every two (factor, value) of a case; with a single factor that one beside itself."""
    values = sorted(case.items(), key=lambda item: item[0])
    return set(combinations(values, 2)) or {(value, value) for value in values}


def pairwise(cases: Sequence[Mapping[str, Hashable]], chosen: Sequence[int] = ()) -> list[int]:
    """Indices of a few of the cases that hold every pair of values that any of them holds, in the order of the choice.

    Greedy: always the first of the cases that bring the most pairs that are still missing. Which of two equal cases is
    taken follows from their order alone. chosen: cases that are taken whatever they bring; they come first.
    """
    numbers: dict[Pair, int] = {}
    held = [[numbers.setdefault(pair, len(numbers)) for pair in sorted(pairs_of(case), key=repr)] for case in cases]
    width = max(map(len, held), default=0)
    table = np.full((len(cases), width), len(numbers), dtype=np.int64)  # a last column of `missing` that is never so
    for row, pairs in zip(table, held, strict=True):
        row[: len(pairs)] = pairs
    missing = np.ones(len(numbers) + 1, dtype=bool)
    missing[-1] = False
    out = list(chosen)
    missing[table[out]] = False
    while missing.any():
        best = int(missing[table].sum(axis=1).argmax())
        out.append(best)
        missing[table[best]] = False
    return out
