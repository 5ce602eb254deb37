"""One micro-batch, the only thing that passes from the data side to the model side.

Shapes: B rows, S tokens a row, K targets a row where only some positions are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from meshwright.spec.labels import IGNORE

__all__ = ["IGNORE", "Batch"]


@dataclass(frozen=True)
class Batch:
    """tokens   int64 [B, S]
    labels      int64 [B, S], or [B, K] beside `select`, or [B] for classification; IGNORE where nothing is predicted
    documents   int32 [B, S] index of the document within its row, from 0, never falling; -1 on padding.
                None: every row is one whole document (plain attention, no padding).
    positions   int64 [B, S] offset inside the document; None: 0..S-1
    cu_seqlens  int32 [N+1] document boundaries over the B*S flattened tokens (padding runs count as documents), padded
                with B*S to a power of two so that shapes repeat; present exactly when `documents` is
    samples     int64 [B] global sample number of each row (the consumed-sample counter); -1 on padded rows.
                Dropout and masking are drawn from it, so that they do not depend on the layout.
    select      int64 [B, K] positions whose hidden state reaches the head, or None for all
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    select: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin(self) -> Batch:
        return self._map(lambda t: t.pin_memory())

    def _map(self, fn) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: fn(value) for name, value in values.items() if value is not None})

    def targets(self) -> int:
        """Number of positions that count in the loss. Call it on the CPU side: on a device it waits."""
        return int((self.labels != IGNORE).sum())
