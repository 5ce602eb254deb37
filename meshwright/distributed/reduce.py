"""Small agreements between ranks over an explicit group: numbers, JSON values, barriers. Nothing is pickled.

Every function is collective: all ranks of the group call it, in the same order. Tensors live on the CPU, so use a gloo group
(`Ranks.control`); with another backend give the device. Numbers are summed by `math.fsum` over the ranks' values, which
rounds once: the result is the same on every rank and does not depend on the order of ranks or the algorithm of the backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compat import all_gather_single
from meshwright.errors import MeshwrightError, RankFailure

__all__ = [
    "agree",
    "barrier",
    "broadcast_bytes",
    "broadcast_json",
    "gather_json",
    "gather_scalars",
    "max_scalars",
    "sum_scalars",
]

_CPU = torch.device("cpu")


def gather_scalars(values: Sequence[float], group: dist.ProcessGroup, device: torch.device = _CPU) -> list[list[float]]:
    """Every rank's `values` (fp64, the same number on each rank), in rank order."""
    mine = torch.tensor(list(values), dtype=torch.float64, device=device)
    everyone = torch.empty(group.size() * len(values), dtype=torch.float64, device=device)
    all_gather_single(everyone, mine, group=group)
    return everyone.view(group.size(), len(values)).tolist()


def sum_scalars(values: Sequence[float], group: dist.ProcessGroup, device: torch.device = _CPU) -> list[float]:
    """Sum over the ranks of each value; whole numbers are exact below 2**53."""
    return [_sum(column) for column in zip(*gather_scalars(values, group, device), strict=True)]


def max_scalars(values: Sequence[float], group: dist.ProcessGroup, device: torch.device = _CPU) -> list[float]:
    """Largest over the ranks of each value; nan if any rank's is nan."""
    columns = zip(*gather_scalars(values, group, device), strict=True)
    return [math.nan if any(map(math.isnan, column)) else max(column) for column in columns]


def _sum(column: Sequence[float]) -> float:
    # fsum raises where inf and -inf meet and on overflow; the plain sum gives the nan or inf that the caller looks for
    return math.fsum(column) if all(map(math.isfinite, column)) else sum(column)


def gather_json(value: Any, group: dist.ProcessGroup, device: torch.device = _CPU) -> list[Any]:
    """Every rank's `value`, in rank order. TypeError if a value is no JSON."""
    data = json.dumps(value).encode()
    sizes = [int(size) for (size,) in gather_scalars([len(data)], group, device)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(group.size() * max(sizes), dtype=torch.uint8, device=device)
    all_gather_single(everyone, padded.to(device), group=group)
    rows = everyone.cpu().view(group.size(), -1)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_bytes(data: bytes, group: dist.ProcessGroup, source: int = 0, device: torch.device = _CPU) -> bytes:
    """The bytes of the group's rank `source`, on every rank. What the other ranks pass is not looked at."""
    mine = group.rank() == source
    size = torch.tensor([len(data) if mine else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not int(size):
        return b""
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device) if mine else None
    if buffer is None:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    return buffer.cpu().numpy().tobytes()


def broadcast_json(value: Any, group: dist.ProcessGroup, source: int = 0, device: torch.device = _CPU) -> Any:
    """`value` of the group's rank `source`, on every rank. What the other ranks pass is not looked at."""
    data = json.dumps(value).encode() if group.rank() == source else b""
    return json.loads(broadcast_bytes(data, group, source, device))


def barrier(group: dist.ProcessGroup, timeout: float, what: str) -> None:
    """Wait until every rank of a gloo group is here. RankFailure names the missing ranks, `what` and the seconds waited."""
    try:
        dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        detail = (str(error).splitlines() or [""])[0]
        raise RankFailure(f"rank {dist.get_rank()} waited {timeout:g} s at {what}: {detail}") from error


def agree(value: Any, group: dist.ProcessGroup, what: str) -> None:
    """Check that every rank holds the same JSON value. The error names the ranks that differ from most, and both values."""
    texts = [json.dumps(each, sort_keys=True) for each in gather_json(value, group)]
    common = max(dict.fromkeys(texts), key=texts.count)
    different = [rank for rank, text in enumerate(texts) if text != common]
    if different:
        shown = "; ".join(f"rank {rank} has {_short(texts[rank])}" for rank in different[:8])
        raise MeshwrightError(f"the ranks do not agree on {what}: {shown}; the others have {_short(common)}")


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
