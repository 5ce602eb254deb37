"""What an engine is asked, and what it answers. No torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from meshwright.serve.sampling import SamplingParams

__all__ = ["Finish", "Logprob", "Output", "Request"]

Finish = Literal["stop", "length", "abort", "error"]
"""stop: an end token or stop string came. length: max_tokens, or the model's longest sequence. abort: somebody asked for it.
error: the model gave logits that are no numbers."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    id        unique among those that are under way
    tokens    of the prompt, at least one
    priority  smaller ones go first; those of the same priority in the order of `arrival`
    arrival   seconds of a monotonic clock
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of the probability that the model itself gives a token (temperature 1, no penalty, no bias), and
    the most likely tokens with theirs, the first first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step adds to an answer.

    tokens    new ones, an end token included
    text      new text. Text that could be the beginning of a stop string, or of a character, comes later
    finish    why it ended; None: it goes on
    logprobs  one a new token, where asked for
    """

    id: str
    tokens: list[int]
    text: str
    finish: Finish | None = None
    logprobs: list[Logprob] | None = None
