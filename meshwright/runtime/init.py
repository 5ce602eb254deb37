"""`meshwright.init`: a script's process groups, opened once and closed when it ends, however it was started."""

from __future__ import annotations

import atexit
import contextlib
import os
import site
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

import meshwright
from meshwright.distributed import device as devices
from meshwright.distributed.environment import World, read_world
from meshwright.distributed.world import Ranks, init_world
from meshwright.errors import MeshwrightError
from meshwright.runtime.run import Run

__all__ = ["init"]


def init(device: str | None = None, *, seed: int = 0, timeout: float = 1800.0) -> Run:
    """Meet the other ranks of this script: those of `meshwright launch`, torchrun, Slurm or Kubernetes; alone, be the only one.

    device: "cpu", "cuda", ...; None: the accelerator that torch finds, else the CPU. seed: orders random samplers that have no
    generator of their own. timeout: seconds a collective may take. A process group that the script has opened is used, and
    left open. Call it once, before `run.parallelize`. Raises DeviceError for what is missing.
    """
    if dist.is_initialized():
        kind = devices.pick(device)
        return Run(Ranks.adopt(_adopted(), devices.rank_device(kind, read_world(warn=False).local_rank), timeout), seed)
    try:
        groups = init_world(read_world(), devices.pick(device), timeout=timeout)
        run = Run(groups.__enter__(), seed)
    except MeshwrightError:
        _Ending()  # which tells it
        raise
    _Ending().watch(run, groups)  # torch has put a hook of its own in place meanwhile
    return run


def _adopted() -> World:
    """This process's place in the process group that is open."""
    known = read_world(warn=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    if known.world == size and known.rank == rank:
        return known
    return World(rank, size, rank, size, master_port=1, source="the script's own process group")


def _place(trace: TracebackType | None) -> str:
    """Where a script called what failed, below the message."""
    ours = str(Path(meshwright.__file__).parent)
    places = [
        frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((ours, "<", *site.getsitepackages()))
    ]
    return f"\n  at {places[-1].filename}, line {places[-1].lineno}: {places[-1].line}" if places else ""


class _Ending:
    """Tells errors from when it is made, and closes a run when the interpreter ends: after an error without waiting for the
    other ranks, which would wait too."""

    def __init__(self) -> None:
        self._failed: BaseException | None = None
        self._before, sys.excepthook = sys.excepthook, self._hook

    def watch(self, run: Run, groups: contextlib.AbstractContextManager[Ranks]) -> None:
        self._run, self._groups = run, groups
        atexit.register(self._close)

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What this package says is told in its own words, as `meshwright launch` tells it, with the line of the script that
        led there; everything else with the traceback of the script."""
        self._failed = error
        if isinstance(error, MeshwrightError):
            print(f"meshwright: {error}{_place(trace)}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code)  # from here it becomes the exit code of the process
        self._before(kind, error, trace)

    def _close(self) -> None:
        self._run.close()
        error = self._failed
        try:
            self._groups.__exit__(type(error) if error else None, error, None)
        except MeshwrightError as left:
            if error is not None:
                return
            fix = "Every rank must take as many steps: one that waits for another in a step ends with an error now"
            print(f"meshwright: warning: {left}. {fix}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(0)  # threads of the groups, which still wait, could hold the interpreter
        except BaseException:
            if error is None:
                raise
