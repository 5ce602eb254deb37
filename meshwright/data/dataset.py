"""Numbered samples of a run: corpora, their order, and the inputs and labels that an objective makes of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshwright.config.schema import Config
from meshwright.data.batch import IGNORE
from meshwright.data.blend import Concatenation, Order, order_of
from meshwright.data.masking import Masking
from meshwright.data.rows import Cut, DocumentRows, Rows, Store, StreamRows, Subset
from meshwright.errors import ConfigError, DataError, Finding

__all__ = ["Dataset", "PreparedStore", "Row", "RowDataset", "TokenizerInfo", "build_datasets"]

TASKS = {"causal_lm": "lm", "masked_lm": "mlm", "classify": "classify"}
_HELD_OUT_SEED = 0  # not run.seed: two runs are compared on the same held-out rows under the same masks


@dataclass(frozen=True)
class Row:
    """One sample, padded to S. Fields as in `Batch`, without the leading B; `length` is the number of real tokens."""

    tokens: np.ndarray
    labels: np.ndarray
    length: int
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None
    select: np.ndarray | None = None


class Dataset(Protocol):
    """Samples by number, without end. Which fields a row has, and their shapes, are the same for every row."""

    @property
    def rows(self) -> int:
        """Samples of an epoch."""

    @property
    def seq_len(self) -> int: ...

    def row(self, sample: int) -> Row:
        """A pure function of (seed, sample)."""


class PreparedStore(Store, Protocol):
    """A token store with what is needed to check that it fits the run."""

    @property
    def label_names(self) -> Sequence[str] | None: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...


class TokenizerInfo(Protocol):
    """What rows need of a tokenizer. Special ids may be None."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def cls(self) -> int | None: ...
    @property
    def sep(self) -> int | None: ...
    @property
    def unk(self) -> int | None: ...


@dataclass(frozen=True)
class Frame:
    """How a cut becomes a row of S: the padding id, and which of documents and positions the rows carry."""

    seq_len: int
    pad: int
    documents: bool
    positions: bool

    def row(self, cut: Cut, tokens: np.ndarray, labels: np.ndarray, select: np.ndarray | None = None) -> Row:
        size = tokens.size
        documents = positions = None
        if self.documents:
            lengths = np.diff(np.append(cut.starts, size))
            documents = self.fill(np.repeat(np.arange(cut.starts.size, dtype=np.int32), lengths), -1)
        if self.positions:
            starts = cut.starts if size == self.seq_len else np.append(cut.starts, size)  # the padding counts from 0 too
            lengths = np.diff(np.append(starts, self.seq_len))
            positions = np.arange(self.seq_len) - np.repeat(starts, lengths)
        return Row(self.fill(tokens, self.pad), labels, size, documents, positions, select)

    def fill(self, values: np.ndarray, value: int) -> np.ndarray:
        if values.size == self.seq_len:
            return values
        return np.concatenate([values, np.full(self.seq_len - values.size, value, dtype=values.dtype)])


class RowDataset:
    """Rows of several corpora in the order of a run.

    notes: what the user should know about the rows, one line each (documents that were cut, that are empty).
    label_names: names of the classes where documents are labelled.
    """

    def __init__(
        self,
        corpora: Sequence[Rows],
        order: Order,
        frame: Frame,
        *,
        masking: Masking | None = None,
        classify: bool = False,
        label_names: Sequence[str] | None = None,
    ):
        self._corpora = list(corpora)
        self._order = order
        self._frame = frame
        self._finish: Callable[[Cut, int], Row]
        self._finish = self._classify if classify else self._causal if masking is None else self._masked
        self._masking = masking
        self.label_names = None if label_names is None else tuple(label_names)
        self.notes = tuple(_notes(self._corpora, frame.seq_len))

    @property
    def rows(self) -> int:
        return self._order.rows

    @property
    def seq_len(self) -> int:
        return self._frame.seq_len

    @property
    def classes(self) -> int:
        """Labels of a classification corpus, else 0."""
        return len(self.label_names or ())

    def row(self, sample: int) -> Row:
        corpus, row = self._order.locate(sample)
        return self._finish(self._corpora[corpus].cut(row), sample)

    def _causal(self, cut: Cut, sample: int) -> Row:
        return self._frame.row(cut, cut.tokens, self._frame.fill(cut.following, IGNORE))

    def _masked(self, cut: Cut, sample: int) -> Row:
        assert self._masking is not None
        tokens, select, labels = self._masking(cut.tokens, sample, cut.eligible)
        return self._frame.row(cut, tokens, labels, select)

    def _classify(self, cut: Cut, sample: int) -> Row:
        return self._frame.row(cut, cut.tokens, np.array(cut.label, dtype=np.int64))


def _notes(corpora: Sequence[Rows], seq_len: int) -> list[str]:
    whole = [rows for rows in corpora if isinstance(rows, DocumentRows)]
    truncated, empty = sum(rows.truncated for rows in whole), sum(rows.empty for rows in whole)
    documents = sum(rows.subset.documents for rows in whole)
    notes = [f"{truncated} of {documents} documents are longer than {seq_len} tokens and were cut"] if truncated else []
    return notes + ([f"{empty} of {documents} documents have no tokens and give no row"] if empty else [])


def build_datasets(
    config: Config,
    train_stores: Sequence[PreparedStore],
    valid_stores: Sequence[PreparedStore],
    tokenizer: TokenizerInfo,
    task: str | None = None,
) -> tuple[RowDataset, RowDataset | None]:
    """The training and the held-out samples of a run.

    train_stores, valid_stores: one store for each source of data.train and data.valid. task ("lm", "mlm", "classify") is
    needed for a registered objective only. Without valid_stores, data.valid_fraction of each training store's documents
    are held out; a fraction of 0 means no held-out set. Held-out corpora are concatenated, in an order that does not
    depend on run.seed, so that the first rows of it are a fair sample of all.

    Raises ConfigError (settings) and DataError (numbers of the corpora), each with every finding at once.
    """
    task = task or TASKS.get(config.objective.kind, "lm")
    _raise(ConfigError, _check_settings(config, tokenizer, task))
    _raise(DataError, _check_stores(config, "train", train_stores, tokenizer, task) + _check_stores(config, "valid", valid_stores, tokenizer, task))
    subsets, held = _split(config, train_stores, valid_stores)
    builder = _Builder(config, tokenizer, task, train_stores[0].label_names if task == "classify" else None)
    corpora = [builder.corpus(subset) for subset in subsets]
    rows = [corpus.rows for corpus in corpora]
    _raise(DataError, _check_size(config, rows))
    train = builder.dataset(corpora, order_of(rows, _weights(config, rows), config.run.seed), config.run.seed)
    if not held:
        return train, None
    corpora = [builder.corpus(subset) for subset in held]
    rows = [corpus.rows for corpus in corpora]
    if not sum(rows):
        raise DataError(findings=[Finding("data.valid", "the held-out documents have no tokens", "Name other files, or hold out more")])
    return train, builder.dataset(corpora, Concatenation(rows, _HELD_OUT_SEED), _HELD_OUT_SEED)
