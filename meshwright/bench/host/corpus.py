"""A prepared corpus of random tokens, so that the loader can be measured without a text. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.manifest import FileRecord, Manifest
from meshwright.data.shards import TokenStore, digest_of

__all__ = ["MEAN_DOCUMENT", "Numbers", "write_store"]

MEAN_DOCUMENT = 500
"""Tokens of a document in the mean; lengths are log-normal, as those of web pages and articles are."""


@dataclass(frozen=True)
class Numbers:
    """A tokenizer as far as rows need one: the first seven ids are special."""

    vocab_size: int = 32_000
    fingerprint: str = "random tokens"
    bos: int | None = 0
    eos: int | None = 1
    pad: int | None = 2
    mask: int | None = 3
    cls: int | None = 4
    sep: int | None = 5
    unk: int | None = 6


def write_store(folder: Path, tokens: int, numbers: Numbers, seed: int = 0) -> TokenStore:
    """`tokens` random ordinary tokens in documents, in the form that `prepare` writes. What was just written is in the page
    cache, where the machine has memory for it."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    draw.integers(7, numbers.vocab_size, tokens, dtype="<u2").tofile(folder / "tokens-00000.bin")
    # mean of a log-normal: exp(mu + sigma^2 / 2)
    lengths = draw.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, max(1, 2 * tokens // MEAN_DOCUMENT)).astype(np.int64) + 1
    ends = np.cumsum(lengths)
    offsets = np.concatenate([[0], ends[ends < tokens], [tokens]]).astype("<i8")
    offsets.tofile(folder / "offsets.bin")
    Manifest(
        objective="causal_lm",
        dtype="uint16",
        tokens=tokens,
        documents=offsets.size - 1,
        bytes=0,
        empty=0,
        skipped=0,
        longest=int(np.diff(offsets).max()),
        tokenizer={
            "fingerprint": numbers.fingerprint,
            "vocab_size": numbers.vocab_size,
            "special": {"eos": numbers.eos},
        },
        shards=[_record(folder / "tokens-00000.bin")],
        offsets=_record(folder / "offsets.bin"),
    ).write(folder)
    return TokenStore.open(folder)


def _record(path: Path) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, digest_of(path))
