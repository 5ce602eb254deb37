"""Rows of a corpus before an objective makes inputs and labels of them: one (`Cut`), and several side by side (`Cuts`).

Legend: B rows, S tokens a row, n <= S of them real, k documents in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from meshwright.data.batch import IGNORE

__all__ = ["Cut", "Cuts"]


@dataclass(frozen=True)
class Cut:
    """The n real tokens of a row.

    tokens     int64 [n]
    following  int64 [n] the token that comes after each one, IGNORE where there is none or it is no target
    starts     int64 [k] where each document of the row begins, the first at 0
    eligible   bool [n] tokens that may be predicted themselves (masked_lm); None: all
    label      class of the document; IGNORE where documents have none
    """

    tokens: np.ndarray
    following: np.ndarray
    starts: np.ndarray
    eligible: np.ndarray | None = None
    label: int = IGNORE


@dataclass(frozen=True)
class Cuts:
    """B rows of one length S; what follows the n real tokens of a shorter one says nothing but `following`: IGNORE.

    tokens, following  int64 [B, S]
    first              bool [B, S] where a document begins; column 0 is true
    sizes              int64 [B] real tokens
    eligible           bool [B, S], or None: all
    labels             int64 [B], or None where documents have none
    """

    tokens: np.ndarray
    following: np.ndarray
    first: np.ndarray
    sizes: np.ndarray
    eligible: np.ndarray | None = None
    labels: np.ndarray | None = None

    @classmethod
    def of(cls, cuts: Sequence[Cut], seq_len: int) -> Cuts:
        """Rows that were cut one by one."""
        shape = (len(cuts), seq_len)
        tokens, following = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        first, eligible = np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)
        for row, cut in enumerate(cuts):
            size = cut.tokens.size
            tokens[row, :size], following[row, :size], first[row, cut.starts] = cut.tokens, cut.following, True
            if cut.eligible is not None:
                eligible[row, :size] = cut.eligible
        sizes, labels = (
            np.array(values, dtype=np.int64) for values in ([c.tokens.size for c in cuts], [c.label for c in cuts])
        )
        return cls(tokens, following, first, sizes, None if all(c.eligible is None for c in cuts) else eligible, labels)

    @classmethod
    def gathered(cls, parts: Sequence[Cuts], places: np.ndarray) -> Cuts:
        """The rows of all parts, the i-th of them at `places[i]`. All parts have the same fields."""
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(places)

        def gather(values: Sequence[Any]) -> Any:
            return None if values[0] is None else np.concatenate(values)[order]

        return cls(*(gather([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def short(self) -> np.ndarray:
        """Numbers of the rows that have fewer than S real tokens."""
        return np.flatnonzero(self.sizes < self.tokens.shape[1])

    def may_be_predicted(self) -> np.ndarray | None:
        """bool [B, S] `eligible` without what follows the real tokens; None: every place."""
        if not self.short().size:
            return self.eligible
        real = np.arange(self.tokens.shape[1]) < self.sizes[:, None]
        return real if self.eligible is None else real & self.eligible
