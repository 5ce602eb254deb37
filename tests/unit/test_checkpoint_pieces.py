"""Who writes what: every element once, even bytes, nothing lost; flat runs as blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import Piece, flat_pieces
from meshwright.checkpoint.manifest import Box
from meshwright.checkpoint.pieces import Geometry, SharePlan, geometry, share


def coverage(plan: SharePlan, name: str) -> np.ndarray:
    count = np.zeros(plan.tensors[name][1], dtype=int)
    for parts in plan.ranks:
        for part in parts:
            if part.name == name:
                count[part.box.inside(Box.whole(count.shape))] += 1
    return count


def whole(name: str, shape: tuple[int, ...], dtype: str = "F32", owner: bool = True) -> Geometry:
    return Geometry(name, dtype, shape, Box.whole(shape), owner)


def rows(first: int, count: int) -> Geometry:
    """Rows of a tensor of shape [6, 2]."""
    return Geometry("w", "F32", (6, 2), Box((first, 0), (count, 2)), True)


def replicas(sizes: dict[str, tuple[int, ...]], world: int) -> list[list[Geometry]]:
    return [[whole(n, s) for n, s in sizes.items()] for _ in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_replicas_share_the_bytes(world: int) -> None:
    # Mutation tried: `_fill` returning the whole amount for the first rank; rank 0 then wrote everything.
    sizes = {"embedding": (1000, 64), "norm": (64,), "scale": (), "up": (256, 64), "down": (64, 256), "none": (0, 3)}
    plan, findings = share(replicas(sizes, world))
    assert not findings
    assert set(plan.tensors) == set(sizes)
    for name in sizes:
        assert (coverage(plan, name) == 1).all()
    each = [plan.bytes(rank) for rank in range(world)]
    assert sum(each) == 4 * sum(math.prod(shape) for shape in sizes.values())
    assert max(each) <= 1.1 * min(each)


def test_what_one_rank_alone_holds_counts_against_its_share_of_the_rest() -> None:
    held = replicas({"shared": (900, 10)}, 3)
    held[1].append(Geometry("own", "F32", (300, 10), Box.whole((300, 10)), True))
    plan, findings = share(held)
    assert not findings
    assert [plan.bytes(rank) for rank in range(3)] == [16000, 16000, 16000]
    held[1][-1] = Geometry("own", "F32", (2000, 10), Box.whole((2000, 10)), True)
    assert [share(held)[0].bytes(rank) for rank in range(3)] == [18000, 80000, 18000]


def test_tensor_parallel_with_replicas() -> None:
    halves = [Geometry("w", "BF16", (100, 8), Box((50 * half, 0), (50, 8)), True) for half in range(2)]
    held = [[halves[rank % 2], whole("n", (32,), "F64")] for rank in range(4)]
    plan, findings = share(held)
    assert not findings
    assert (coverage(plan, "w") == 1).all() and (coverage(plan, "n") == 1).all()
    assert max(plan.bytes(r) for r in range(4)) <= 1.1 * min(plan.bytes(r) for r in range(4))


def test_a_copy_that_is_no_owner_is_never_written() -> None:
    held = [[whole("w", (6, 2), owner=rank == 2)] for rank in range(4)]
    plan, findings = share(held)
    assert not findings
    assert [plan.bytes(rank) for rank in range(4)] == [0, 0, 48, 0]
    _, findings = share([[whole("w", (6, 2), owner=False)]])
    assert "12 of 12 elements are held by no rank that may write them" in str(findings[0])


def test_holes_and_disagreement_are_findings() -> None:
    _, findings = share([[rows(0, 3)], [rows(4, 2)]])
    text = "w: 2 of 12 elements are held by no rank that may write them. Every element needs an owner"
    assert [str(finding) for finding in findings] == [text]
    _, findings = share([[whole("w", (6,))], [whole("w", (6,), "F64")]])
    assert "rank 1 has F64 [6], another rank F32 [6]" in str(findings[0])


def test_pieces_that_cannot_be_stored_are_findings() -> None:
    bad = [
        Piece("", torch.zeros(2), (2,), (0,)),
        Piece("a@b", torch.zeros(2), (2,), (0,)),
        Piece("complex", torch.zeros(2, dtype=torch.complex128), (2,), (0,)),
        Piece("outside", torch.zeros(2), (3,), (2,)),
        Piece("dims", torch.zeros(2), (2, 1), (0,)),
    ]
    good, findings = geometry([*bad, Piece("fine", torch.zeros(2), (3,), (1,))])
    assert [g.name for g in good] == ["fine"]
    assert [f.where for f in findings] == ["tensor ''", "tensor 'a@b'", "complex", "outside", "dims"]


@st.composite
def block(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(start), tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 5))
def test_any_overlapping_blocks_are_written_once(data: st.DataObject, dims: int, world: int) -> None:
    # Mutation tried: the grid of `_cells` replaced by the blocks themselves, which cover some elements more than once.
    shape = tuple(data.draw(st.integers(1, 6)) for _ in range(dims))
    held: list[list[Geometry]] = [[] for _ in range(world)]
    for pieces in held:
        pieces += [Geometry("w", "F32", shape, data.draw(block(shape)), True) for _ in range(data.draw(st.integers(0, 3)))]
    held[data.draw(st.integers(0, world - 1))].append(whole("w", shape))
    plan, findings = share(held)
    assert not findings
    assert (coverage(plan, "w") == 1).all()
    for rank, parts in enumerate(plan.ranks):
        for part in parts:
            assert any(piece.box.meet(part.box) == part.box for piece in held[rank]), "a rank writes only what one piece holds"


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), max_size=4))
def test_flat_runs(data: st.DataObject, shape: list[int]) -> None:
    full = torch.arange(math.prod(shape))
    start = data.draw(st.integers(0, len(full)))
    stop = data.draw(st.integers(start, len(full)))
    flat = full[start:stop].clone()
    pieces = flat_pieces("w", flat, shape, start)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    seen = torch.cat([full.view(shape)[p.box.inside(Box.whole(shape))].reshape(-1) for p in pieces] or [full[:0]])
    assert torch.equal(seen, flat)
    for piece in pieces:
        assert torch.equal(piece.tensor, full.view(shape)[piece.box.inside(Box.whole(shape))])
        piece.tensor.zero_()
    assert not flat.any(), "the pieces are views, so that a load fills the flat buffer"


def test_flat_runs_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="5 elements from 8 do not lie in"):
        flat_pieces("w", torch.zeros(5), (3, 4), 8)
