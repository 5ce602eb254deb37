"""Which tokens a masked-language-model row asks for, and what stands in their place."""

from __future__ import annotations

from math import ceil

import numpy as np

from meshwright.data.batch import IGNORE
from meshwright.data.order import key, mix_array

__all__ = ["Masking"]

_MASKED, _RANDOM = 0.8, 0.1
_UNIT = 2.0**-53


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
        self, tokens: np.ndarray, sample: int, eligible: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens int64 [n] without padding, eligible bool [n] (None: all) -> (tokens with masks int64 [n], select int64
        [slots], labels int64 [slots]). `select` rises; unused slots have position 0 and the label IGNORE."""
        allowed = ~self._special[tokens]
        if eligible is not None:
            allowed &= eligible
        candidates = np.flatnonzero(allowed)
        select = np.zeros(self.slots, dtype=np.int64)
        labels = np.full(self.slots, IGNORE, dtype=np.int64)
        if not candidates.size:
            return tokens, select, labels
        count = max(1, round(self.fraction * candidates.size))
        lots = mix_array(key("mask", self._seed, sample), candidates)
        chosen = np.sort(candidates[np.argpartition(lots, count - 1)[:count]])
        select[:count] = chosen
        labels[:count] = tokens[chosen]
        return self._replace(tokens, chosen, sample), select, labels

    def _replace(self, tokens: np.ndarray, chosen: np.ndarray, sample: int) -> np.ndarray:
        tokens = tokens.copy()
        fate = (mix_array(key("mask fate", self._seed, sample), chosen) >> np.uint64(11)) * _UNIT
        tokens[chosen[fate < _MASKED]] = self._mask_id
        swapped = chosen[(fate >= _MASKED) & (fate < _MASKED + _RANDOM)]
        if self._ordinary.size:
            draw = mix_array(key("mask swap", self._seed, sample), swapped) % np.uint64(self._ordinary.size)
            tokens[swapped] = self._ordinary[draw.astype(np.int64)]
        return tokens
