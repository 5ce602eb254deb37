"""The manifest: what it refuses, and that no single bit of it can change unnoticed."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import (
    Box,
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
    first_overlap,
    json_problems,
    read_manifest,
)
from meshwright.errors import CheckpointError


def example() -> Manifest:
    tensors = {
        "layers.0.权重": TensorEntry(
            "F32", (4, 3), (Slice(Box((0, 0), (1, 3)), "a", "w@0,0", 7), Slice(Box((1, 0), (3, 3)), "b", "w@1,0", 8))
        ),
        "empty": TensorEntry("BF16", (0, 5), ()),
        "scalar": TensorEntry("I64", (), (Slice(Box((), ()), "a", "scalar", 9),)),
    }
    files = {"a": FileEntry(300, "00" * 32), "b": FileEntry(400, "11" * 32)}
    meta = {"rng": [2**63, 2**4000], "lr": 0.1, "text": '"sha256": "', "none": None}
    return Manifest(12, 3, 2, 1.5e9, meta, tensors, files, "final")


def resealed(text: bytes) -> bytes:
    """The text with a digest that fits, as a careless or malicious writer would make it."""
    zeroed = text[:-68] + b"0" * 64 + text[-4:]
    return text[:-68] + hashlib.sha256(zeroed).hexdigest().encode() + text[-4:]


def edited(old: str, new: str) -> bytes:
    text = example().to_bytes()
    assert text.count(old.encode()) >= 1
    return resealed(text.replace(old.encode(), new.encode(), 1))


def test_round_trip_is_plain_json() -> None:
    text = example().to_bytes()
    assert Manifest.parse(text, "m") == example()
    data = json.loads(text)
    assert data["meta"]["rng"] == [2**63, 2**4000]
    assert list(data)[-1] == "sha256"


def test_every_flipped_bit_is_refused() -> None:
    # Mutation tried: the digest comparison left out of `parse`; flips inside numbers and names then went through.
    text = example().to_bytes()
    for bit in range(len(text) * 8):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="folder/m"):
            Manifest.parse(bytes(damaged), "folder/m")


@pytest.mark.parametrize("cut", [0, 1, 10, 68, 400])
def test_cut_text_is_refused(cut: int) -> None:
    text = example().to_bytes()
    for damaged in (text[:cut], text[: -cut or None] + (b" " if cut == 0 else b"")):
        with pytest.raises(CheckpointError, match="m: "):
            Manifest.parse(damaged, "m")


def test_foreign_and_newer_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint of this tool: format is 'other'"):
        Manifest.parse(edited('"format": "meshwright-checkpoint"', '"format": "other"'), "m")
    with pytest.raises(CheckpointError, match="format version 2; this release reads up to 1"):
        Manifest.parse(edited('"version": 1', '"version": 2'), "m")
    with pytest.raises(CheckpointError, match="format is None"):
        Manifest.parse(b"[]", "m")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"offset": [1, 0], "shape": [3, 3]', '"offset": [1, 0], "shape": [2, 3]', "has 9 of 12 elements"),
        ('"offset": [1, 0], "shape": [3, 3]', '"offset": [0, 0], "shape": [3, 3]', "elements twice"),
        ('"offset": [1, 0], "shape": [3, 3]', '"offset": [2, 0], "shape": [3, 3]', "outside its shape"),
        ('"file": "b"', '"file": "c"', "points at 'c', which is not listed"),
        ('"dtype": "BF16"', '"dtype": "F31"', "unknown dtype 'F31'"),
        ('"a": {"bytes"', '"../a": {"bytes"', "leaves the folder"),
        ('"step": 12', '"step": -12', "step is -12"),
        ('"step": 12', '"step": true', "step is True"),
        ('"files"', '"flies"', "missing or malformed field"),
        ('"offset": [1, 0]', '"offset": [1, 0.5]', "not a list of whole numbers"),
    ],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse(edited(old, new), "m")


def test_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read \(No such file"):
        read_manifest(tmp_path)


def test_values_that_json_would_change_are_named() -> None:
    assert json_problems({"a": [1, 2.5, None, True, "x", (3, [4])]}, "meta") == []
    value = {"a": {"b": [1, math.nan]}, 3: 1, "c": {1, 2}, "d": -math.inf, "e": b"x"}
    assert [p.where for p in json_problems(value, "meta")] == ["meta", "meta.a.b[1]", "meta.c", "meta.d", "meta.e"]


def test_overlap_of_blocks() -> None:
    rows = [Box((i, 0), (1, 8)) for i in range(50)]
    assert first_overlap(rows) is None
    assert first_overlap([*rows, Box((7, 7), (1, 1))]) is not None
    assert first_overlap([Box((), ()), Box((), ())]) is not None
    assert first_overlap([Box((0, 0), (4, 2)), Box((1, 2), (2, 2)), Box((3, 2), (1, 2))]) is None


def test_total_bytes_and_equality_ignore_the_digest() -> None:
    assert example().total_bytes == 700
    assert replace(example(), digest="x") == example()
