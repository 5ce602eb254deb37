"""What goes over the slow axis, `dp_replicate`: which layouts a method needs, and how many bytes it sends."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.config.schema import SyncConfig
from meshwright.errors import Finding
from meshwright.spec.layout import Layout

__all__ = ["low_rank", "replica_bytes", "sync_findings"]


def sync_findings(sync: SyncConfig, layout: Layout) -> list[Finding]:
    """Why a method cannot run in a layout; empty if it can."""
    if sync.plain:
        return []
    key, value = ("method", sync.method) if sync.local else ("compress", sync.compress)
    if layout.ep > 1:
        what = f"{value}, but with ep: {layout.ep} the ranks that hold an expert may lie in several replicas"
        return [Finding(f"train.sync.{key}", what, "Use ep: 1")]
    if layout.dp_replicate > 1:
        if layout.cp == 1 or layout.zero:
            return []
        what = f"{value}, but with zero: 0 one reduction spans the replicas and the {layout.cp} ranks of cp"
        return [Finding(f"train.sync.{key}", what, "Use zero: 1, 2 or 3, which reduces over cp inside a replica")]
    what = f"{value}, but with dp_replicate: 1 there is one replica, and nothing to exchange"
    fix = 'Drop train.sync, or give a layout with dp_replicate, as --plan \'{"layout": {"dp_replicate": 2}}\''
    return [Finding(f"train.sync.{key}", what, fix)]


def low_rank(rows: int, columns: int, rank: int) -> bool:
    """Whether two matrices of this rank, rows x rank and columns x rank, are smaller than the one they stand for."""
    return rank * (rows + columns) < rows * columns


def replica_bytes(
    sync: SyncConfig, replicas: int, elements: int, item: int, *, whole: int = 0, matrices: Iterable[tuple[int, int]] = ()
) -> float:
    """Bytes that a rank sends to other replicas in a step, on average over a round, by ring algorithms; scalars left out.

    elements: of `item` bytes that this rank exchanges (P / N of them under ZeRO, with N = dp_shard; P without). whole: those
    that bf16 leaves as they are. matrices: rows and columns of what PowerSGD sends as low rank. With R replicas:

        every_step          2 (R-1)/R item elements
        bf16                2 (R-1)/R (2 (elements - whole) + item whole)
        powersgd, rank r    2 (R-1)/R item (elements - sum n m + sum r (n + m))
        local_sgd, diloco   one of these, for what moved in a round, divided by `every`
    """
    if sync.compress == "bf16":
        sent = 2.0 * (elements - whole) + item * whole
    else:
        low = sync.compress == "powersgd"
        sent = item * (elements + low * sum(sync.rank * (n + m) - n * m for n, m in matrices))
    share = 2 * (replicas - 1) / replicas
    return share * sent / (sync.every if sync.local else 1)
