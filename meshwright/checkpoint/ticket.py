"""One save: the work that goes on in the background, and the handle by which the trainer waits for it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.exchange import broadcast_json, gather_json
from meshwright.checkpoint.manifest import MANIFEST, Box, FileEntry, Manifest, Slice, TensorEntry
from meshwright.checkpoint.pieces import SharePlan
from meshwright.checkpoint.retain import publish
from meshwright.checkpoint.writer import Staged, shard_name, sync_folder, write_shard
from meshwright.errors import CheckpointError, Finding, MeshwrightError

__all__ = ["Job", "SaveTicket", "assemble", "readable"]


def readable(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass
class Job:
    """Everything the background needs. `trouble`: what went wrong on this rank before the writing began."""

    root: Path
    partial: Path
    step: int
    serial: int
    tag: str | None
    meta: dict[str, Any]
    plan: SharePlan
    staged: list[Staged]
    group: dist.ProcessGroup | None
    rank: int
    world: int
    before_publish: Callable[[Path], None] | None
    after_publish: Callable[[], None]
    trouble: Exception | None = None

    def run(self) -> Path:
        """Write, tell the others, publish. Returns on every rank, or raises on every rank with the partial folder removed."""
        own: dict[str, Any] = {}
        cause = self.trouble
        if cause is None:
            try:
                own = write_shard(self.partial, shard_name(self.rank, self.world), self.staged)
            except Exception as error:  # whatever it is, the others must hear of it, or they wait for ever
                cause = error
        parts = gather_json({"error": self._explain(cause)} if cause else own, self.group)
        errors = {f"rank {rank}": part["error"] for rank, part in enumerate(parts) if "error" in part}
        if self.rank == 0 and not errors:
            try:
                self._finish(parts)
            except Exception as error:
                cause = error
                errors = {"rank 0": self._explain(error)}
        if self.rank == 0 and errors:
            shutil.rmtree(self.partial, ignore_errors=True)
        errors = broadcast_json(errors, self.group)
        if errors:
            what = "; ".join(f"{rank}: {text}" for rank, text in errors.items()) if self.world > 1 else errors["rank 0"]
            fix = "The checkpoints saved before it are untouched: mend this and resume from the newest"
            raise CheckpointError(findings=[Finding(f"checkpoint of step {self.step}", f"not saved: {what}", fix)]) from cause
        if self.rank == 0:
            self.after_publish()
        return self.root / f"step-{self.step:08d}"

    def _explain(self, error: Exception) -> str:
        text = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
        try:
            free = readable(shutil.disk_usage(self.root).free)
        except OSError as gone:
            return f"{text} ({self.root} cannot be looked at: {gone.strerror})"
        return f"{text} ({free} free in {self.root}, the checkpoint takes {readable(self.plan.total)})"

    def _finish(self, parts: list[dict[str, Any]]) -> None:
        facts = {"step": self.step, "serial": self.serial, "world": self.world, "meta": self.meta, "tag": self.tag}
        manifest = assemble(self.plan, parts, **facts)
        with open(self.partial / MANIFEST, "wb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.partial)
        if self.before_publish is not None:
            self.before_publish(self.partial)
        publish(self.root, self.partial, self.step)


def assemble(plan: SharePlan, parts: list[dict[str, Any]], **facts: Any) -> Manifest:
    """The manifest of what `write_shard` reported on every rank. facts: the other fields of Manifest."""
    slices: dict[str, list[Slice]] = {name: [] for name in plan.tensors}
    for part in parts:
        for s in part["slices"]:
            box = Box(tuple(s["offset"]), tuple(s["shape"]))
            slices[s["name"]].append(Slice(box, part["file"], s["key"], s["crc32"]))
    tensors = {
        name: TensorEntry(dtype, shape, tuple(sorted(slices[name], key=lambda s: s.box)))
        for name, (dtype, shape) in plan.tensors.items()
    }
    files = {part["file"]: FileEntry(part["bytes"], part["sha256"]) for part in parts if part["file"]}
    return Manifest(tensors=tensors, files=files, created=time.time(), **facts)


@dataclass
class SaveTicket:
    """A save under way. blocked_s: seconds the trainer was held up (the copy to host memory, or the whole save in the
    foreground); written_s: seconds the writing took, known when it is done.
    """

    step: int
    bytes: int
    blocked_s: float = 0.0
    written_s: float = 0.0
    error: BaseException | None = None
    raised: bool = False
    path: Path | None = None
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self, job: Job, background: bool) -> None:
        if not background:
            self._run(job)
            return
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{self.step}", daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        start = time.perf_counter()
        try:
            self.path = job.run()
        except MeshwrightError as error:
            self.error = error
        except Exception as error:  # a peer that is gone shows as any error of the transport
            text = f"checkpoint of step {job.step} was not saved: {type(error).__name__}: {error}"
            self.error = MeshwrightError(text)
            self.error.__cause__ = error
        finally:
            self.written_s = time.perf_counter() - start

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Block until the checkpoint is published and return its folder. Raises, on every rank, what went wrong on any."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            self.raised = True
            raise self.error
        if self.path is None:
            raise MeshwrightError(f"checkpoint of step {self.step} ended without a result")
        return self.path
