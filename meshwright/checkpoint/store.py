"""The checkpoints of a run: save, find the newest whole one, load it on any splitting."""

from __future__ import annotations

import fnmatch
import math
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from meshwright.checkpoint import retain
from meshwright.checkpoint.exchange import broadcast_bytes, broadcast_json, gather_json
from meshwright.checkpoint.manifest import MANIFEST, Manifest, json_problems
from meshwright.checkpoint.pieces import Geometry, Piece, SharePlan, geometry, share
from meshwright.checkpoint.reader import OTHER_MODEL, ReadStats, files_of, fill, misfits, verify_file
from meshwright.checkpoint.ticket import Job, SaveTicket, readable
from meshwright.checkpoint.writer import Staging
from meshwright.errors import CheckpointError, DeviceError, Finding

__all__ = ["CheckpointStore"]


def _silent(text: str) -> None:
    """Reports go nowhere unless the caller wants them."""


class CheckpointStore:
    """The checkpoint folder of one run, shared by all its ranks.

    root    the folder; made when it is missing
    group   a gloo group of all ranks that nothing else uses: the background writer talks over it while training goes on.
            None in a world of one
    keep    newest whole checkpoints kept, beside the best one
    write   take the folder's lock and clean up after a dead run. False for a reader, which may then run beside a trainer
    report  called on rank 0 with one line for each checkpoint that is skipped, removed or published late
    before_publish  called on rank 0 with the complete partial folder, just before it gets its name

    Every method but `mark_best` and `close` is collective: all ranks call it, in the same order, from one thread.
    Errors are raised on every rank. Raises CheckpointError when another living process writes the folder, DeviceError when
    the folder cannot be made.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        world: int = 1,
        keep: int = 2,
        write: bool = True,
        report: Callable[[str], None] = _silent,
        before_publish: Callable[[Path], None] | None = None,
        lock_patience_s: float = 10.0,
    ):
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        if world != (1 if group is None else dist.get_world_size(group)):
            raise ValueError(f"world is {world}, which is not the size of the group")
        self.root = Path(root)
        self.rank, self.world, self.keep = rank, world, keep
        self.last_load = ReadStats()
        self._group = group
        self._report = report
        self._before_publish = before_publish
        self._staging = Staging()
        self._plan: SharePlan | None = None
        self._geometry: list[Geometry] | None = None
        self._ticket: SaveTicket | None = None
        self._pending_best: tuple[int, float] | None = None
        self._guard = threading.Lock()
        self._serial = 0
        self._verified: dict[Path, tuple[object, ...]] = {}
        self._damaged: set[Path] = set()
        self._lock: retain.FolderLock | None = None
        self._writable = write
        trouble: list[Finding] = []
        kind = "checkpoint"
        if write and rank == 0:
            try:
                self._open(lock_patience_s)
            except CheckpointError as error:
                trouble = list(error.findings)
            except OSError as error:
                kind, trouble = (
                    "device",
                    [Finding(str(self.root), f"cannot be written ({error.strerror})", "Use another folder")],
                )
        answer = broadcast_json({"kind": kind, "trouble": [[f.where, f.what, f.fix] for f in trouble]}, group)
        if answer["trouble"]:
            self.close()
            error_type = DeviceError if answer["kind"] == "device" else CheckpointError
            raise error_type(findings=[Finding(*f) for f in answer["trouble"]])

    def _open(self, patience_s: float) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = retain.FolderLock(self.root, patience_s)
        if self._lock.supported:
            retain.clean(self.root, self._report)
        else:
            self._report(f"{self.root}: this file system has no locks, so leftovers of dead runs are not cleaned up")
        self._serial = max((f.order[0] for f in retain.find(self.root)), default=0)

    # ---- saving

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        meta: dict[str, Any],
        *,
        background: bool = True,
        tag: str | None = None,
    ) -> SaveTicket:
        """Save a checkpoint. The pieces may change as soon as this returns.

        meta: JSON values (rank 0's are stored). tag: a label recorded in the manifest. An earlier save that is still going
        on is waited for; its error, if any, is raised here. In the foreground this save's own error is raised too.
        Raises CheckpointError: pieces that do not fit together, values that are no JSON, a disk that refuses.
        """
        start = time.perf_counter()
        self._require_lock()
        self._settle()
        pieces = list(pieces)
        problems = json_problems(meta, "meta")
        partial = retain.partial_path(self.root, step)
        if self.rank == 0 and not problems:
            try:
                retain.make_partial(partial, self._report)
            except OSError as error:
                free = readable(shutil.disk_usage(self.root).free) if self.root.exists() else "nothing"
                problems.append(Finding(str(partial), f"cannot be made ({error.strerror}; {free} free)"))
        plan = self._share(pieces, problems)
        trouble: Exception | None = None
        staged = []
        try:
            staged = self._staging.fill(plan.ranks[self.rank], pieces)
        except (RuntimeError, MemoryError) as error:  # no host memory: the other ranks hear of it from the job
            trouble = error
        self._serial += 1
        job = Job(
            root=self.root,
            partial=partial,
            step=step,
            serial=self._serial,
            tag=tag,
            meta=meta,
            plan=plan,
            staged=staged,
            group=self._group,
            rank=self.rank,
            world=self.world,
            before_publish=self._before_publish,
            after_publish=lambda: self._after_publish(step),
            trouble=trouble,
        )
        ticket = self._ticket = SaveTicket(step, plan.total)
        ticket.start(job, background)
        ticket.blocked_s = time.perf_counter() - start
        if not background:
            ticket.wait()
        return ticket

    def check_space(self, pieces: Iterable[Piece], *, copies: int | None = None) -> int:
        """Bytes of one checkpoint of these pieces. Call before step 1.

        copies: checkpoints that lie in the folder at the worst moment; default keep + 1, since the oldest goes only when the
        new one is complete (one more where a best one is kept). What is in the folder already counts as room.
        Raises DeviceError with needed and free space, or with the limit on file size.
        """
        self._settle()
        plan = self._share(list(pieces), [])
        size, copies = plan.total, self.keep + 1 if copies is None else copies
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        room = limit if limit != resource.RLIM_INFINITY else None
        at = next(folder for folder in (self.root.absolute(), *self.root.absolute().parents) if folder.exists())
        present = sum(f.manifest.total_bytes for f in retain.find(self.root) if f.manifest)
        facts = gather_json([shutil.disk_usage(at).free, present, room], self._group)
        free, present = min(f[0] for f in facts), max(f[1] for f in facts)
        need = max(size, copies * size - present)
        findings = []
        if need > free:
            what = f"{copies} checkpoints of {readable(size)} need {readable(need)} more, {readable(free)} are free"
            findings.append(Finding(str(self.root), what, "Free space, lower checkpoint.keep, or use another run.dir"))
        for rank, (_, _, most) in enumerate(facts):
            if most is not None and plan.bytes(rank) > most:
                what = f"rank {rank} writes a file of {readable(plan.bytes(rank))}, the limit on file size is {readable(most)}"
                findings.append(Finding(str(self.root), what, "Raise it with ulimit -f"))
        if findings:
            raise DeviceError(findings=findings)
        return size

    def mark_best(self, step: int, value: float) -> None:
        """Say that the checkpoint of `step` (published, or being saved) is the best one, with its `value` (finite)."""
        if not math.isfinite(value):
            raise ValueError(f"the best value is {value}")
        if self.rank != 0:
            return
        with self._guard:
            if self._ticket is not None and self._ticket.step == step and not retain.step_path(self.root, step).exists():
                self._pending_best = (step, value)  # recorded when it is published; if that fails the old best one stays
                return
        if not retain.step_path(self.root, step).exists():
            raise CheckpointError(findings=[Finding(str(self.root), f"there is no checkpoint of step {step} to mark as best")])
        retain.write_best(self.root, step, value)

    def _after_publish(self, step: int) -> None:
        with self._guard:
            best, self._pending_best = self._pending_best, None
        self._damaged.discard(retain.step_path(self.root, step))
        try:
            if best is not None and best[0] == step:
                retain.write_best(self.root, *best)
            retain.prune(self.root, self.keep, self._damaged, self._report)
        except OSError as error:  # the new checkpoint is safe; an old one that stays is no reason to stop
            self._report(f"{self.root}: older checkpoints could not be tidied up ({error.strerror})")

    def _share(self, pieces: Sequence[Piece], problems: list[Finding]) -> SharePlan:
        """Who writes what. Worked out again only when a rank's pieces have changed."""
        mine, findings = geometry(pieces)
        findings = problems + findings
        states = gather_json([mine == self._geometry, [[f.where, f.what, f.fix] for f in findings]], self._group)
        self._refuse([Finding(*f) for state in states for f in state[1]])
        if self._plan is None or not all(state[0] for state in states):
            held = gather_json([g.to_json() for g in mine], self._group)
            plan, findings = share([[Geometry.from_json(g) for g in rank] for rank in held])
            self._refuse(findings)
            self._plan, self._geometry = plan, mine
        return self._plan

    # ---- finding

    def newest(self) -> Path | None:
        """The newest checkpoint whose manifest, sizes and digests are all right, or None. Others are reported by name."""
        self._settle()
        names: list[str] = []
        if self.rank == 0:
            for path in retain.unfinished(self.root):
                self._report(f"{path}: skipped, it is not complete")
            for found in retain.find(self.root):
                if found.why:
                    self._skip(found.path, found.why)
                else:
                    names.append(found.path.name)
        for name in broadcast_json(names, self._group):
            if self._whole(self.root / name):
                return self.root / name
        return None

    def best(self) -> Path | None:
        """The checkpoint that `mark_best` named, if it is there and whole; else None, and the reason is reported."""
        self._settle()
        name = None
        if self.rank == 0:
            try:
                marked = retain.read_best(self.root)
                if marked is not None:
                    name = retain.step_path(self.root, marked[0]).name
            except CheckpointError as error:
                self._report(str(error))
        name = broadcast_json(name, self._group)
        return self.root / name if name is not None and self._whole(self.root / name) else None

    def _whole(self, path: Path) -> bool:
        try:
            manifest = self._manifest(path)
            self._refuse(self._verify(path, manifest, list(manifest.files)))
        except CheckpointError as error:
            if self.rank == 0:
                self._skip(path, str(error))
            return False
        return True

    def _skip(self, path: Path, why: str) -> None:
        self._damaged.add(path)
        self._report(f"{path}: skipped, it is not whole\n{why}")

    # ---- loading

    def load(
        self,
        path: str | Path,
        wanted: Iterable[Piece],
        *,
        cast: bool = False,
        ignore: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Fill the wanted tensors in place, whatever splitting they were saved in, and return what was stored as meta.

        cast: let a tensor of another dtype take the stored values converted. ignore: patterns (`optimizer.*`) of stored
        names that no rank needs to want; `["*"]` takes just what is wanted. All is checked, digests included, before the
        first tensor is touched. `last_load` tells what it cost this rank.
        Raises CheckpointError: a damaged file (with its tensors), names missing on either side, shapes or dtypes that differ.
        """
        self._settle()
        path, wanted, self.last_load = Path(path), list(wanted), ReadStats()
        manifest = self._manifest(path)
        findings = misfits(manifest, wanted, cast)
        files = [] if findings else files_of(manifest, wanted)
        own = [sorted({piece.name for piece in wanted}), files, [[f.where, f.what, f.fix] for f in findings]]
        ranks = gather_json(own, self._group)
        findings = [Finding(*f) for _, _, found in ranks for f in found]
        extra = set(manifest.tensors) - {name for names, _, _ in ranks for name in names}
        extra = {name for name in extra if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)}
        findings += [Finding(name, "is in the checkpoint, but nothing here takes it", OTHER_MODEL) for name in sorted(extra)]
        self._refuse(findings)
        self._refuse(self._verify(path, manifest, sorted({file for _, files, _ in ranks for file in files})))
        trouble = ""
        try:
            fill(path, manifest, wanted, self.last_load)
        except (OSError, SafetensorError, RuntimeError) as error:
            trouble = f"rank {self.rank} could not read it ({error})"
        self._refuse([Finding(str(path), text) for text in gather_json(trouble, self._group) if text])
        return manifest.meta

    def _manifest(self, path: Path) -> Manifest:
        """Rank 0 reads it and all ranks parse the same bytes, so that they cannot disagree on the plan of the reads."""
        text, why = b"", ""
        if self.rank == 0:
            try:
                text = (path / MANIFEST).read_bytes()
            except OSError as error:
                why = f"cannot be read ({error.strerror})"
        why = broadcast_json(why, self._group)
        if why:
            raise CheckpointError(findings=[Finding(str(path / MANIFEST), why, "Choose another checkpoint")])
        return Manifest.parse(broadcast_bytes(text, self._group), str(path / MANIFEST))

    def _verify(self, path: Path, manifest: Manifest, files: list[str]) -> list[Finding]:
        """Digests of the files, each by one rank, the largest first to the rank with the least to do.

        A file that this store has verified and that has not been written to since is not read again: a resume calls
        `newest` and then `load`.
        """
        todo: list[str] = []
        if self.rank == 0:
            todo = [name for name in files if self._verified.get(path / name) != _stamp(path / name, manifest, name)]
        todo = sorted(broadcast_json(todo, self._group), key=lambda name: (-manifest.files[name].bytes, name))
        load = [0] * self.world
        findings = []
        for name in todo:
            rank = load.index(min(load))
            load[rank] += manifest.files[name].bytes
            if rank == self.rank:
                findings += verify_file(path, manifest, name, self.last_load)
        answers = gather_json([[f.where, f.what, f.fix] for f in findings], self._group)
        findings = [Finding(*f) for answer in answers for f in answer]
        if not findings and self.rank == 0:
            self._verified.update({path / name: _stamp(path / name, manifest, name) for name in todo})
        return findings

    # ---- end

    def wait(self) -> None:
        """Wait for a save that is going on; raises its error unless that has been raised before."""
        self._settle()

    def close(self) -> None:
        """Wait for a save that is going on, then let others write the folder. Raises the save's error."""
        try:
            self._settle()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._writable = False

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # else the error that ends the block says more
                raise

    def _settle(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            if not ticket.raised:
                ticket.wait()

    def _require_lock(self) -> None:
        if not self._writable:
            raise CheckpointError(
                findings=[Finding(str(self.root), "was opened for reading only, or closed; nothing can be saved")]
            )

    @staticmethod
    def _refuse(findings: Iterable[Finding]) -> None:
        found = list(dict.fromkeys(findings))  # ranks often find the same
        if found:
            raise CheckpointError(findings=found)


def _stamp(path: Path, manifest: Manifest, name: str) -> tuple[object, ...]:
    """Changes whenever a file is written to or replaced, or another digest is expected of it."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, manifest.files[name].sha256
