"""Damaged checkpoints: named, skipped, never loaded, and refused before any tensor is touched."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import CheckpointStore, Piece, inspect
from meshwright.checkpoint.manifest import MANIFEST, Box, read_manifest
from meshwright.errors import CheckpointError
from tests.unit.checkpoint_cases import flip, piece_of, save_as, whole

FULL = torch.arange(1, 1 + 96 * 16, dtype=torch.float32).view(96, 16)
BIAS = torch.arange(1.0, 17)
WORLD = 3


def shard(rank: int) -> str:
    return f"shard-{rank:05d}-of-{WORLD:05d}.safetensors"


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    """Two checkpoints of three shards: steps 1 and 2. The bias lies in shard 2."""
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            held = [[piece_of("weight", FULL * step, Box((32 * r, 0), (32, 16)))] for r in range(WORLD)]
            held[2].append(whole("bias", BIAS * step))
            save_as(Path(folder) / f"step-0000000{step}", held, step=step)
        yield Path(folder)


def copied(pristine: Path, root: Path) -> Path:
    shutil.copytree(pristine, root, dirs_exist_ok=True)
    return root / "step-00000002"


def target() -> list[Piece]:
    return [whole("weight", torch.zeros_like(FULL)), whole("bias", torch.zeros_like(BIAS))]


def refusal(path: Path) -> str:
    """The text of the refusal to load, after checking that no tensor was touched."""
    wanted = target()
    with pytest.raises(CheckpointError) as error:
        CheckpointStore(path.parent, write=False).load(path, wanted)
    assert not any(piece.tensor.any() for piece in wanted), "half filled"
    return str(error.value)


def falls_back(path: Path) -> list[str]:
    """Reports of a search that must settle on step 1."""
    lines: list[str] = []
    store = CheckpointStore(path.parent, write=False, report=lines.append)
    wanted = target()
    found = store.newest()
    assert found == path.parent / "step-00000001"
    store.load(found, wanted)
    assert torch.equal(wanted[0].tensor, FULL) and torch.equal(wanted[1].tensor, BIAS)
    assert len(lines) == 1 and str(path) in lines[0]
    return lines


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-10])


def data_start(path: Path) -> int:
    return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])


CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a shard is missing": (shard(1), Path.unlink, "is missing (No such file or directory); it holds tensor weight"),
    "a shard is cut": (shard(2), cut, "bytes instead of"),
    "a shard is empty": (shard(0), lambda p: p.write_bytes(b""), "has 0 bytes instead of"),
    "the manifest is empty": (MANIFEST, lambda p: p.write_bytes(b""), "is not JSON"),
    "the manifest is cut": (MANIFEST, cut, "is not JSON"),
    "the manifest is missing": (MANIFEST, Path.unlink, "cannot be read (No such file or directory)"),
    "a byte of the header": (shard(1), lambda p: flip(p, 8 * 12), "is damaged"),
    "a bit of the header's length": (shard(1), lambda p: flip(p, 5), "is damaged"),
    "the first bit of the data": (
        shard(2),
        lambda p: flip(p, 8 * (8 + struct.unpack("<Q", p.read_bytes()[:8])[0])),
        "is damaged",
    ),
    "the last bit": (shard(0), lambda p: flip(p, 8 * p.stat().st_size - 1), "the damage is in tensor weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_and_the_one_before_is_taken(pristine: Path, tmp_path: Path, case: str) -> None:
    # Mutations tried: the digest comparison left out of `verify_file`; `load` verifying after it has filled.
    path = copied(pristine, tmp_path)
    name, damage, message = CASES[case]
    damage(path / name)
    start = time.perf_counter()
    text = refusal(path)
    assert time.perf_counter() - start < 2
    assert str(path / name) in text and message in text
    falls_back(path)


def test_all_damage_is_told_at_once(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    (path / shard(0)).unlink()
    cut(path / shard(1))
    flip(path / shard(2), 8 * (path / shard(2)).stat().st_size - 3)
    assert all(shard(rank) in refusal(path) for rank in range(WORLD))
    assert len(inspect(path, digests=True)["findings"]) == 3
    assert len(inspect(path)["findings"]) == 2, "a flipped bit shows only in the digest"


def test_the_damaged_tensor_is_told_from_its_neighbour(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    file = path / shard(2)
    header = json.loads(file.read_bytes()[8 : data_start(file)])
    for key, name in (("bias", "bias"), ("weight@64,0", "weight")):
        at = data_start(file) + header[key]["data_offsets"][0]
        flip(file, 8 * at + 3)
        assert f"the damage is in tensor {name}" in refusal(path) and refusal(path).endswith(name)
        flip(file, 8 * at + 3)


def test_a_manifest_that_names_a_tensor_that_is_in_no_shard(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    manifest = read_manifest(path)
    (path / MANIFEST).write_bytes(manifest.to_bytes().replace(b'"key": "bias"', b'"key": "gone"'))
    assert "does not match its own digest" in refusal(path)
    # the same, sealed with a digest that fits
    entry = manifest.tensors["bias"]
    wrong = type(entry)(entry.dtype, entry.shape, tuple(type(s)(s.box, s.file, "gone", s.crc32) for s in entry.slices))
    sealed = type(manifest)(**{**manifest.__dict__, "tensors": {**manifest.tensors, "bias": wrong}})
    (path / MANIFEST).write_bytes(sealed.to_bytes())
    assert "has no entry 'gone' for tensor 'bias'" in refusal(path)
    falls_back(path)


def test_a_shard_of_another_checkpoint_is_damage(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    shutil.copy(tmp_path / "step-00000001" / shard(1), path / shard(1))
    assert "the damage is in tensor weight" in refusal(path)
    falls_back(path)


def test_a_folder_under_another_step_is_not_taken(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    path.rename(tmp_path / "step-00000007")
    assert "manifest.json: is of step 2" in falls_back(tmp_path / "step-00000007")[0]


def test_only_files_that_are_needed_are_verified(pristine: Path, tmp_path: Path) -> None:
    path = copied(pristine, tmp_path)
    flip(path / shard(0), 8 * (path / shard(0)).stat().st_size - 1)
    wanted = [whole("bias", torch.zeros_like(BIAS))]
    CheckpointStore(tmp_path, write=False).load(path, wanted, ignore=["*"])
    assert torch.equal(wanted[0].tensor, BIAS * 2)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([shard(0), shard(1), shard(2), MANIFEST]), st.floats(0, 1, exclude_max=True))
def test_any_flipped_bit_is_found(pristine: Path, name: str, where: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = copied(pristine, Path(folder))
        flip(path / name, int(8 * (path / name).stat().st_size * where))
        assert str(path / name) in refusal(path)
        falls_back(path)
