"""From a token store to rows: which documents belong to a split, and where each row is cut.

Memory stays small whatever the corpus: a split is kept as runs of neighbouring documents (as many numbers as the smaller
part has documents), and windows are indexed once every 1024 documents. Everything else is read from the store's offsets.

Legend: B rows, S tokens a row, W tokens a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Protocol

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.cuts import Cut, Cuts
from meshwright.data.order import key, mix_array

__all__ = ["DocumentRows", "Rows", "Store", "StreamRows", "Subset", "held_out"]

_SPLIT_SALT = "held-out documents"  # never changes: the split must outlive versions and the seeds of runs
_CHUNK = 1 << 20
_INDEX_EVERY = 1024


class Store(Protocol):
    """What rows need of a token store; `offsets` int64 [documents + 1], `labels` and `prompt_lengths` int64 [documents]."""

    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray | None: ...
    @property
    def prompt_lengths(self) -> np.ndarray | None: ...
    def read(self, start: int, stop: int) -> np.ndarray: ...


class Rows(Protocol):
    """A corpus as numbered rows. `cut` says what a row is; `cuts` gives the same of B rows (int64 [B]) side by side."""

    @property
    def rows(self) -> int: ...
    def cut(self, row: int) -> Cut: ...
    def cuts(self, rows: np.ndarray) -> Cuts: ...


def held_out(documents: int, fraction: float) -> np.ndarray:
    """The round(fraction * documents) documents of the held-out part: those with the smallest hash of their index.

    int64, rising. It depends on nothing else, so that no run ever trains on what another holds out of the same store, and
    a store that has grown keeps most of its held-out documents.
    """
    wanted = min(documents, round(fraction * documents))
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    share = wanted / documents
    bound = share + 8 * sqrt(share / documents) + 16 / documents
    while True:
        ids, hashes = _below(documents, bound)
        if ids.size >= wanted:
            return np.sort(ids[np.argpartition(hashes, wanted - 1)[:wanted]])
        bound *= 2


def _below(documents: int, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Documents whose hash is in the lowest `bound` (a share) of all hashes, and the hashes; a chunk in memory at a time."""
    limit = np.uint64(min(2**64 - 1, int(bound * 2.0**64)))
    stream = key(_SPLIT_SALT)
    ids, hashes = [], []
    for start in range(0, documents, _CHUNK):
        some = np.arange(start, min(start + _CHUNK, documents))
        values = mix_array(stream, some)
        near = values <= limit
        ids.append(some[near])
        hashes.append(values[near])
    return np.concatenate(ids), np.concatenate(hashes)


def _runs(ids: np.ndarray) -> np.ndarray:
    """Rising document numbers -> [R, 2] first and past-the-last of every run of neighbours."""
    if not ids.size:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    return np.stack([ids[np.concatenate([[0], breaks + 1])], ids[np.concatenate([breaks, [ids.size - 1]])] + 1], axis=1)


class Subset:
    """Some documents of a store, in their order, as one stream of tokens."""

    def __init__(self, store: Store, runs: np.ndarray):
        self.store = store
        self._offsets = np.asarray(store.offsets)  # a plain view: memmap's own type slows every small slice
        self._first = runs[:, 0]
        self._base = self._offsets[runs[:, 0]]
        self._stream = _cumulative(self._offsets[runs[:, 1]] - self._base)
        self._ordinal = _cumulative(runs[:, 1] - runs[:, 0])

    @classmethod
    def whole(cls, store: Store) -> Subset:
        return cls(store, np.array([[0, store.documents]], dtype=np.int64))

    @classmethod
    def split(cls, store: Store, fraction: float) -> tuple[Subset, Subset]:
        """(training part, held-out part); no document is in both, and every document is in one."""
        ids = held_out(store.documents, fraction)
        kept = _runs(ids)
        borders = np.concatenate([[0], kept.reshape(-1), [store.documents]]).reshape(-1, 2)
        return cls(store, borders[borders[:, 1] > borders[:, 0]]), cls(store, kept)

    @property
    def documents(self) -> int:
        return int(self._ordinal[-1])

    @property
    def tokens(self) -> int:
        return int(self._stream[-1])

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Document numbers in the store of this subset's documents start .. stop - 1."""
        ordinals = np.arange(start, stop)
        run = np.searchsorted(self._ordinal, ordinals, side="right") - 1
        return self._first[run] + ordinals - self._ordinal[run]

    def extent(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and past-the-last token in the store of each document."""
        return self._offsets[ids], self._offsets[ids + 1]

    def window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens start .. stop - 1 of the stream: (tokens int64 [stop - start], where each document that has a token in it
        begins, counted from `start` and so maybe below 0 for the first, document numbers in the store)."""
        if len(self._first) == 1:  # a whole store is one run
            return self._piece(start + int(self._base[0]), stop + int(self._base[0]), 0)
        parts = [self._piece(*piece) for piece in self._pieces(start, stop)]
        if len(parts) == 1:
            return parts[0]
        tokens, begins, ids = zip(*parts, strict=True)
        return np.concatenate(tokens), np.concatenate(begins), np.concatenate(ids)

    def windows(
        self, starts: np.ndarray, stops: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`window` of every pair, at most W = `width` tokens each: (tokens [B, W] of the store's type, zeros behind those of a
        shorter window; then of each document, window after window: the window's number, where the document begins, its number
        in the store). Documents without tokens may be named where they stand."""
        window, shift, begin, end = self._pieces_of(starts, stops)
        read = self.store.read
        tokens = np.concatenate([read(a, b) for a, b in zip(begin.tolist(), end.tolist(), strict=True)])
        if tokens.size < starts.size * width:
            filled, tokens = tokens, np.zeros((starts.size, width), dtype=tokens.dtype)
            tokens[np.arange(width) < (stops - starts)[:, None]] = filled
        first = self._offsets.searchsorted(begin, side="right") - 1
        piece, ids = _ranges(first, self._offsets.searchsorted(end, side="left"))
        return tokens.reshape(-1, width), window[piece], self._offsets[ids] - (shift + starts[window])[piece], ids

    def _pieces_of(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, ...]:
        """(number of the window, what a place in the store is more than in the stream, first and past-the-last token in the
        store) of each run that a window meets, window after window."""
        if len(self._first) == 1:
            return np.arange(starts.size), self._base, starts + self._base, stops + self._base
        first = self._stream.searchsorted(starts, side="right") - 1
        window, run = _ranges(first, self._stream.searchsorted(stops, side="left"))
        begin, end = np.maximum(starts[window], self._stream[run]), np.minimum(stops[window], self._stream[run + 1])
        if not (full := begin < end).all():  # runs without tokens
            window, run, begin, end = window[full], run[full], begin[full], end[full]
        shift = self._base[run] - self._stream[run]
        return window, shift, begin + shift, end + shift

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first and past-the-last token in the store, place in the window) of each run that the window meets."""
        run = int(self._stream.searchsorted(start, side="right")) - 1
        place = start
        while place < stop:
            end = min(stop, int(self._stream[run + 1]))
            if end > place:
                shift = int(self._base[run] - self._stream[run])
                yield place + shift, end + shift, place - start
            place, run = end, run + 1

    def _piece(self, start: int, stop: int, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = int(self._offsets.searchsorted(start, side="right")) - 1
        last = int(self._offsets.searchsorted(stop, side="left"))
        bounds = self._offsets[first : last + 1]
        begins, ids = bounds[:-1] - (start - place), np.arange(first, last)
        full = bounds[1:] > bounds[:-1]  # documents without tokens have no place in a row
        if not full.all():
            begins, ids = begins[full], ids[full]
        return self.store.read(start, stop).astype(np.int64), begins, ids


def _cumulative(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers first[i] .. last[i] - 1 of every i, one after the other, behind the i of each."""
    counts = last - first
    ends = counts.cumsum()
    owner = np.arange(counts.size).repeat(counts)
    return owner, np.arange(owner.size) - (ends - last)[owner]


def _spread(begins: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Index of the document of each of `size` tokens, and its offset in that document."""
    lengths = np.diff(np.concatenate([np.maximum(begins, 0), [size]]))
    document = np.repeat(np.arange(begins.size), lengths)
    return document, np.arange(size) - begins[document]


class StreamRows:
    """Rows cut from the concatenated documents: row i is the tokens [i * S, (i + 1) * S), the last one shorter.

    Every token is an input exactly once; with `document_mask` no token follows across the border of a document, without
    it the whole subset is one document. With `response_only` the leading prompt_lengths[d] tokens are no targets.
    """

    def __init__(self, subset: Subset, seq_len: int, *, document_mask: bool = True, response_only: bool = False):
        self.subset = subset
        self.seq_len = seq_len
        self._mask = document_mask
        self._prompts = np.asarray(subset.store.prompt_lengths) if response_only else None

    @property
    def rows(self) -> int:
        return -(-self.subset.tokens // self.seq_len)

    def cut(self, row: int) -> Cut:
        start, total = row * self.seq_len, self.subset.tokens
        size = min(self.seq_len, total - start)
        # One token more than the row has: its last token must know what follows, and whether that is a new document.
        tokens, begins, ids = self.subset.window(start, min(start + size + 1, total))
        following = np.empty(size, dtype=np.int64)
        following[: tokens.size - 1] = tokens[1:]
        following[tokens.size - 1 :] = IGNORE
        eligible = None
        if self._prompts is not None:
            document, offset = _spread(begins, tokens.size)
            target = offset >= self._prompts[ids][document]
            following[: tokens.size - 1][~target[1:]] = IGNORE
            eligible = target[:size]
        if not self._mask:
            return Cut(tokens[:size], following, np.zeros(1, dtype=np.int64), eligible)
        following[begins[1:] - 1] = IGNORE  # all but the first begin behind the row's first token
        starts = begins[:-1] if begins[-1] >= size else begins  # the last may begin behind the row
        starts[0] = 0
        return Cut(tokens[:size], following, starts, eligible)

    def cuts(self, rows: np.ndarray) -> Cuts:
        starts, width = rows * self.seq_len, self.seq_len + 1
        stops = np.minimum(starts + width, self.subset.tokens)
        seen, owner, begins, ids = self.subset.windows(starts, stops, width)
        tokens, following = seen[:, :-1].astype(np.int64), seen[:, 1:].astype(np.int64)
        sizes = np.minimum(stops - starts, self.seq_len)
        for row in np.flatnonzero(stops - starts < width):  # at the end of the corpus
            following[row, stops[row] - starts[row] - 1 :] = IGNORE
        eligible = None
        if self._prompts is not None:
            target = _targets(owner, begins, begins + self._prompts[ids], (rows.size, width))
            following[~target[:, 1:]] = IGNORE
            eligible = target[:, :-1]
        first = np.zeros(tokens.shape, dtype=bool)
        if self._mask:
            behind = begins > 0
            begins = begins[behind]
            borders = owner[behind] * self.seq_len + begins
            following.reshape(-1)[borders - 1] = IGNORE
            first.reshape(-1)[borders[begins < self.seq_len]] = True  # the others begin behind their row
        first[:, 0] = True
        return Cuts(tokens, following, first, sizes, eligible)


def _targets(owner: np.ndarray, begins: np.ndarray, turns: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """bool [B, W]: the places of each document from `turns` on, which as `begins` counts within the window `owner`."""
    rows, width = shape
    low = owner * width + np.maximum(begins, 0)
    ends = np.append(low[1:], rows * width)
    turn = np.clip(owner * width + turns, low, ends)
    lengths = np.stack([turn - low, ends - turn], axis=1).reshape(-1)
    return np.tile([False, True], low.size).repeat(lengths).reshape(shape)


class DocumentRows:
    """Rows that begin with a document. A longer one goes on in further rows of S tokens, its last one shorter; with
    `truncate` (classification) it is cut to the first S instead, keeping its `closing` token (a separator or end mark).
    Documents without tokens give no row.
    """

    def __init__(
        self,
        subset: Subset,
        seq_len: int,
        *,
        truncate: bool = False,
        response_only: bool = False,
        closing: frozenset[int] = frozenset(),
    ):
        self.subset = subset
        self.seq_len = seq_len
        self.truncated = 0
        """Documents that lost tokens."""
        self.empty = 0
        """Documents without tokens."""
        self._truncate = truncate
        self._closing = closing
        self._labels = subset.store.labels
        self._prompts = subset.store.prompt_lengths if response_only else None
        self._index = self._build()

    @property
    def rows(self) -> int:
        return int(self._index[-1])

    def cut(self, row: int) -> Cut:
        document, window = self._find(row)
        begin, end = (int(places[0]) for places in self.subset.extent(np.array([document])))
        start = begin + window * self.seq_len
        size = min(self.seq_len, end - start)
        read = self.subset.store.read
        tokens = read(start, min(start + size + 1, end)).astype(np.int64)
        following = np.full(size, IGNORE, dtype=np.int64)
        following[: tokens.size - 1] = tokens[1:]
        eligible = None
        if self._prompts is not None:
            target = np.arange(tokens.size) + (start - begin) >= int(self._prompts[document])
            following[: tokens.size - 1][~target[1:]] = IGNORE
            eligible = target[:size]
        tokens = tokens[:size]
        if self._truncate and size < end - begin and (last := int(read(end - 1, end)[0])) in self._closing:
            tokens[-1] = last
        label = IGNORE if self._labels is None else int(self._labels[document])
        return Cut(tokens, following, np.zeros(1, dtype=np.int64), eligible, label)

    def cuts(self, rows: np.ndarray) -> Cuts:
        return Cuts.of([self.cut(row) for row in rows.tolist()], self.seq_len)

    def _build(self) -> np.ndarray:
        """Rows before every 1024th document, and in all."""
        sums = []
        chunk = _INDEX_EVERY * 256
        for start in range(0, self.subset.documents, chunk):
            counts, lengths = self._counts(start, min(start + chunk, self.subset.documents))
            self.empty += int((lengths == 0).sum())
            self.truncated += int((lengths > self.seq_len).sum()) if self._truncate else 0
            sums.append(np.add.reduceat(counts, np.arange(0, counts.size, _INDEX_EVERY)))
        return _cumulative(np.concatenate(sums) if sums else np.empty(0, dtype=np.int64))

    def _counts(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, tokens) of each of the subset's documents start .. stop - 1."""
        first, last = self.subset.extent(self.subset.ids(start, stop))
        lengths = last - first
        return (lengths > 0).astype(np.int64) if self._truncate else -(-lengths // self.seq_len), lengths

    def _find(self, row: int) -> tuple[int, int]:
        """(document number in the store, window of that document)."""
        block = int(np.searchsorted(self._index, row, side="right")) - 1
        start = block * _INDEX_EVERY
        counts, _ = self._counts(start, min(start + _INDEX_EVERY, self.subset.documents))
        ends = np.cumsum(counts)
        rest = row - int(self._index[block])
        place = int(np.searchsorted(ends, rest, side="right"))
        return int(self.subset.ids(start + place, start + place + 1)[0]), rest - int(ends[place] - counts[place])
