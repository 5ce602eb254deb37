"""How much an engine computes at a time where nobody says."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.kernels.paged_attention import SPAN

__all__ = ["StepSizes", "step_sizes"]


class StepSizes(NamedTuple):
    """running: sequences at a time. tokens: of a step. key_span: of `kernels.paged_attention.Pages`."""

    running: int
    tokens: int
    key_span: int


def step_sizes(kind: str, offline: bool) -> StepSizes:
    """Where none are given.

    A CPU is busy with a few hundred tokens. An accelerator wants thousands; as many as 2,048 of them take 8 billion parameters
    some 60 ms, which is the longest that an answer under way waits for its next token. Where nobody waits, larger steps need
    fewer readings of the weights, and there are sequences enough for every program to have many keys.
    """
    if kind == "cpu":
        return StepSizes(64, 512, SPAN)
    return StepSizes(512, 16384, 4 * SPAN) if offline else StepSizes(256, 2048, SPAN)
