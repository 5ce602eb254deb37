"""The gradient noise scale: how large a batch is worth having.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1. With G the true gradient
and S = tr(covariance of one row's gradient), a mean gradient over B rows has E|G_B|^2 = |G|^2 + S / B. Two batch sizes give
two equations, hence unbiased estimates

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    S     = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

Each is noisy, and their ratio is biased, so both are averaged over steps first; the simple noise scale is the ratio of the
averages, B_simple = S / |G|^2, in rows. Far below it, doubling the batch nearly halves the steps; far above it, extra rows buy
next to nothing.
"""

from __future__ import annotations

import math

__all__ = ["NoiseScale", "batch_warning"]


class NoiseScale:
    """Running estimate. `decay`: weight of the past in the exponential averages."""

    def __init__(self, decay: float = 0.99):
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self._decay = decay
        self._squared_norm = 0.0
        self._trace = 0.0
        self.updates = 0

    def update(self, small_sq: float, big_sq: float, b_small: float, b_big: float) -> None:
        """One step's observation.

        small_sq: squared norm of the mean gradient over `b_small` rows (better: the mean of that over several such parts of
        the same step, ranks or micro-batches). big_sq: squared norm of the mean gradient over the whole step of `b_big` rows.
        Steps whose norms are not finite are left out. Raises ValueError unless 0 < b_small < b_big.
        """
        if not 0 < b_small < b_big:
            raise ValueError(f"the noise scale needs two batch sizes with 0 < small < big, not {b_small} and {b_big}")
        if not (math.isfinite(small_sq) and math.isfinite(big_sq)):
            return
        squared_norm = (b_big * big_sq - b_small * small_sq) / (b_big - b_small)
        trace = (small_sq - big_sq) / (1.0 / b_small - 1.0 / b_big)
        self._squared_norm = self._decay * self._squared_norm + (1.0 - self._decay) * squared_norm
        self._trace = self._decay * self._trace + (1.0 - self._decay) * trace
        self.updates += 1

    @property
    def squared_norm(self) -> float | None:
        """Average estimate of |G|^2 (bias of the start removed), None before the first update."""
        return self._squared_norm / (1.0 - self._decay**self.updates) if self.updates else None

    @property
    def trace(self) -> float | None:
        """Average estimate of S = tr(covariance of one row's gradient), None before the first update."""
        return self._trace / (1.0 - self._decay**self.updates) if self.updates else None

    @property
    def value(self) -> float | None:
        """B_simple in rows; None while the averages do not (yet) make sense, i.e. one of them is not positive."""
        if self.updates == 0 or self._squared_norm <= 0.0 or self._trace < 0.0:
            return None
        return self._trace / self._squared_norm

    def state_dict(self) -> dict[str, float]:
        return {"squared_norm": self._squared_norm, "trace": self._trace, "updates": self.updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._squared_norm = float(state["squared_norm"])
        self._trace = float(state["trace"])
        self.updates = int(state["updates"])


def batch_warning(batch: int, noise: NoiseScale, *, factor: float = 4.0, after: int = 100) -> str | None:
    """A sentence to warn with when the global batch (rows) is more than `factor` times the noise scale, else None.

    Silent before `after` updates: the averages need that many to mean something.
    """
    scale = noise.value
    if noise.updates < after or scale is None or batch <= factor * scale:
        return None
    return (
        f"the global batch of {batch} rows is more than {factor:g} times the measured gradient noise scale of "
        f"{scale:.3g} rows: more rows a step hardly improve the gradient here. "
        "A smaller train.batch would learn as much in fewer tokens"
    )
