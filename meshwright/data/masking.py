"""Which tokens a masked-language-model row asks for, and what stands in their place."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.order import key, mix_array

__all__ = ["Masking"]

_MASKED, _RANDOM = 0.8, 0.1
_UNIT = 2.0**-53
_LAST = np.uint64(2**64 - 1)


class Masking:
    """Draws from (seed, sample number, position) alone: not from the rank, the micro-batch or the calls before.

    Of the c candidates of a row (neither special nor padding), exactly max(1, round(fraction * c)) are targets, none when
    c is 0. Of the targets 80% are replaced by the mask token, 10% by a random ordinary token and 10% stay as they are
    (Devlin et al., 2018, section 3.1).
    """

    def __init__(self, seed: int, *, fraction: float, seq_len: int, vocab_size: int, mask_id: int, special_ids: set[int]):
        self.fraction = fraction
        self.slots = max(1, ceil(fraction * seq_len - 1e-9))  # 0.1 * 30 is a little more than 3 in floating point
        self._seed = seed
        self._mask_id = mask_id
        self._special = np.zeros(vocab_size, dtype=bool)
        self._special[[i for i in {*special_ids, mask_id} if 0 <= i < vocab_size]] = True
        self._ordinary = np.flatnonzero(~self._special)

    def __call__(
        self, tokens: np.ndarray, samples: Sequence[int], eligible: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens int64 [B, S], the sample number of each row, eligible bool [B, S] (None: all; false on padding) -> (tokens
        with masks int64 [B, S], select int64 [B, slots], labels int64 [B, slots]). `select` rises; unused slots have position 0
        and the label IGNORE."""
        allowed = ~self._special[tokens]
        if eligible is not None:
            allowed &= eligible
        places = allowed.sum(axis=1)
        counts = np.maximum(1, np.rint(self.fraction * places)).astype(np.int64) * (places > 0)
        chosen = np.flatnonzero(self._least(allowed, counts, samples))
        row = np.arange(len(samples)).repeat(counts)
        place = chosen - row * tokens.shape[1]
        slot = np.arange(chosen.size) - (counts.cumsum() - counts)[row]
        select = np.zeros((len(samples), self.slots), dtype=np.int64)
        labels = np.full(select.shape, IGNORE, dtype=np.int64)
        select[row, slot], labels[row, slot] = place, tokens.reshape(-1)[chosen]
        return self._replace(tokens, row, place, samples), select, labels

    def _least(self, allowed: np.ndarray, counts: np.ndarray, samples: Sequence[int]) -> np.ndarray:
        """bool [B, S]: the `counts` allowed places of each row whose numbers in the row's stream are the smallest. No two are
        equal, because `mix` is a bijection."""
        lots = mix_array(self._streams("mask", samples)[:, None], np.arange(allowed.shape[1]))
        lots[~allowed] = _LAST
        lowest = np.sort(lots, axis=1)
        bound = lowest[np.arange(counts.size), np.maximum(counts, 1) - 1]
        return allowed & (lots <= bound[:, None])

    def _replace(self, tokens: np.ndarray, row: np.ndarray, place: np.ndarray, samples: Sequence[int]) -> np.ndarray:
        tokens = tokens.copy()
        fate = (mix_array(self._streams("mask fate", samples)[row], place) >> np.uint64(11)) * _UNIT
        masked, swapped = fate < _MASKED, (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
        tokens[row[masked], place[masked]] = self._mask_id
        if self._ordinary.size:
            row, place = row[swapped], place[swapped]
            draw = mix_array(self._streams("mask swap", samples)[row], place) % np.uint64(self._ordinary.size)
            tokens[row, place] = self._ordinary[draw.astype(np.int64)]
        return tokens

    def _streams(self, name: str, samples: Sequence[int]) -> np.ndarray:
        """uint64 [B]"""
        return np.array([key(name, self._seed, sample) for sample in samples], dtype=np.uint64)
