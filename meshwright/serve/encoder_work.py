"""What an encoder's engine is asked, and what it answers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["EncoderOutput", "EncoderWork"]


@dataclass(frozen=True)
class EncoderWork:
    """A row to run. kind: "embed", "classify" or "fill-mask". top: candidates a mask. tokens: with [cls] and [sep]."""

    id: str
    tokens: tuple[int, ...]
    kind: str
    top: int = 5


@dataclass(frozen=True)
class EncoderOutput:
    """value: of embed the unit vector; of classify the probability of each class; of fill-mask for each mask a list of
    (token, probability), the likeliest first."""

    id: str
    value: Any
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = "stop"
    logprobs: None = None
