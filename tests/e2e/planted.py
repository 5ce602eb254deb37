"""A user's file (`run.modules`) that plants trouble: a kill, a sleep, a number that is not finite, at a chosen moment.

What is planted where stands as JSON in MESHWRIGHT_PLANTED, a list of `Plant`s. Moments are "before X" and "after X" for the
operations of `WRAPPED`, counted in each process from 1. Tests in one process use `planted(...)` instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MESHWRIGHT_PLANTED"
TAG = "MESHWRIGHT_TEST_TAG"
"""Every process of a run has this variable, so that none can be overlooked."""

WRAPPED = {
    "step": "meshwright.train.loop:train_step",
    "save": "meshwright.train.loop:save",
    "evaluate": "meshwright.train.loop:evaluate",
    "loss": "meshwright.train.objectives:Objective.loss",
    "update": "meshwright.parallel.engine:Engine.update",
    "reduce": "torch.distributed:all_reduce",
    "rows": "meshwright.data.dataset:RowDataset.block",
    "load": "meshwright.checkpoint.store:CheckpointStore.load",
    "clean": "meshwright.checkpoint.retain:clean",
    "stage": "meshwright.checkpoint.writer:Staging.fill",
    "file": "meshwright.checkpoint.writer:save_tensors",
    "manifest": "meshwright.checkpoint.ticket:assemble",
    "name": "meshwright.checkpoint.ticket:publish",
    "prune": "meshwright.checkpoint.retain:prune",
    "lines": "meshwright.observe.metrics:MetricsWriter.__init__",
    "line": "meshwright.observe.metrics:MetricsWriter.write",
}
PREPARING = {
    "chunk": "meshwright.data.output:Output.write",
    "journal": "meshwright.data.journal:Journal.append",
    "corpus": "meshwright.data.manifest:Manifest.write",
}


@dataclass(frozen=True)
class Plant:
    """do: "kill" (every process of the run), "kill rank", "cut" (the file just written, then kill), "tear" (half a line, then
    kill), "sleep", "scale" (the loss by `value`), "poison" (a weight becomes `value`), "fill" (the disk of `path`), "note" (the
    time, as a line of `path`).

    at: "before step", ... nth: only the n-th time. every: each time that the count divides. rank: None is any.
    start: only in this start of the ranks. value: seconds of a sleep, factor of a scale.
    """

    do: str
    at: str
    nth: int | None = None
    every: int = 1
    rank: int | None = None
    start: int | None = None
    value: float = 0.0
    path: str = ""


class Planted:
    def __init__(self, plants: list[Plant]):
        self._plants = plants
        self._counts: Counter[str] = Counter()

    def reach(self, moment: str, args: tuple[Any, ...]) -> float:
        """Act on this moment; the factor of the loss."""
        self._counts[moment] += 1
        count, factor = self._counts[moment], 1.0
        for plant in self._plants:
            here = plant.at == moment and plant.rank in (None, rank())
            start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            if not here or plant.start not in (None, start):
                continue
            if count == plant.nth or (plant.nth is None and count % plant.every == 0):
                if plant.do == "scale":
                    factor *= plant.value
                else:
                    _ACTIONS[plant.do](plant, args)
        return factor


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))


def kill_all() -> None:
    """SIGKILL every process of this run, the launcher first, this one last."""
    import psutil

    tag, me = os.environ[TAG], os.getpid()
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else me
    others = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in (me, launcher) and process.environ().get(TAG) == tag:
                others.append(process.pid)
    for pid in [launcher, *others, me] if launcher != me else [*others, me]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(60)  # the signal of this process may arrive late


def _kill_rank(plant: Plant, args: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cut(plant: Plant, args: tuple[Any, ...]) -> None:
    path = Path(args[1])
    os.truncate(path, path.stat().st_size // 2)
    kill_all()


def _tear(plant: Plant, args: tuple[Any, ...]) -> None:
    with open(args[0].path, "a", encoding="utf-8") as file:
        file.write('{"step":1,"lo')
    kill_all()


def _sleep(plant: Plant, args: tuple[Any, ...]) -> None:
    time.sleep(plant.value)


def _poison(plant: Plant, args: tuple[Any, ...]) -> None:
    group = args[0].engine.parameters.groups[0]
    group.master.view(-1)[3] = plant.value


def _fill(plant: Plant, args: tuple[Any, ...]) -> None:
    with open(plant.path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def _note(plant: Plant, args: tuple[Any, ...]) -> None:
    with open(plant.path, "a", encoding="utf-8") as file:
        file.write(f"{time.perf_counter()}\n")


_ACTIONS: dict[str, Callable[[Plant, tuple[Any, ...]], None]] = {
    "kill": lambda plant, args: kill_all(),
    "kill rank": _kill_rank,
    "cut": _cut,
    "tear": _tear,
    "sleep": _sleep,
    "poison": _poison,
    "fill": _fill,
    "note": _note,
}


def _wrap(original: Callable[..., Any], name: str, planted: Planted) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        factor = planted.reach(f"before {name}", args)
        result = original(*args, **kwargs)
        planted.reach(f"after {name}", args)
        return result._replace(loss_sum=result.loss_sum * factor) if factor != 1.0 else result

    return call


@contextlib.contextmanager
def planted(*plants: Plant, only: dict[str, str] = WRAPPED) -> Iterator[None]:
    """Plant them in this process while inside."""
    holder = Planted(list(plants))
    wanted = {plant.at.split(" ", 1)[1] for plant in plants}
    undo = []
    for name in wanted & only.keys():
        module, _, attribute = only[name].partition(":")
        owner: Any = importlib.import_module(module)
        *outer, attribute = attribute.split(".")
        for part in outer:
            owner = getattr(owner, part)
        undo.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, _wrap(getattr(owner, attribute), name, holder))
    try:
        yield
    finally:
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)


def to_environment(*plants: Plant) -> dict[str, str]:
    return {VARIABLE: json.dumps([asdict(plant) for plant in plants])}


def _from_environment() -> None:
    plants = [Plant(**values) for values in json.loads(os.environ.get(VARIABLE, "[]"))]
    in_rank = any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"))
    # the launcher need not load what trains
    _lasting.enter_context(planted(*plants, only=WRAPPED if in_rank else PREPARING))


_lasting = contextlib.ExitStack()  # for the life of the process
if __name__.startswith("meshwright_user_"):  # loaded through run.modules
    _from_environment()
