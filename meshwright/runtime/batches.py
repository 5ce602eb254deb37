"""Batches of any make: their rows, cutting them into parts, moving them to a device.

A batch is tensors in tuples, lists, mappings and dataclasses. Its rows are dimension 0 of its tensors. A list or tuple without
a tensor inside (texts, numbers) has an entry a row where it has as many as there are rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.errors import DataError, Finding
from meshwright.parallel.lesson import tensors_in

__all__ = ["Split", "counted_split", "move", "rows_of", "split_rows"]

Split = Callable[[Any, int], list[Any]]
"""(batch, n) to n batches of its rows, in order; for batches that `split_rows` cannot cut."""


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with `change` of every leaf; a list or tuple without tensors is a leaf."""
    if isinstance(batch, Mapping):
        values = {key: _mapped(value, change) for key, value in batch.items()}
        return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]  # mappings are made from one
    if isinstance(batch, tuple | list) and next(tensors_in(batch), None) is not None:
        parts = [_mapped(value, change) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {part.name: _mapped(getattr(batch, part.name), change) for part in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return change(batch)


def rows_of(batch: Any) -> int | None:
    """Rows of a batch; None where its tensors do not agree on them, or where there are none."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def move(batch: Any, device: torch.device) -> Any:
    """Its tensors on `device`."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return batch if device.type == "cpu" else _mapped(batch, moved)


def split_rows(batch: Any, ways: int) -> list[Any]:
    """`ways` batches of its rows in order, as even as can be, the first ones larger; empty ones where rows are too few.

    Raises DataError for a batch whose tensors do not agree on the rows.
    """
    rows = rows_of(batch)
    if rows is None:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(batch)) or "no tensor"
        fix = "Give run.parallelize(..., split=function of (batch, n) that returns n batches)"
        raise DataError(findings=[Finding("batch", f"cannot be cut into rows: it holds {shapes}", fix)])
    return [_cut(batch, first, last, rows) for first, last in (share(rows, ways, place) for place in range(ways))]


def counted_split(split: Split) -> Split:
    """The same, which raises DataError where it returns more or fewer batches than it was asked for."""

    def cut(batch: Any, ways: int) -> list[Any]:
        parts = list(split(batch, ways))
        if len(parts) != ways:
            fix = "Return as many as were asked for, empty ones where rows are too few"
            raise DataError(findings=[Finding("split", f"returned {len(parts)} batches, and {ways} were asked for", fix)])
        return parts

    return cut


def share(rows: int, ways: int, place: int) -> tuple[int, int]:
    """Rows [first, last) of part `place` of `ways`."""
    base, more = divmod(rows, ways)
    first = place * base + min(place, more)
    return first, first + base + (place < more)


def _cut(batch: Any, first: int, last: int, rows: int) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[first:last] if leaf.dim() else leaf
        if isinstance(leaf, tuple | list) and len(leaf) == rows:
            return leaf[first:last]
        return leaf

    return _mapped(batch, cut)
