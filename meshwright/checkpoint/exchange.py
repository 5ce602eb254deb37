"""What the ranks of a store tell each other; a group of None is a world of one."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from meshwright.distributed import reduce

__all__ = ["broadcast_bytes", "broadcast_json", "gather_json"]


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of every rank, on every rank, in rank order. Collective."""
    return [json.loads(json.dumps(value))] if group is None else reduce.gather_json(value, group)


def broadcast_bytes(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The bytes of rank 0, on every rank; what other ranks pass is ignored. Collective."""
    return data if group is None else reduce.broadcast_bytes(data, group)


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value of rank 0, on every rank. Collective."""
    return json.loads(json.dumps(value)) if group is None else reduce.broadcast_json(value, group)
