"""An exported model against the model itself, at several sizes, with padding on either side; and how fast it is.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.models.trunk import Trunk

__all__ = ["Batch", "Parity", "Run", "batches", "compare", "expected", "latency_ms"]

Run = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(input_ids, attention_mask) int64 [B, S] -> what the exported model gives."""
LIMIT = 1e-4
"""Of the largest value (or of 1): other kernels sum fp32 in another order. A wrong mask or position is 1e-2 and more."""
WARM = 3


@dataclass(frozen=True)
class Batch:
    """input_ids, attention_mask int64 [B, S]."""

    tokens: np.ndarray
    mask: np.ndarray

    def __str__(self) -> str:
        rows, length = self.tokens.shape
        padding = self.mask.size - int(self.mask.sum())
        side = (
            "" if not padding else f", {padding} of {self.mask.size} padding on the {'right' if self.mask[-1, 0] else 'left'}"
        )
        return f"{rows} x {length}{side}"


@dataclass(frozen=True)
class Parity:
    """differences  largest |difference| of each batch, at real positions
    scale        largest |value| of the model itself
    same         share of rows (positions of a language model) with the same largest logit; None for embeddings
    """

    batches: tuple[str, ...]
    differences: tuple[float, ...]
    scale: float
    same: float | None

    @property
    def difference(self) -> float:
        return float(np.max(self.differences))  # NaN stays

    @property
    def good(self) -> bool:
        """False for NaN too."""
        return self.difference <= LIMIT * max(1.0, self.scale)

    def lines(self) -> list[str]:
        width = max(map(len, self.batches))
        return [f"  {name:<{width}}  {value:.1e}" for name, value in zip(self.batches, self.differences, strict=True)]


def batches(vocab: int, max_len: int, seed: int = 0) -> list[Batch]:
    """One row and several, short and long; rows of unequal length padded on the right, and in the last batch on the left."""
    draw = np.random.default_rng(seed)
    longest = min(max_len, 256)
    made = []
    third, half = -(-longest // 3), -(-longest // 2)
    for rows, length, side in ((1, 1, ""), (1, longest, ""), (3, third, "right"), (4, longest, "right"), (2, half, "left")):
        tokens_BS = draw.integers(0, vocab, (rows, length))
        sizes_B = draw.integers(1, length + 1, rows) if side else np.full(rows, length)
        sizes_B[0] = length  # one row is full, else the padding would be larger than any row asks for
        real_BS = np.arange(length)[None] < sizes_B[:, None]
        made.append(Batch(tokens_BS, (real_BS[:, ::-1] if side == "left" else real_BS).astype(np.int64)))
    return made


@torch.no_grad()
def expected(model: Trunk, batch: Batch, output: str = "logits") -> list[np.ndarray]:
    """What the model itself gives each row alone, without padding: [S of the row, V], [C] or [D]."""
    found = []
    for tokens_S, mask_S in zip(batch.tokens, batch.mask, strict=True):
        tokens_1S = torch.from_numpy(tokens_S[mask_S > 0])[None]
        value = model(tokens_1S) if output == "logits" else _embedded(model, tokens_1S)
        found.append(value[0].numpy())
    return found


def _embedded(model: Trunk, tokens_1S: torch.Tensor) -> torch.Tensor:
    x_1SD = model.run_layers(model.embed(tokens_1S, None, None), (0, len(model.layers)), tokens_1S, None, None, None, None)
    mean_1D = (x_1SD if model.norm is None else model.norm(x_1SD)).mean(1)
    return mean_1D / mean_1D.norm(dim=-1, keepdim=True)


def compare(run: Run, given: Sequence[Batch], wanted: Sequence[list[np.ndarray]], output: str = "logits") -> Parity:
    """wanted: of `expected`, a list for each batch."""
    differences: list[float] = []
    scale, same, count = 0.0, 0, 0
    for batch, rows in zip(given, wanted, strict=True):
        found = run(batch.tokens, batch.mask)
        worst = 0.0
        for value, mask_S, row in zip(found, batch.mask, rows, strict=True):
            value = value[mask_S > 0] if row.ndim == 2 else value
            worst = float(np.maximum(worst, np.abs(value - row).max()))  # NaN stays
            scale = max(scale, float(np.abs(row).max()))
            same += int((value.argmax(-1) == row.argmax(-1)).sum())
            count += row.size // row.shape[-1]
        differences.append(worst)
    return Parity(tuple(map(str, given)), tuple(differences), scale, same / count if output == "logits" else None)


def latency_ms(run: Run, length: int, repeat: int) -> float:
    """Median milliseconds of one row of `length` tokens."""
    tokens_BS = np.ones((1, length), dtype=np.int64)
    times = []
    for number in range(WARM + repeat):
        began = time.perf_counter()
        run(tokens_BS, tokens_BS)
        if number >= WARM:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000
