"""The reading half: prove that the files are what the manifest says, then fill tensors from the slices in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.manifest import ITEM_BYTES, Manifest, Slice, read_manifest
from meshwright.checkpoint.pieces import DTYPES, Piece
from meshwright.checkpoint.reshard import Read, plan_reads
from meshwright.checkpoint.writer import crc32, file_sha256
from meshwright.errors import Finding

__all__ = ["OTHER_MODEL", "ReadStats", "check_files", "files_of", "fill", "inspect", "misfits", "verify_file"]

OTHER_MODEL = "Resume with the model and optimizer that it was saved from"

CHUNK_BYTES = 64 << 20
"""Most bytes taken from a file in one go, so that loading needs no more memory than that beside the tensors."""


@dataclass
class ReadStats:
    """What a load cost this rank: bytes copied out of files, the largest single block of them, bytes hashed, files opened."""

    bytes_read: int = 0
    largest: int = 0
    bytes_hashed: int = 0
    files_opened: int = 0


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[Finding]:
    """Cheap checks, no digests: every named file is there and has its size."""
    findings = []
    for name in names:
        path, entry = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
        except OSError as error:
            findings.append(Finding(str(path), f"is missing ({error.strerror}); it holds {_holds(manifest, name)}"))
            continue
        if size != entry.bytes:
            what = f"has {size} bytes instead of {entry.bytes}; it holds {_holds(manifest, name)}"
            findings.append(Finding(str(path), what))
    return findings


def verify_file(folder: Path, manifest: Manifest, name: str, stats: ReadStats | None = None) -> list[Finding]:
    """Size, digest, and the header's agreement with the manifest. A damaged file's finding names the damaged tensors."""
    findings = check_files(folder, manifest, [name])
    if findings:
        return findings
    path, entry = folder / name, manifest.files[name]
    try:
        digest = file_sha256(path)
    except OSError as error:
        return [Finding(str(path), f"cannot be read ({error.strerror})")]
    if stats:
        stats.bytes_hashed += entry.bytes
    if digest != entry.sha256:
        damaged = _damaged(path, manifest, name)
        what = f"tensor {', '.join(damaged[:5])}" + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        where = what if damaged else "the header"
        return [Finding(str(path), f"is damaged: its sha256 is not the one in the manifest; the damage is in {where}")]
    try:
        with safe_open(str(path), "pt") as file:
            keys = set(file.keys())
            return [
                Finding(
                    str(path), f"has no entry {part.key!r} for tensor {tensor!r} with shape {list(part.box.shape)}, {dtype}"
                )
                for tensor, dtype, part in _slices(manifest, name)
                if part.key not in keys or not _matches(file.get_slice(part.key), part, dtype)
            ]
    except (SafetensorError, OSError) as error:
        return [Finding(str(path), f"is no safetensors file ({error})")]


def _matches(entry: Any, part: Slice, dtype: str) -> bool:
    return tuple(entry.get_shape()) == part.box.shape and entry.get_dtype() == dtype


def _slices(manifest: Manifest, file: str) -> Iterator[tuple[str, str, Slice]]:
    for tensor, entry in manifest.tensors.items():
        for part in entry.slices:
            if part.file == file:
                yield tensor, entry.dtype, part


def _holds(manifest: Manifest, file: str) -> str:
    names = sorted({tensor for tensor, _, _ in _slices(manifest, file)})
    if not names:
        return "no tensor"
    return f"tensor {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _damaged(path: Path, manifest: Manifest, name: str) -> list[str]:
    """Tensors of a damaged file whose own checksum fails; empty when only the header is damaged."""
    try:
        with safe_open(str(path), "pt") as file:
            keys = set(file.keys())
            return [
                tensor
                for tensor, _, part in _slices(manifest, name)
                if part.key not in keys or crc32(file.get_tensor(part.key)) != part.crc32
            ]
    except (SafetensorError, OSError, RuntimeError):
        return []  # the header is so damaged that nothing can be told apart


def fill(folder: Path, manifest: Manifest, wanted: Sequence[Piece], stats: ReadStats) -> None:
    """Copy every wanted block out of the files, in place; file by file, each opened once. The files have been verified."""
    by_file: dict[str, list[tuple[Piece, Read]]] = {}
    for piece in wanted:
        for read in plan_reads(manifest, piece.name, piece.offset, piece.tensor.shape):
            by_file.setdefault(read.file, []).append((piece, read))
    with torch.no_grad():
        for name, reads in sorted(by_file.items()):
            with safe_open(str(folder / name), "pt") as file:
                stats.files_opened += 1
                for piece, read in reads:
                    _copy(file.get_slice(read.key), piece, read, ITEM_BYTES[manifest.tensors[piece.name].dtype], stats)


def _copy(entry: Any, piece: Piece, read: Read, item: int, stats: ReadStats) -> None:
    if not read.source:  # a scalar has no dimension to cut
        piece.tensor.copy_(entry[...])
        stats.bytes_read += item
        stats.largest = max(stats.largest, item)
        return
    for source, target in _chunks(read, item):
        block = entry[source]
        piece.tensor[target].copy_(block)
        size = block.numel() * item
        stats.bytes_read += size
        stats.largest = max(stats.largest, size)


def _chunks(read: Read, item: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The read cut along its longest dimension into parts of at most CHUNK_BYTES (or one index, if that is more)."""
    sizes = read.box.shape
    dim = max(range(len(sizes)), key=sizes.__getitem__)
    step = max(1, CHUNK_BYTES // max(1, read.box.numel // sizes[dim] * item))
    for at in range(0, sizes[dim], step):
        stop = min(at + step, sizes[dim])
        yield _narrow(read.source, dim, at, stop), _narrow(read.target, dim, at, stop)


def _narrow(index: tuple[slice, ...], dim: int, start: int, stop: int) -> tuple[slice, ...]:
    base = index[dim].start
    return (*index[:dim], slice(base + start, base + stop), *index[dim + 1 :])


def files_of(manifest: Manifest, wanted: Iterable[Piece]) -> list[str]:
    """Names of the files that the wanted pieces are read from."""
    return sorted({read.file for p in wanted for read in plan_reads(manifest, p.name, p.offset, p.tensor.shape)})


def misfits(manifest: Manifest, wanted: Sequence[Piece], cast: bool) -> list[Finding]:
    """Why the wanted pieces cannot be filled from this manifest: names, shapes, dtypes (unless cast)."""
    findings = []
    for piece in wanted:
        entry = manifest.tensors.get(piece.name)
        dtype = DTYPES.get(piece.tensor.dtype)
        if entry is None:
            findings.append(Finding(piece.name, "is not in the checkpoint", OTHER_MODEL))
        elif entry.shape != tuple(piece.shape):
            findings.append(
                Finding(piece.name, f"has shape {list(entry.shape)} in the checkpoint, {list(piece.shape)} here", OTHER_MODEL)
            )
        elif not piece.box.fits(piece.shape):
            findings.append(
                Finding(piece.name, f"{list(piece.box.shape)} at {list(piece.offset)} is outside {list(piece.shape)}")
            )
        elif entry.dtype != dtype and not cast:
            what = f"is {entry.dtype} in the checkpoint, {dtype or piece.tensor.dtype} here"
            findings.append(Finding(piece.name, what, "Resume in the same precision, or ask for a cast"))
    return findings


def inspect(path: str | Path, *, digests: bool = False) -> dict[str, Any]:
    """What a checkpoint folder holds, as JSON values, for tools. `findings` is empty when nothing is wrong with it.

    digests: read every file through; else sizes are compared. Raises CheckpointError when the manifest cannot be used.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    findings = check_files(folder, manifest, manifest.files)
    if digests:
        findings = [f for name in manifest.files for f in verify_file(folder, manifest, name)]
    return {
        "path": str(folder),
        "step": manifest.step,
        "serial": manifest.serial,
        "tag": manifest.tag,
        "world": manifest.world,
        "created": manifest.created,
        "bytes": manifest.total_bytes,
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape), "slices": len(entry.slices)}
            for name, entry in manifest.tensors.items()
        },
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "meta": manifest.meta,
        "findings": [str(finding) for finding in findings],
    }
