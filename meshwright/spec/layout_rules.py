"""Layouts that are refused, and why: read before any device is taken, and again by `parallelize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import Finding
from meshwright.spec.layout import Layout

__all__ = ["REFUSALS", "Refusal", "refused"]


@dataclass(frozen=True)
class Refusal:
    """key: the number of the layout that is at fault. why and fix: for the user; docs/parallelism.md repeats each `why`."""

    key: str
    when: Callable[[Layout], bool]
    why: str
    fix: str


REFUSALS = (
    Refusal("pp", lambda layout: layout.pp > 1, "pipeline parallelism is not available", "Use pp: 1"),
    Refusal("cp", lambda layout: layout.cp > 1, "context parallelism is not available", "Use cp: 1"),
    Refusal("tp", lambda layout: layout.tp > 1, "tensor parallelism is not available", "Use tp: 1"),
    Refusal("ep", lambda layout: layout.ep > 1, "expert parallelism is not available", "Use ep: 1"),
    Refusal(
        "zero",
        lambda layout: layout.zero > 0 and layout.dp_shard == 1,
        "there is nothing to shard over with dp_shard: 1",
        "Use zero: 0, or dp_shard for the devices",
    ),
    Refusal(
        "dp_shard",
        lambda layout: layout.dp_shard > 1 and layout.zero == 0,
        "nothing is sharded with zero: 0",
        "Use zero: 1, 2 or 3, or dp_replicate for the devices",
    ),
)


def refused(layout: Layout) -> list[Finding]:
    """Everything for which this layout cannot run; empty if it can."""
    sizes = layout.to_dict()
    return [
        Finding(f"layout.{refusal.key}", f"{sizes[refusal.key]}, but {refusal.why}", refusal.fix)
        for refusal in REFUSALS
        if refusal.when(layout)
    ]
