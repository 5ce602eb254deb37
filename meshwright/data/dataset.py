"""Numbered samples of a run: corpora, their order, and the inputs and labels that an objective makes of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from meshwright.config.schema import Config
from meshwright.data.blend import Concatenation, Order, order_of
from meshwright.data.checks import PreparedStore, TokenizerInfo, check_rows, check_settings, check_stores
from meshwright.data.cuts import Cuts
from meshwright.data.masking import Masking
from meshwright.data.rows import DocumentRows, Rows, StreamRows, Subset
from meshwright.errors import ConfigError, DataError, Finding, counted

__all__ = ["Block", "Dataset", "Frame", "Row", "RowDataset", "block_of", "build_datasets"]

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


@dataclass(frozen=True)
class Block:
    """B samples side by side: the fields of `Row`, in their order, with a leading B; `lengths` int64 [B]."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None
    select: np.ndarray | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Block:
        return cls(*_columns(rows, np.stack))

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        return cls(*_columns(blocks, np.concatenate))

    def row(self, number: int) -> Row:
        tokens, labels, lengths, *others = (getattr(self, field.name) for field in fields(self))
        rest = (None if other is None else other[number] for other in others)
        return Row(tokens[number], labels[number, ...], int(lengths[number]), *rest)


def _columns(parts: Sequence[Row] | Sequence[Block], together: Callable[[list[Any]], np.ndarray]) -> Iterator[Any]:
    """Each field of all parts as one array; None where the parts have none."""
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        yield None if values[0] is None else together(values)


class Dataset(Protocol):
    """Samples by number, without end. Which fields a row has, and their shapes, are the same for every row."""

    @property
    def rows(self) -> int:
        """Samples of an epoch."""

    @property
    def seq_len(self) -> int: ...

    def row(self, sample: int) -> Row:
        """A pure function of (seed, sample)."""


def block_of(dataset: Dataset, samples: range) -> Block:
    """At least one sample; in one piece from a dataset that has `block(samples)`, else its rows one by one."""
    whole: Callable[[range], Block] | None = getattr(dataset, "block", None)
    return Block.of([dataset.row(sample) for sample in samples]) if whole is None else whole(samples)


@dataclass(frozen=True)
class Frame:
    """How cuts become rows of S: the padding id, and which of documents and positions the rows carry."""

    seq_len: int
    pad: int
    documents: bool
    positions: bool

    def block(self, cuts: Cuts, tokens: np.ndarray, labels: np.ndarray, select: np.ndarray | None = None) -> Block:
        """Writes the padding into `tokens` and its begin into `cuts.first`."""
        first, short = cuts.first, cuts.short()
        for row in short:
            size = cuts.sizes[row]
            tokens[row, size:] = self.pad
            first[row, size] = True  # the padding counts from 0 too
        documents = positions = None
        if self.documents:
            documents = first.cumsum(axis=1, dtype=np.int32)
            documents -= 1
            for row in short:
                documents[row, cuts.sizes[row] :] = -1
        if self.positions:
            starts = np.flatnonzero(first)
            lengths = np.empty_like(starts)  # a few microseconds less than np.diff with `append`
            lengths[:-1], lengths[-1] = starts[1:], first.size
            lengths -= starts
            positions = (np.arange(first.size) - starts.repeat(lengths)).reshape(first.shape)
        return Block(tokens, labels, cuts.sizes, documents, positions, select)


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
        self._finish: Callable[[Cuts, Sequence[int]], Block]
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
        return self._finish(Cuts.of([self._corpora[corpus].cut(row)], self.seq_len), [sample]).row(0)

    def block(self, samples: range) -> Block:
        """`row` of every sample, cut in one call for each corpus that they come from."""
        places: dict[int, list[int]] = {}
        rows: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            corpus, row = self._order.locate(sample)
            places.setdefault(corpus, []).append(place)
            rows.setdefault(corpus, []).append(row)
        parts = [self._corpora[corpus].cuts(np.array(some)) for corpus, some in rows.items()]
        return self._finish(Cuts.gathered(parts, np.concatenate(list(places.values()))), samples)

    def _causal(self, cuts: Cuts, samples: Sequence[int]) -> Block:
        return self._frame.block(cuts, cuts.tokens, cuts.following)

    def _masked(self, cuts: Cuts, samples: Sequence[int]) -> Block:
        assert self._masking is not None
        tokens, select, labels = self._masking(cuts.tokens, samples, cuts.may_be_predicted())
        return self._frame.block(cuts, tokens, labels, select)

    def _classify(self, cuts: Cuts, samples: Sequence[int]) -> Block:
        assert cuts.labels is not None, "only rows of documents are classified"
        return self._frame.block(cuts, cuts.tokens, cuts.labels)


def _notes(corpora: Sequence[Rows], seq_len: int) -> list[str]:
    whole = [rows for rows in corpora if isinstance(rows, DocumentRows)]
    truncated, empty = sum(rows.truncated for rows in whole), sum(rows.empty for rows in whole)
    documents = sum(rows.subset.documents for rows in whole)
    notes = [f"longer than {seq_len} tokens and cut: {truncated} of {counted(documents, 'document')}"] if truncated else []
    return notes + ([f"without tokens, so without a row: {empty} of {counted(documents, 'document')}"] if empty else [])


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
    if findings := check_settings(config, tokenizer, task):
        raise ConfigError(findings=findings)
    _refuse(check_stores(config, train_stores, valid_stores, tokenizer, task))
    subsets, held = _split(config, train_stores, valid_stores)
    label_names = train_stores[0].label_names if task == "classify" else None

    corpora = [_corpus(config, subset, tokenizer, task) for subset in subsets]
    rows = [corpus.rows for corpus in corpora]
    _refuse(check_rows(config, rows))
    order = order_of(rows, [source.weight for source in config.data.train], config.run.seed)
    train = _dataset(config, corpora, order, tokenizer, task, config.run.seed, label_names)
    if not held:
        return train, None
    corpora = [_corpus(config, subset, tokenizer, task) for subset in held]
    rows = [corpus.rows for corpus in corpora]
    if not sum(rows):
        documents = sum(subset.documents for subset in held)
        _refuse(
            [
                Finding(
                    "data.valid",
                    f"there are no tokens in {counted(documents, 'held-out document')}",
                    "Hold out more, or other files",
                )
            ]
        )
    order = Concatenation(rows, _HELD_OUT_SEED)
    return train, _dataset(config, corpora, order, tokenizer, task, _HELD_OUT_SEED, label_names)


def _refuse(findings: Sequence[Finding]) -> None:
    if findings:
        raise DataError(findings=findings)


def _split(
    config: Config, train_stores: Sequence[PreparedStore], valid_stores: Sequence[PreparedStore]
) -> tuple[list[Subset], list[Subset]]:
    """Documents to train on and documents held out; sizes are known, and refused, before anything is built."""
    fraction = config.data.valid_fraction
    if valid_stores or not fraction:
        return [Subset.whole(store) for store in train_stores], [Subset.whole(store) for store in valid_stores]
    pairs = [Subset.split(store, fraction) for store in train_stores]
    total, held = sum(store.documents for store in train_stores), sum(part.documents for _, part in pairs)
    if not held and not config.evaluate.every:  # nobody asked for figures on held-out text, so a tiny corpus may do without
        return [part for part, _ in pairs], []
    if not held or any(not part.documents for part, _ in pairs):
        what = f"{fraction} of {counted(total, 'document')} is {held} held out and {total - held} to train on"
        largest = max(store.documents for store in train_stores)
        if largest > 1:
            change = "Set it lower" if held else f"Set it to {1 / largest:.2g} or more"
        else:  # a single document cannot be shared out
            change = "A text file up to 1 MiB is one document: make several of it, or a .jsonl file with a document a row"
        off = "set evaluate.every to 0" if not held else "set it to 0"
        _refuse([Finding("data.valid_fraction", what, f"{change}, or name files in data.valid, or {off} for no evaluation")])
    return [part for part, _ in pairs], [part for _, part in pairs if part.documents]


def _corpus(config: Config, subset: Subset, tokenizer: TokenizerInfo, task: str) -> Rows:
    data, response_only = config.data, config.objective.response_only
    if task == "classify":
        closing = frozenset(i for i in (tokenizer.sep, tokenizer.eos) if i is not None)
        return DocumentRows(subset, data.seq_len, truncate=True, closing=closing)
    if data.packing == "none":
        return DocumentRows(subset, data.seq_len, response_only=response_only)
    return StreamRows(subset, data.seq_len, document_mask=data.document_mask, response_only=response_only)


def _dataset(
    config: Config,
    corpora: Sequence[Rows],
    order: Order,
    tokenizer: TokenizerInfo,
    task: str,
    seed: int,
    label_names: Sequence[str] | None,
) -> RowDataset:
    packed = task != "classify" and config.data.packing == "stream"
    bordered = packed and config.data.document_mask
    # Without borders a packed causal row needs no documents: its padding is at the end, which no earlier token sees.
    # Where attention goes both ways, padding must be marked.
    pads = [i for i in (tokenizer.pad, tokenizer.eos) if i is not None]
    frame = Frame(
        config.data.seq_len, pads[0] if pads else 0, documents=bordered or not packed or task != "lm", positions=bordered
    )
    masking = None
    if task == "mlm":
        assert tokenizer.mask is not None, "checked before"
        masking = Masking(
            seed,
            fraction=config.objective.mask_fraction,
            seq_len=config.data.seq_len,
            vocab_size=tokenizer.vocab_size,
            mask_id=tokenizer.mask,
            special_ids=_special_ids(tokenizer),
        )
    return RowDataset(corpora, order, frame, masking=masking, classify=task == "classify", label_names=label_names)


def _special_ids(tokenizer: TokenizerInfo) -> set[int]:
    names = ("bos", "eos", "pad", "mask", "cls", "sep", "unk")
    return {i for i in (getattr(tokenizer, name) for name in names) if i is not None}
