"""Folders of safetensors files: proved whole before anything is loaded, read tensor by tensor, written shard by shard."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.compat import save_tensors
from meshwright.disk import NO_ROOM_FIX, readable, unwritable
from meshwright.errors import CheckpointError, DeviceError, Finding

__all__ = ["INDEX", "Shards", "new_folder", "read_json", "write_shards"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARD_BYTES = 4 * 2**30
"""Most bytes of a file, and so the memory that writing takes beside one tensor."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(findings=[Finding(str(path), f"cannot be read: {error.strerror}")]) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(findings=[Finding(str(path), f"is not JSON: {error}")]) from None
    if not isinstance(value, dict):
        raise CheckpointError(findings=[Finding(str(path), f"holds {type(value).__name__}, not an object")])
    return value


class Shards:
    """The tensors of a folder, by name; `with Shards(folder) as shards`.

    Raises CheckpointError with every file that is missing, cut or lacks what the index says of it. That takes the
    files' headers only, so it comes before any weight is read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        findings: list[Finding] = []
        listed = self._listed()
        for file in sorted(set(listed.values())):
            self._open(file, listed, findings)
        if findings:
            self.close()
            raise CheckpointError(f"{folder} is not whole", findings)

    def _listed(self) -> dict[str, str]:
        """Tensor -> file, as the index says; with no index, of the one file (its tensors are added when it is opened)."""
        index = self.folder / INDEX
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise CheckpointError(findings=[Finding(str(index), "names no tensor (weight_map)", "Fetch the file again")])
            strange = [file for file in listed.values() if not isinstance(file, str) or Path(file).name != file]
            if strange:
                raise CheckpointError(findings=[Finding(str(index), f"{strange[0]!r} is not the name of a file beside it")])
            return listed
        if (self.folder / SINGLE).exists():
            return {"": SINGLE}
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        what = f"has neither {SINGLE} nor {INDEX}"
        what += f"; {pickled[0]} is a pickle, which is never loaded" if pickled else ""
        raise CheckpointError(findings=[Finding(str(self.folder), what, "Save the model as safetensors" if pickled else "")])

    def _open(self, file: str, listed: Mapping[str, str], findings: list[Finding]) -> None:
        path = self.folder / file
        expected = [name for name, where in listed.items() if where == file and name]
        if not path.exists():
            findings.append(Finding(str(path), f"is missing; it holds {_some(expected)}", "Fetch the file again"))
            return
        try:
            handle = self._stack.enter_context(safe_open(path, "pt"))
            there = set(handle.keys())
        except (SafetensorError, OSError) as error:
            what = f"is damaged or cut short ({path.stat().st_size} bytes): {error}"
            findings.append(Finding(str(path), what, "Fetch the file again"))
            return
        odd = [name for name in sorted(there) if handle.get_slice(name).get_dtype() not in DTYPES]
        if odd:
            kinds = ", ".join(sorted({handle.get_slice(name).get_dtype() for name in odd}))
            findings.append(Finding(str(path), f"{_some(odd)} is of type {kinds}", f"Known: {', '.join(DTYPES)}"))
        absent = [name for name in expected if name not in there]
        if absent:
            findings.append(Finding(str(path), f"does not hold {_some(absent)}, though {INDEX} says so"))
        unlisted = sorted(there - set(expected)) if expected else []
        if unlisted:
            findings.append(Finding(str(path), f"holds {_some(unlisted)}, which {INDEX} does not place there"))
        self._files[file] = handle
        self._where.update(dict.fromkeys(there, file))

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def file(self, name: str) -> Path:
        """The file that has the tensor."""
        return self.folder / self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._files[self._where[name]].get_slice(name).get_dtype()]

    def widest(self) -> torch.dtype:
        """The dtype that holds every tensor's values."""
        return functools.reduce(torch.promote_types, {self.dtype(name) for name in self._where})

    def total_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self._files)

    def get(self, name: str) -> torch.Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write tensors as they come, one file, or several with an index. Returns their bytes.

    Memory: one shard. A tensor larger than `shard_bytes` has a file of its own.
    """
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    held = total = 0

    def flush() -> None:
        nonlocal held
        path = folder / f"shard-{len(files)}.partial"
        save_tensors(pending, path, {"format": "pt"})
        files.append((path, list(pending)))
        pending.clear()
        held = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and held + size > shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu").contiguous()
        held += size
        total += size
    if pending or not files:
        flush()
    if len(files) == 1:
        os.replace(files[0][0], folder / SINGLE)
        return total
    weight_map = {}
    for index, (path, names) in enumerate(files, start=1):
        file = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        os.replace(path, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX).write_text(index_text + "\n", encoding="utf-8")
    return total


@contextmanager
def new_folder(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to fill that takes the name `folder` only when all of it is there; on any error nothing is left.

    Raises DeviceError where it exists and is not empty, cannot be made, or the disk has less than `needed_bytes`.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DeviceError(findings=[Finding(str(folder), "exists and is not empty", "Give another name or remove it")])
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            what = f"{readable(needed_bytes)} are needed, {readable(free)} are free"
            raise DeviceError(findings=[Finding(str(folder.parent), what, NO_ROOM_FIX)])
        yield partial
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    except SafetensorError as error:
        raise DeviceError(findings=[Finding(str(folder), f"cannot be written: {error}", NO_ROOM_FIX)]) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
