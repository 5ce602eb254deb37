"""Random tokens as a dataset, so that a measurement needs no corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Row

__all__ = ["RandomRows"]


@dataclass(frozen=True)
class RandomRows:
    """Rows without padding or document borders. targets: as in `Workload`; masked rows have 15% of the positions."""

    seq_len: int
    vocab: int
    targets: str
    seed: int = 0
    rows: int = 1 << 20

    def row(self, sample: int) -> Row:
        draw = np.random.default_rng((self.seed, sample))
        tokens = draw.integers(0, self.vocab, self.seq_len + 1, dtype=np.int64)
        inputs = tokens[:-1]
        if self.targets == "causal":
            return Row(inputs, tokens[1:], self.seq_len)
        labels = draw.integers(0, self.vocab, self.seq_len, dtype=np.int64)
        if self.targets == "all":
            return Row(inputs, labels, self.seq_len)
        count = round(0.15 * self.seq_len)
        select = np.full(-(-self.seq_len * 15 // 100), 0, dtype=np.int64)
        chosen = np.full(select.size, IGNORE, dtype=np.int64)
        select[:count] = np.sort(draw.choice(self.seq_len, count, replace=False))
        chosen[:count] = labels[:count]
        return Row(inputs, chosen, self.seq_len, select=select)
