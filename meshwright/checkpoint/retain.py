"""The folder of a run's checkpoints: who may write it, what is in it, what stays.

step-00000123            a published checkpoint
.step-00000124.partial   one that is being written, or that a dead run left
.trash-...               one that is being removed, or whose removal was cut short
best.json                step and value of the best checkpoint
.lock                    held by the process that writes (an flock, so it dies with the process)
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from meshwright.checkpoint.reader import check_files
from meshwright.checkpoint.writer import sync_folder
from meshwright.config.schema import Config
from meshwright.errors import CheckpointError, Finding

__all__ = [
    "FolderLock",
    "Found",
    "checkpoint_copies",
    "clean",
    "find",
    "make_partial",
    "partial_path",
    "prune",
    "publish",
    "read_best",
    "step_path",
    "unfinished",
    "write_best",
]

_STEP = re.compile(r"step-(\d{8,})\Z")
_PARTIAL = re.compile(r"\.step-(\d{8,})\.partial\Z")
_TRASH = re.compile(r"\.trash-")
_BEST = "best.json"

Report = Callable[[str], None]


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.partial"


class FolderLock:
    """The right to write a folder, for one living process at a time.

    An flock: the kernel drops it with the process, however that ends. A forked child closes its copy of the handle, so a
    data worker that outlives the run does not keep the folder locked.
    """

    def __init__(self, root: Path, patience: float):
        """Waits up to `patience` seconds for a process that is just ending. Raises CheckpointError naming the holder."""
        self._handle: int | None = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        self.supported = True
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    holder = os.pread(self._handle, 64, 0).decode(errors="replace").strip() or "another process"
                    self.release()
                    what = f"{holder} is writing checkpoints here"
                    raise CheckpointError(
                        findings=[Finding(str(root), what, "Wait for it or use another run folder")]
                    ) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                self.supported = False
                break
        if self.supported:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()}\n".encode(), 0)
        lock = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release(lock()))

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()


def _release(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()


@dataclass(frozen=True)
class Found:
    """A published folder. manifest is None when it cannot be read; `why` then says why (or which file is missing or cut)."""

    path: Path
    step: int
    manifest: Manifest | None
    why: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Newest last. By serial, so that a run that went back to an earlier step continues from what it wrote last."""
        return (self.manifest.serial if self.manifest else -1, self.step)


def find(root: Path) -> list[Found]:
    """Every published folder, newest first; sizes are checked, digests are not."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP.match(path.name)
        if not match or not path.is_dir():
            continue
        step = int(match.group(1))
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            found.append(Found(path, step, None, str(error)))
            continue
        findings = check_files(path, manifest, manifest.files)
        if manifest.step != step:
            findings.append(Finding(str(path / MANIFEST), f"is of step {manifest.step}"))
        found.append(Found(path, step, manifest, "\n".join(map(str, findings))))
    return sorted(found, key=lambda f: f.order, reverse=True)


def unfinished(root: Path) -> list[Path]:
    """Partial and trash folders."""
    return sorted(p for p in root.iterdir() if _PARTIAL.match(p.name) or _TRASH.match(p.name)) if root.is_dir() else []


def clean(root: Path, report: Report) -> None:
    """Deal with what a dead run left. Only for the holder of the lock.

    A partial folder whose manifest and files are complete was killed between its last byte and its name: it is published.
    Any other one is removed.
    """
    for path in unfinished(root):
        match = _PARTIAL.match(path.name)
        if match and (path / MANIFEST).exists():
            try:
                manifest = read_manifest(path)
                complete = manifest.step == int(match.group(1)) and not check_files(path, manifest, manifest.files)
            except CheckpointError:
                complete = False
            if complete:
                final = publish(root, path, int(match.group(1)))
                report(f"{final}: was complete when the run that wrote it ended; published")
                continue
        if match:
            report(f"{path}: skipped and removed, the run that wrote it ended before it was complete")
        _delete(path, report)


def publish(root: Path, partial: Path, step: int) -> Path:
    """Give a complete partial folder its name, atomically. An older checkpoint of the same step makes room just before."""
    final = step_path(root, step)
    old = None
    if final.exists():
        old = _trash(root, final)
    os.rename(partial, final)
    sync_folder(root)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return final


def prune(root: Path, keep: int, damaged: set[Path], report: Report) -> None:
    """Remove what is older than the `keep` newest whole checkpoints and is not the best one.

    damaged: folders known to be bad, which do not count among the kept. Called after a new checkpoint is complete.
    """
    found = find(root)
    whole = [f for f in found if f.manifest and not f.why and f.path not in damaged]
    if len(whole) <= keep:
        return
    oldest = whole[keep - 1].order
    try:
        best = read_best(root)
    except CheckpointError as error:  # which one is the best is not known, so nothing may go
        report(str(error))
        return
    for item in found:
        if item.order < oldest and not (best and item.step == best[0]):
            _delete(item.path, report)
    sync_folder(root)


def _trash(root: Path, path: Path) -> Path:
    """Rename first, so that a removal that is cut short leaves nothing that looks like a checkpoint."""
    for attempt in range(1000):
        target = root / f".trash-{path.name.lstrip('.')}-{os.getpid()}-{attempt}"
        if not target.exists():
            os.rename(path, target)
            return target
    raise CheckpointError(findings=[Finding(str(root), "is full of .trash- folders", "Delete them")])


def _delete(path: Path, report: Report) -> None:
    try:
        shutil.rmtree(path if _TRASH.match(path.name) else _trash(path.parent, path))
    except OSError as error:
        report(f"{path}: could not be removed ({error.strerror})")


def read_best(root: Path) -> tuple[int, float] | None:
    """(step, value) of the best checkpoint, or None."""
    try:
        data = json.loads((root / _BEST).read_bytes())
        return int(data["step"]), float(data["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(findings=[Finding(str(root / _BEST), "is damaged", "Delete it")]) from None


def write_best(root: Path, step: int, value: float) -> None:
    aside = root / f".{_BEST}.new"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump({"step": step, "value": value}, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, root / _BEST)
    sync_folder(root)


def make_partial(path: Path, report: Report) -> None:
    """An empty partial folder; what a failed attempt at the same step left is removed first. Raises OSError."""
    if path.exists():
        _delete(path, report)
    path.mkdir(parents=True)


def checkpoint_copies(config: Config, held_out: bool) -> int:
    """Checkpoints that lie on the disk at the worst moment: the kept ones, the best, and a new one; 0: nothing is saved."""
    best = config.evaluate.best and held_out
    if config.checkpoint.every or (config.evaluate.every and best):
        return config.checkpoint.keep + 1 + best
    return int(config.checkpoint.final)
