"""JSON between ranks, as bytes in tensors: nothing is pickled. A group of None is a world of one."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["broadcast_bytes", "broadcast_json", "gather_json"]


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of every rank, on every rank, in rank order. Collective."""
    text = json.dumps(value).encode()
    if group is None:
        return [json.loads(text)]
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    lengths = [int(size) for size in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(texts, mine, group=group)
    return [json.loads(bytes(data[:length].numpy())) for data, length in zip(texts, lengths, strict=True)]


def broadcast_bytes(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The bytes of rank 0, on every rank; what other ranks pass is ignored. Collective."""
    if group is None:
        return data
    first = dist.get_rank(group) == 0
    size = torch.tensor([len(data) if first else 0])
    dist.broadcast(size, group=group, group_src=0)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if first and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if int(size):
        dist.broadcast(buffer, group=group, group_src=0)
    return bytes(buffer.numpy())


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value of rank 0, on every rank. Collective."""
    return json.loads(broadcast_bytes(json.dumps(value).encode(), group))
