"""Checkpoints: sharded safetensors files beside a JSON manifest with digests, published by one atomic rename."""

from __future__ import annotations

from meshwright.checkpoint.manifest import Box, Manifest, read_manifest
from meshwright.checkpoint.pieces import Piece, flat_pieces
from meshwright.checkpoint.reader import ReadStats, inspect
from meshwright.checkpoint.reshard import Read, plan_reads
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.ticket import SaveTicket

__all__ = [
    "Box",
    "CheckpointStore",
    "Manifest",
    "Piece",
    "Read",
    "ReadStats",
    "SaveTicket",
    "flat_pieces",
    "inspect",
    "plan_reads",
    "read_manifest",
]
