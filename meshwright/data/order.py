"""Where a sample number points: a permutation that needs no array, and the rows that a step takes.

Everything here is a pure function of integers, so any position can be reached at once and is the same on every rank,
in every process and in every version of numpy (whose generators may change their streams between versions).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import numpy as np

from meshwright.errors import DataError, Finding

__all__ = ["Permutation", "Span", "key", "mix", "mix_array", "step_span"]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP_64, _A_64, _B_64 = (np.uint64(number) for number in (_STEP, _A, _B))
_SHIFTS = tuple(np.uint64(number) for number in (30, 27, 31))
_ROUNDS = 8


def key(*parts: int | str) -> int:
    """64 bits that depend on every part: the root of one stream of random numbers. Parts may be of any size."""
    return _digest(parts, 1)[0]


def _digest(parts: tuple[int | str, ...], count: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8 * count).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count))


def mix(stream: int, counter: int) -> int:
    """The `counter`-th 64-bit number of a stream: SplitMix64 (Steele, Lea, Flood 2014) with a seek."""
    x = (stream + counter * _STEP) & _MASK
    x = ((x ^ (x >> 30)) * _A) & _MASK
    x = ((x ^ (x >> 27)) * _B) & _MASK
    return x ^ (x >> 31)


def mix_array(stream: int | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """`mix` of every counter, of one stream or of as many (uint64) as broadcast against the counters. Any integer array in,
    uint64 of the broadcast shape out."""
    x = counters.astype(np.uint64)
    x *= _STEP_64
    x = x + (stream if isinstance(stream, np.ndarray) else np.uint64(stream))  # everything below happens in place
    x ^= x >> _SHIFTS[0]
    x *= _A_64
    x ^= x >> _SHIFTS[1]
    x *= _B_64
    x ^= x >> _SHIFTS[2]
    return x


class Permutation:
    """A pseudo-random bijection of range(n), chosen by (seed, epoch), evaluated at one place in O(1).

    A Feistel network over two digits (of base a and b with a * b >= n, a * b - n < a) and cycle walking: what leaves
    range(n) is sent through again. Both from Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    n goes up to 2**62.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0):
        if not 1 <= n <= 2**62:
            raise ValueError(f"a permutation of {n} things: 1 .. 2**62 are possible")
        self.n = n
        self._a = isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = _digest(("order", n, seed, epoch), _ROUNDS)
        self._pairs = tuple(zip(self._keys[::2], self._keys[1::2], strict=True))

    def __call__(self, i: int) -> int:
        """The i-th element. Raises IndexError outside range(n)."""
        a, b = self._a, self._b
        left, right = divmod(self._checked(i), b)
        while True:
            for even, odd in self._pairs:  # two rounds, `mix` written out: every row of a run comes by here
                x = (even + right * _STEP) & _MASK
                x = ((x ^ (x >> 30)) * _A) & _MASK
                x = ((x ^ (x >> 27)) * _B) & _MASK
                left = (left + (x ^ (x >> 31))) % a
                x = (odd + left * _STEP) & _MASK
                x = ((x ^ (x >> 30)) * _A) & _MASK
                x = ((x ^ (x >> 27)) * _B) & _MASK
                right = (right + (x ^ (x >> 31))) % b
            if left * b + right < self.n:
                return left * b + right

    def inverse(self, value: int) -> int:
        """The i with self(i) == value."""
        a, b = self._a, self._b
        left, right = divmod(self._checked(value), b)
        while True:
            for turn in reversed(range(_ROUNDS)):
                if turn % 2:
                    right = (right - mix(self._keys[turn], left)) % b
                else:
                    left = (left - mix(self._keys[turn], right)) % a
            if left * b + right < self.n:
                return left * b + right

    def many(self, places: np.ndarray) -> np.ndarray:
        """`self(i)` of every i of an integer array; int64 of the same shape."""
        a, b, n = np.uint64(self._a), np.uint64(self._b), np.uint64(self.n)
        x = places.astype(np.uint64).reshape(-1)
        if x.size and int(x.max()) >= self.n:
            raise IndexError(f"{int(x.max())} is outside range({self.n})")
        todo = np.arange(x.size)
        while todo.size:
            left: np.ndarray = x[todo] // b
            right: np.ndarray = x[todo] % b
            for turn, round_key in enumerate(self._keys):
                if turn % 2:
                    right = (right + mix_array(round_key, left) % b) % b
                else:
                    left = (left + mix_array(round_key, right) % a) % a
            x[todo] = left * b + right
            todo = todo[x[todo] >= n]
        return x.astype(np.int64).reshape(places.shape)

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is outside range({self.n})")
        return i


@dataclass(frozen=True)
class Span:
    """The samples [start, start + rows) of one step, and the rows of the epoch's end that were left out before them."""

    start: int
    rows: int
    dropped: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.rows


def step_span(consumed: int, batch_at: Callable[[int], int], epoch_rows: int, tail: str) -> Span:
    """The samples that the next step takes after `consumed` of them; `batch_at(consumed)` is the global batch in rows.

    No step reaches over the end of an epoch: with tail 'step' the last one is smaller, with 'drop' the rest of the epoch
    is skipped and counted. Raises DataError when 'drop' would drop everything.
    """
    batch = batch_at(consumed)
    left = epoch_rows - consumed % epoch_rows
    if left >= batch or tail == "step":
        return Span(consumed, min(batch, left))
    start = consumed + left
    batch = batch_at(start)
    if batch > epoch_rows:
        what = f"a batch of {batch} rows is larger than the {epoch_rows} rows of an epoch, and tail 'drop' leaves nothing"
        raise DataError(findings=[Finding("train.batch", what, f"Set it to {epoch_rows} or less, or train.tail to step")])
    return Span(start, batch, left)
