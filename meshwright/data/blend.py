"""Which corpus a sample comes from.

Two orders, both pure functions of (seed, sample number) with the same interface: `rows`, the rows of an epoch, and
`locate(sample) -> (corpus, row)`.

- Without weights the corpora are concatenated: every row of every corpus exactly once an epoch, in a new order each.
- With weights the samples are shared out in proportion. Each corpus has its own endless sequence of epochs, each a new
  permutation of its rows; an epoch of the *blend* is as many samples as the corpora have rows together, so a corpus
  whose weight is above its share of the rows is seen more than once in it, and another one less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import ceil, lcm

from meshwright.data.order import Permutation, key
from meshwright.errors import ConfigError, Finding

__all__ = ["Blend", "Concatenation", "Order", "check_weights", "order_of"]

_BLOCK = 256


class Concatenation:
    """Every row of every corpus once an epoch. `rows[c]` is the number of rows of corpus c."""

    def __init__(self, rows: Sequence[int], seed: int):
        self._ends = list(accumulate(rows))
        self._shuffle = lru_cache(maxsize=4)(lambda epoch: Permutation(self.rows, seed, epoch))

    @property
    def rows(self) -> int:
        return self._ends[-1]

    def locate(self, sample: int) -> tuple[int, int]:
        epoch, place = divmod(sample, self.rows)
        row = self._shuffle(epoch)(place)
        corpus = bisect_right(self._ends, row)
        return corpus, row - (self._ends[corpus - 1] if corpus else 0)


class Blend:
    """Corpora in proportion to their weights.

    Samples come in blocks. At every border between blocks, corpus c has had round(W_c n) - round(W_{c-1} n) of the n
    samples (W: running sums of the shares), which adds up to n and is within 1 of its exact share. A block has at least
    2 / (smallest share) samples, so no such count ever falls. Inside a block the corpora are shuffled.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float], seed: int):
        exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.7 means 7/10, not its nearest binary fraction
        shares = [weight / sum(exact) for weight in exact]
        self._unit = lcm(*(share.denominator for share in shares))
        self._bounds = list(accumulate(int(share * self._unit) for share in shares))
        self.shares = tuple(shares)
        self.block = max(_BLOCK, ceil(2 / min(shares)))
        self._rows = list(rows)
        self._seed = seed
        self._open = lru_cache(maxsize=16)(self._open_block)
        self._shuffle = lru_cache(maxsize=4 * len(shares))(
            lambda corpus, epoch: Permutation(self._rows[corpus], key("corpus", seed, corpus), epoch)
        )

    @property
    def rows(self) -> int:
        return sum(self._rows)

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each corpus gives; exact at multiples of `block`."""
        ends = [(2 * bound * samples + self._unit) // (2 * self._unit) for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def pick(self, sample: int) -> tuple[int, int]:
        """(corpus, index in the endless sequence of that corpus). Each index of each corpus comes exactly once."""
        number, slot = divmod(sample, self.block)
        before, ends, shuffle = self._open(number)
        place = shuffle(slot)
        corpus = bisect_right(ends, place)
        return corpus, before[corpus] + place - (ends[corpus - 1] if corpus else 0)

    def locate(self, sample: int) -> tuple[int, int]:
        corpus, index = self.pick(sample)
        epoch, place = divmod(index, self._rows[corpus])
        return corpus, self._shuffle(corpus, epoch)(place)

    def _open_block(self, number: int) -> tuple[list[int], list[int], Permutation]:
        before, after = self.counts(number * self.block), self.counts((number + 1) * self.block)
        ends = list(accumulate(b - a for a, b in zip(before, after, strict=True)))
        return before, ends, Permutation(self.block, key("blend", self._seed), number)


Order = Concatenation | Blend


def check_weights(weights: Sequence[float | None], where: str) -> list[Finding]:
    """Every corpus or none carries a weight."""
    bare = [f"{where}.{i}.weight" for i, weight in enumerate(weights) if weight is None]
    if not bare or len(bare) == len(weights):
        return []
    what = f"is missing while {len(weights) - len(bare)} of {len(weights)} corpora have one"
    return [Finding(name, what, "Give every corpus a weight, or none") for name in bare]


def order_of(rows: Sequence[int], weights: Sequence[float | None], seed: int, where: str = "data.train") -> Order:
    """The order of corpora with these rows. Raises ConfigError when only some of them carry a weight."""
    if findings := check_weights(weights, where):
        raise ConfigError(findings=findings)
    given = [weight for weight in weights if weight is not None]
    return Blend(rows, given, seed) if given else Concatenation(rows, seed)
