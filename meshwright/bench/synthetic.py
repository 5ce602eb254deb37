"""Rows for measurements: random tokens, which need no corpus, or a file of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Row
from meshwright.data.shards import TokenStore
from meshwright.errors import Finding, UserError

__all__ = ["FileRows", "RandomRows", "token_findings"]


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
    """Rows of real text, cut one behind the other out of a 1-D array of tokens, over and over.

    path: a .npy file, or the folder of a corpus that `meshwright prepare` made. targets: as in `Workload`; of a masked row 15%
    of the positions are hidden behind the last token of the vocabulary, which stands for the mask, and are to be found again.
    All other rows predict the next token.
    """

    def __init__(self, path: str, seq_len: int, targets: str = "causal", vocab: int = 0):
        self.seq_len, self.targets, self.vocab = seq_len, targets, vocab
        self._tokens = _Tokens(path)
        self.rows = (len(self._tokens) - 1) // seq_len

    def row(self, sample: int) -> Row:
        start = sample % self.rows * self.seq_len
        tokens = self._tokens.read(start, start + self.seq_len + 1).astype(np.int64)
        if self.targets != "masked":
            return Row(tokens[:-1], tokens[1:], self.seq_len)
        inputs = tokens[:-1].copy()
        count = round(0.15 * self.seq_len)
        select = np.zeros(-(-self.seq_len * 15 // 100), dtype=np.int64)
        labels = np.full(select.size, IGNORE, dtype=np.int64)
        select[:count] = np.sort(np.random.default_rng((0, sample)).choice(self.seq_len, count, replace=False))
        labels[:count] = inputs[select[:count]]
        inputs[select[:count]] = self.vocab - 1
        return Row(inputs, labels, self.seq_len, select=select)


FIX = "Give a .npy file with a row of token numbers, or a folder that `meshwright prepare` made"


class _Tokens:
    """Of a .npy file or a prepared corpus, memory-mapped."""

    def __init__(self, path: str):
        held: object = TokenStore.open(path) if Path(path).is_dir() else np.load(path, mmap_mode="r")
        if isinstance(held, TokenStore):
            self._held: TokenStore | np.ndarray = held
        elif isinstance(held, np.ndarray) and held.ndim == 1 and held.dtype.kind in "iu":
            self._held = held
        else:
            what = f"{held.ndim}-D, {held.dtype}" if isinstance(held, np.ndarray) else "no array"
            wrong = f"{path} cannot be read: it is {what}, and tokens are a 1-D array of whole numbers"
            raise UserError(findings=[Finding("--tokens", wrong, FIX)])

    def __len__(self) -> int:
        return self._held.tokens if isinstance(self._held, TokenStore) else len(self._held)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._held.read(start, stop) if isinstance(self._held, TokenStore) else self._held[start:stop]

    @property
    def least(self) -> int:
        return 0 if isinstance(self._held, TokenStore) else int(self._held.min())

    @property
    def vocab(self) -> int:
        """Of the tokenizer, or one more than the largest token."""
        return self._held.vocab_size if isinstance(self._held, TokenStore) else int(self._held.max()) + 1


def token_findings(path: str, workloads: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """What is wrong with the tokens of `FileRows`. workloads: positions of a row and vocabulary, by name."""
    if not Path(path).exists():
        return [Finding("--tokens", f"{path} is not there", FIX)]
    try:
        tokens = _Tokens(path)
        length, vocab, least = len(tokens), tokens.vocab, tokens.least
    except UserError as error:
        return list(error.findings)
    except OSError as error:
        return [Finding("--tokens", f"{path} cannot be read: {error.strerror or error}", FIX)]
    except (EOFError, ValueError):
        return [Finding("--tokens", f"{path} is no .npy file, or a damaged one", FIX)]
    found = [Finding("--tokens", f"{path} has the token {least}", FIX)] if least < 0 else []
    for name, (seq_len, size) in workloads.items():
        if vocab > size:
            found.append(Finding("--tokens", f"{path} has tokens up to {vocab - 1}, and {name} knows {size}", "Use other text"))
        if length <= seq_len:
            found.append(Finding("--tokens", f"{path} has {length} tokens, and a row of {name} needs {seq_len + 1}", FIX))
    return found
