"""A step as whole numbers: what goes to the device, and to other ranks, in one piece.

Shapes: T new tokens of R sequences, S of them whose logits are asked for, M most blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np

from meshwright.serve.scheduler import Sequence, Work

__all__ = ["Packed", "Packer"]


@dataclass(frozen=True)
class Packed:
    """numbers: int32, the fields below behind each other. sizes: T, R, S, M.

    tokens, positions, slots  one of each new token
    feeds                     where a token is not known here: which of those that the step before chose; else -1. [T]
    counts, lengths           new tokens, and all tokens, of each sequence
    select                    index of the tokens whose logits are asked for
    tables                    blocks of each sequence, [R, M]; what is behind the last one is any block
    """

    numbers: np.ndarray
    sizes: tuple[int, int, int, int]

    @classmethod
    def of(cls, token_fields: np.ndarray, row_fields: np.ndarray, select: np.ndarray, tables: np.ndarray) -> Packed:
        """token_fields: tokens, feeds, positions, slots, [4, T]. row_fields: counts, lengths, [2, R]."""
        parts = (token_fields, row_fields, select, tables)
        sizes = (token_fields.shape[1], row_fields.shape[1], select.shape[0], tables.shape[1])
        return cls(np.concatenate([part.ravel() for part in parts], dtype=np.int32, casting="unsafe"), sizes)

    @property
    def token_fields(self) -> np.ndarray:
        tokens = self.sizes[0]
        return self.numbers[: 4 * tokens].reshape(4, tokens)

    @property
    def tokens(self) -> np.ndarray:
        return self.token_fields[0]

    @property
    def feeds(self) -> np.ndarray:
        return self.token_fields[1]

    @property
    def positions(self) -> np.ndarray:
        return self.token_fields[2]

    @property
    def slots(self) -> np.ndarray:
        return self.token_fields[3]

    @property
    def row_fields(self) -> np.ndarray:
        tokens, rows, _, _ = self.sizes
        return self.numbers[4 * tokens : 4 * tokens + 2 * rows].reshape(2, rows)

    @property
    def counts(self) -> np.ndarray:
        return self.row_fields[0]

    @property
    def lengths(self) -> np.ndarray:
        return self.row_fields[1]

    @property
    def select(self) -> np.ndarray:
        tokens, rows, selected, _ = self.sizes
        start = 4 * tokens + 2 * rows
        return self.numbers[start : start + selected]

    @property
    def tables(self) -> np.ndarray:
        tokens, rows, selected, _ = self.sizes
        return self.numbers[4 * tokens + 2 * rows + selected :].reshape(rows, -1)

    @property
    def single(self) -> bool:
        """Whether it is one new token of each sequence, and all of their logits are asked for."""
        tokens, rows, selected, _ = self.sizes
        return tokens == rows == selected


class Packer:
    """Keeps the blocks of every running sequence as a row of numbers, so that a step writes down only what is new."""

    def __init__(self, seats: int, block_size: int, width: int):
        """seats: most sequences that run. width: most blocks of one."""
        self.block_size = block_size
        self._tables = np.zeros((seats, width), np.int32)
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * seats

    def pack(self, work: Listed[Work]) -> Packed:
        """The work of a step; logits are asked for where a sequence's newest token is part of it, in the order of the work."""
        for item in work:
            self._write(item.sequence)
        rows, size = len(work), self.block_size
        seats = np.fromiter((item.sequence.seat for item in work), np.int32, rows)
        counts = np.fromiter((item.count for item in work), np.int32, rows)
        starts = np.fromiter((item.start for item in work), np.int32, rows)
        stops = np.cumsum(counts, dtype=np.int32)
        row = np.repeat(np.arange(rows, dtype=np.int32), counts)
        fields = np.empty((4, row.shape[0]), np.int32)
        fields[0] = self._tokens(work, row.shape[0])
        fields[1] = -1
        fields[1, stops - 1] = np.fromiter((item.feed for item in work), np.int32, rows)
        fields[2] = np.arange(row.shape[0], dtype=np.int32) + (starts - stops + counts)[row]
        fields[3] = self._tables[seats[row], fields[2] // size] * size + fields[2] % size
        lengths = starts + counts
        last = np.fromiter((item.last for item in work), np.bool_, rows)
        width = -(-int(lengths.max()) // size)
        return Packed.of(fields, np.stack((counts, lengths)), stops[last] - 1, self._tables[seats, :width])

    def _tokens(self, work: Listed[Work], count: int) -> list[int]:
        if count == len(work):
            return [item.sequence.tokens[item.start] if item.feed < 0 else 0 for item in work]
        found: list[int] = []
        for item in work:
            found += item.sequence.tokens[item.start : item.start + item.count] if item.feed < 0 else [0]
        return found

    def _write(self, sequence: Sequence) -> None:
        """A sequence that gave its blocks back has another list of them when it runs again."""
        blocks, seat = sequence.blocks, sequence.seat
        known, count = self._written[seat]
        if known is not blocks or count != len(blocks):
            start = count if known is blocks else 0
            self._tables[seat, start : len(blocks)] = blocks[start:]
            self._written[seat] = blocks, len(blocks)
