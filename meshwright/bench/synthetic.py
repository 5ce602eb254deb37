"""Rows for measurements: random tokens, which need no corpus, or a file of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Row

__all__ = ["FileRows", "RandomRows"]


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


class FileRows:
    """Rows for next-token prediction, cut one behind the other from a 1-D array of tokens in a .npy file, over and over."""

    def __init__(self, path: str, seq_len: int):
        self.seq_len = seq_len
        self._tokens = np.load(path, mmap_mode="r")
        self.rows = (len(self._tokens) - 1) // seq_len

    def row(self, sample: int) -> Row:
        start = sample % self.rows * self.seq_len
        tokens = self._tokens[start : start + self.seq_len + 1].astype(np.int64)
        return Row(tokens[:-1], tokens[1:], self.seq_len)
