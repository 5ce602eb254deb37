"""The manifest of a checkpoint: what it holds, where every slice lies, and the digests that prove it is whole.

`manifest.json` is the last file written into a checkpoint folder. It is one JSON object:

    format, version   what wrote it; a foreign format or a newer version is refused
    step, serial      training step; serial counts the checkpoints of a run folder in the order they were written
    tag, world        label given by the caller or null; ranks that wrote
    created           seconds since 1970
    meta              whatever the trainer stored (config, plan, layout, RNG, schedule, data position, versions)
    tensors           logical name -> dtype (safetensors' name), global shape, slices: offset, shape, file, key, crc32
    files             file name -> bytes, sha256
    sha256            digest of this very text with the 64 digits of this field set to zeros; always the last field

Torch-free, so that tools can read it in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.errors import CheckpointError, Finding
from meshwright.spec.box import Box

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "Box",
    "FileEntry",
    "Manifest",
    "Slice",
    "TensorEntry",
    "json_problems",
    "read_manifest",
]

FORMAT = "meshwright-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes of one element of every dtype a checkpoint may hold, under safetensors' names."""

_TAIL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n\Z')
_ZEROS = b"0" * 64


@dataclass(frozen=True)
class Slice:
    """One block of a logical tensor and the safetensors entry that holds it."""

    box: Box
    file: str
    key: str
    crc32: int


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    serial: int
    world: int
    created: float
    meta: dict[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    tag: str | None = None
    digest: str = field(default="", compare=False)

    @property
    def total_bytes(self) -> int:
        """Of all shard files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """The text of `manifest.json`, its own digest in the last field. `meta` must be JSON already."""
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "slices": [
                    {"offset": s.box.offset, "shape": s.box.shape, "file": s.file, "key": s.key, "crc32": s.crc32}
                    for s in entry.slices
                ],
            }
            for name, entry in sorted(self.tensors.items())
        }
        data = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "tag": self.tag,
            "world": self.world,
            "created": self.created,
            "meta": self.meta,
            "tensors": tensors,
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in data.items()]
        text = ("{\n" + ",\n".join(lines) + ',\n"sha256": "').encode() + _ZEROS + b'"\n}\n'
        return text[:-68] + hashlib.sha256(text).hexdigest().encode() + text[-4:]

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """Read a manifest. `where` names it in errors.

        Raises CheckpointError for text that is no JSON, a foreign format, a newer version, a digest that does not match,
        or slices that do not cover their tensor exactly once.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise _bad(where, f"is not JSON ({error})") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise _bad(where, f"is not a checkpoint of this tool: format is {found!r}, not {FORMAT!r}")
        if not _natural(data.get("version")) or data["version"] > VERSION:
            fix = "Use the newer release that wrote it"
            raise _bad(where, f"has format version {data.get('version')!r}; this release reads up to {VERSION}", fix)
        tail = _TAIL.search(text)
        digest = tail.group(1).decode() if tail else ""
        if not tail or hashlib.sha256(text[: tail.start(1)] + _ZEROS + text[tail.end(1) :]).hexdigest() != digest:
            raise _bad(where, "does not match its own digest")
        try:
            manifest = _build(data, digest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _bad(where, f"has a missing or malformed field ({error!r})") from None
        findings = [Finding(where, what) for what in _problems(manifest)]
        if findings:
            raise CheckpointError(findings=findings)
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError when it is missing or damaged."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _bad(str(path), f"cannot be read ({error.strerror})") from None
    return Manifest.parse(text, str(path))


def json_problems(value: Any, where: str) -> list[Finding]:
    """What in a value would not come back from JSON as it went in (tuples, which come back as lists, are let through)."""
    if value is None or isinstance(value, bool | int | str):
        return []
    if isinstance(value, float):
        return [] if math.isfinite(value) else [Finding(where, f"is {value!r}, which JSON cannot hold", "Store null instead")]
    if isinstance(value, list | tuple):
        return [p for i, item in enumerate(value) for p in json_problems(item, f"{where}[{i}]")]
    if isinstance(value, dict):
        keys = [Finding(where, f"has the key {key!r}, which is no text") for key in value if not isinstance(key, str)]
        return keys + [p for key, item in value.items() if isinstance(key, str) for p in json_problems(item, f"{where}.{key}")]
    return [Finding(where, f"is a {type(value).__name__}; only numbers, text, lists and objects of these can be stored")]


def _bad(where: str, what: str, fix: str = "Choose another checkpoint") -> CheckpointError:
    return CheckpointError(findings=[Finding(where, what, fix)])


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(map(_natural, values)):
        raise ValueError(f"{values!r} is not a list of whole numbers")
    return tuple(values)


def _build(data: dict[str, Any], digest: str) -> Manifest:
    for key in ("step", "serial", "world"):
        if not _natural(data[key]):
            raise ValueError(f"{key} is {data[key]!r}")
    tensors = {
        name: TensorEntry(
            entry["dtype"],
            _ints(entry["shape"]),
            tuple(
                Slice(Box(_ints(s["offset"]), _ints(s["shape"])), str(s["file"]), str(s["key"]), int(s["crc32"]))
                for s in entry["slices"]
            ),
        )
        for name, entry in data["tensors"].items()
    }
    files = {name: FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in data["files"].items()}
    step, serial, world = data["step"], data["serial"], data["world"]
    return Manifest(step, serial, world, float(data["created"]), dict(data["meta"]), tensors, files, data["tag"], digest)


def _problems(manifest: Manifest) -> list[str]:
    """What makes a well-formed manifest unusable. A wrong slice table must never reach the reader."""
    found = [f"file name {name!r} leaves the folder" for name in manifest.files if PurePosixPath(name).name != name]
    for name, entry in manifest.tensors.items():
        if entry.dtype not in ITEM_BYTES:
            found.append(f"tensor {name!r} has the unknown dtype {entry.dtype!r}")
        found += [
            f"tensor {name!r} points at {s.file!r}, which is not listed" for s in entry.slices if s.file not in manifest.files
        ]
        if not all(s.box.fits(entry.shape) for s in entry.slices):
            found.append(f"tensor {name!r} has a slice outside its shape {list(entry.shape)}")
        elif (covered := sum(s.box.numel for s in entry.slices)) != math.prod(entry.shape):
            found.append(f"tensor {name!r} has {covered} of {math.prod(entry.shape)} elements")
        elif overlap := first_overlap([s.box for s in entry.slices]):
            found.append(f"tensor {name!r} has elements twice, in the slices at {overlap[0].offset} and {overlap[1].offset}")
    return found


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two blocks that share an element, or None. A sweep over the first dimension, so near linear for row splits."""
    active: list[Box] = []
    for box in sorted(b for b in boxes if b.numel):
        if box.offset:
            active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in active:
            if box.meet(other):
                return other, box
        active.append(box)
    return None
