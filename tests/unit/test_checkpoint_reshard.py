"""Saved in one splitting, loaded in another: every bit the same, and only the needed bytes read."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import CheckpointStore, Piece, flat_pieces, plan_reads
from meshwright.checkpoint import reader as reader_module
from meshwright.checkpoint.manifest import Box
from tests.unit.checkpoint_cases import bits, piece_of, save_as, whole

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


@st.composite
def splitting(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random grid over a tensor: cuts in the first two dimensions."""
    edges = []
    for d, n in enumerate(shape):
        cuts = draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 and d < 2 else set()
        edges.append([0, *sorted(cuts), n])
    spans = [[(a, b - a) for a, b in itertools.pairwise(e)] for e in edges]
    return [Box(tuple(a for a, _ in c), tuple(n for _, n in c)) for c in itertools.product(*spans)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 2**31))
def test_any_splitting_to_any_other_is_bitwise(data: st.DataObject, world: int, seed: int) -> None:
    state = {}
    for i in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
        state[f"t{i}"] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), seed + i)
    held: list[list[Piece]] = [[] for _ in range(world)]
    for name, full in state.items():
        for box in data.draw(splitting(tuple(full.shape))):
            for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
                held[rank].append(piece_of(name, full, box))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-00000001"
        save_as(path, held)
        wanted = []
        for name, full in state.items():
            for box in data.draw(splitting(tuple(full.shape))):
                wanted.append(piece_of(name, torch.zeros_like(full), box))
        store = CheckpointStore(Path(folder), write=False)
        store.load(path, wanted)
    for piece in wanted:
        assert bits(piece.tensor) == bits(state[piece.name][piece.box.inside(Box.whole(piece.shape))])
    assert store.last_load.bytes_read == sum(len(bits(full)) for full in state.values())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_flat_shards_of_one_world_load_on_another(before: int, after: int, rows: int, columns: int) -> None:
    # Mutation tried: `plan_reads` taking the source index from the start of the tensor, not of the stored slice.
    full = torch.randn(rows, columns, 2)

    def shards(source: torch.Tensor, world: int) -> list[list[Piece]]:
        edges = [source.numel() * r // world for r in range(world + 1)]
        return [flat_pieces("m", source.reshape(-1)[a:b].clone(), source.shape, a) for a, b in itertools.pairwise(edges)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-00000001"
        save_as(path, shards(full, before))
        store = CheckpointStore(Path(folder), write=False)
        for rank, wanted in enumerate(shards(torch.zeros_like(full), after)):
            store.load(path, wanted, ignore=["m"])
            expected = full.reshape(-1)[full.numel() * rank // after : full.numel() * (rank + 1) // after]
            assert torch.equal(torch.cat([p.tensor.reshape(-1) for p in wanted] or [full[:0].reshape(-1)]), expected)


def test_only_the_needed_bytes_are_read_and_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.randn(1000, 64)
    quarters = [[piece_of("w", full, Box((250 * r, 0), (250, 64)))] for r in range(4)]
    save_as(tmp_path / "step-00000001", quarters)
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 4096)
    store = CheckpointStore(tmp_path, write=False)
    rows = piece_of("w", torch.zeros_like(full), Box((240, 0), (20, 64)))
    store.load(tmp_path / "step-00000001", [rows])
    assert torch.equal(rows.tensor, full[240:260])
    assert store.last_load.bytes_read == 20 * 64 * 4
    assert store.last_load.files_opened == 2
    files = [tmp_path / "step-00000001" / f"shard-0000{r}-of-00004.safetensors" for r in (0, 1)]
    assert store.last_load.bytes_hashed == sum(file.stat().st_size for file in files)
    columns = piece_of("w", torch.zeros_like(full), Box((0, 3), (1000, 5)))
    store.load(tmp_path / "step-00000001", [columns])
    assert torch.equal(columns.tensor, full[:, 3:8])
    assert store.last_load.bytes_read == 1000 * 5 * 4
    assert store.last_load.largest <= 4096


def test_plan_reads_by_hand(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(6, 4)
    held = [[piece_of("w", full, Box((0, 0), (2, 4)))], [piece_of("w", full, Box((2, 0), (4, 4)))]]
    manifest = save_as(tmp_path / "c", held)
    first, second = plan_reads(manifest, "w", (1, 1), (3, 2))
    assert (first.file, first.key, first.source, first.target) == (
        "shard-00000-of-00002.safetensors",
        "w@0,0",
        (slice(1, 2), slice(1, 3)),
        (slice(0, 1), slice(0, 2)),
    )
    assert (second.file, second.key, second.source, second.target) == (
        "shard-00001-of-00002.safetensors",
        "w@2,0",
        (slice(0, 2), slice(1, 3)),
        (slice(1, 3), slice(0, 2)),
    )
    with pytest.raises(ValueError, match="outside the shape"):
        plan_reads(manifest, "w", (5, 0), (2, 4))
    with pytest.raises(KeyError):
        plan_reads(manifest, "v", (0,), (1,))


def test_loading_into_views_and_other_strides(tmp_path: Path) -> None:
    full = torch.randn(8, 6)
    save_as(tmp_path / "step-00000001", [[whole("w", full)]])
    base = torch.zeros(6, 8, requires_grad=True)
    CheckpointStore(tmp_path, write=False).load(tmp_path / "step-00000001", [Piece("w", base.t(), (8, 6), (0, 0))])
    assert torch.equal(base.detach(), full.t())
