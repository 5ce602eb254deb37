"""An in-memory token store and tokenizer for tests of the row side, and a configuration that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.config.schema import Config

FINGERPRINT = "ab" * 32
VOCAB = 64


@dataclass
class Words:
    """Ids below 7 are special, in the order of the fields."""

    vocab_size: int = VOCAB
    fingerprint: str = FINGERPRINT
    pad: int | None = 0
    bos: int | None = 1
    eos: int | None = 2
    mask: int | None = 3
    cls: int | None = 4
    sep: int | None = 5
    unk: int | None = 6


@dataclass
class FakeStore:
    parts: Sequence[Sequence[int]]
    labels: np.ndarray | None = None
    prompt_lengths: np.ndarray | None = None
    label_names: Sequence[str] | None = None
    tokenizer_fingerprint: str = FINGERPRINT
    vocab_size: int = VOCAB
    eos: int | None = 2
    offsets: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._stream = np.array([token for part in self.parts for token in part], dtype=np.uint16)
        self.offsets = np.concatenate([[0], np.cumsum([len(part) for part in self.parts], dtype=np.int64)]).astype(np.int64)

    @property
    def documents(self) -> int:
        return len(self.parts)

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        return self._stream[start:stop]


def counting(lengths: Sequence[int], **kwargs: Any) -> FakeStore:
    """Documents of these lengths whose tokens count 0, 1, 2, ... through the whole store: a token names its place."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return FakeStore([range(int(a), int(b)) for a, b in pairwise(bounds)], **kwargs)


def config(**sections: Any) -> Config:
    """Tiny rows, one corpus, nothing held out; each argument is a section that is laid over that."""
    base: dict[str, Any] = {"data": {"train": [{"path": "corpus"}], "valid_fraction": 0.0, "seq_len": 8}, "train": {"batch": 1}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return Config.model_validate(base)
