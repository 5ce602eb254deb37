"""Everything that a resume needs besides tensors, in one dataclass of plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """Counters and small values of a run; tensors live in the engine.

    step counts iterations and fixes the place in the data; updates counts optimizer updates and fixes the learning rate:
    a skipped step (overflow, no target) moves the first and not the second.
    """

    step: int = 0
    updates: int = 0
    consumed: int = 0
    """Samples taken, rows that were dropped at the end of an epoch included: the position in the data."""
    tokens: int = 0
    """Target and context positions seen, padding excluded."""
    seconds: float = 0.0
    """Wall time of training, all earlier parts of the run included."""
    skipped: int = 0
    dropped: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    """Loss scaler and update counters of the engine."""
    noise: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainState:
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})
