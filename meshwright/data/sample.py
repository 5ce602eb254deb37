"""The tokenizer of a run: loaded from a path, or trained on a bounded, repeatable sample of the corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.data.readers import documents
from meshwright.data.sources import Entry, find
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError, Finding

if TYPE_CHECKING:
    from meshwright.config.schema import Source, TokenizerConfig

__all__ = ["sample_texts", "tokenizer_for"]

LEAST_SHARE = 1 << 16


def tokenizer_for(sources: Sequence[Source], config: TokenizerConfig, on_bad_row: str = "stop") -> Tokenizer:
    """Load `config.path`, or train a byte-level BPE of `config.vocab` tokens on `config.sample_bytes` of the sources.

    Raises DataError for a tokenizer that cannot be read, and for a corpus without text.
    """
    if config.path is not None:
        return Tokenizer.load(config.path)
    texts = sample_texts(sources, config.sample_bytes, on_bad_row)
    first = next(texts, None)
    if first is None:
        where = ", ".join(source.path for source in sources[:5])
        raise DataError(findings=[Finding(where, "no documents, so there is nothing to train a tokenizer on")])

    def all_texts() -> Iterator[str]:
        yield first
        yield from texts

    return Tokenizer.train(all_texts(), config.vocab)


def sample_texts(sources: Sequence[Source], sample_bytes: int, on_bad_row: str = "stop") -> Iterator[str]:
    """Texts for training a tokenizer: of every file a share by its size, from its beginning.

    A corpus of up to `sample_bytes` is read whole. Where shares would be tiny, only every n-th file is read. A function of
    the files alone, so that the same corpus always gives the same tokenizer.
    """
    found = find(sources)
    total = sum(entry.size for entries in found for entry in entries)
    files = sum(map(len, found))
    # sizes are those on disk; packed text gives more, so the sum is bounded as well
    share = min(1.0, sample_bytes / max(1, total))
    stride = 1 if share == 1.0 else max(1, min(files * LEAST_SHARE // sample_bytes, int(1 / share)))
    left = sample_bytes
    number = 0
    for source, entries in zip(sources, found, strict=True):
        for entry in entries:
            taken = number % stride == 0
            number += 1
            if not taken or left <= 0:
                continue
            bound = left if share == 1.0 else min(left, max(1, int(entry.size * share * stride)))
            for text in _beginning(source, entry, bound, on_bad_row):
                left -= len(text.encode("utf-8"))
                yield text


def _beginning(source: Source, entry: Entry, bound: int, on_bad_row: str) -> Iterator[str]:
    for document in documents(source, on_bad_row, [entry]):
        for text in (document.prompt, document.text):
            if not text:
                continue
            text = text[:bound]  # at least one byte a character, so this is more than enough
            yield text
            bound -= len(text.encode("utf-8"))
        if bound <= 0:
            return
