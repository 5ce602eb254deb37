"""Suite `checkpoint`: what a save costs the step loop, how long it goes on behind it, and how long a restore takes.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.host.checkpoint --repeat 3

A real run on random rows; ZeRO-1 over several ranks, so that each writes its own part. The disk's rates are measured in the
same folder with as many bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from meshwright.bench.host.data import copy_rate
from meshwright.bench.host.measures import Measure, of_repeats, say
from meshwright.bench.host.runs import HeldRows, Shape, opened, plan_of
from meshwright.checkpoint import CheckpointStore, SaveTicket
from meshwright.data.loader import StepData
from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.reduce import broadcast_json, max_scalars
from meshwright.distributed.world import Ranks, init_world
from meshwright.models import build
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.train.context import Context
from meshwright.train.engine import make_engine
from meshwright.train.loop import advance
from meshwright.train.step import agree, train_step

__all__ = ["CPU_SHAPE", "DEVICE_SHAPE", "Saves", "main", "measure"]

CPU_SHAPE = Shape(layers=4, width=320, vocab=8192, rows=1, seq_len=128)
DEVICE_SHAPE = Shape(layers=16, width=2048, vocab=32_768, rows=8, seq_len=1024, precision="bf16")
SLOWER_ON_DEVICE, SLOWER_ON_CPU = 1.05, 1.25
"""Targets of a step during a save over one without. On a CPU the writer takes a core that the ranks compute on."""
WARM = 5
QUIET = 4
"""Steps without a save before each save, the yardstick of those beside it."""


@dataclass
class Saves:
    """Seconds of the saves of a run. stalls: that the loop waited; behind: that the writing took; quiet, beside: of a step
    without a save and beside one, the median of each save. memory: bytes that the process had more at most than before."""

    bytes: int = 0
    stalls: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    memory: float = 0.0


class Steps:
    """The steps of a run, timed one by one, as the loop takes them."""

    def __init__(self, run: Context, batch: int):
        self._run = run
        self._data: Iterator[StepData] = run.train_loader.steps(0, lambda consumed: batch)

    def __call__(self) -> float:
        """Seconds until the device is done with one more step."""
        start, run = time.perf_counter(), self._run
        data = next(self._data)
        agreed = agree(run, data)
        result = train_step(run, data, agreed, 1e-4)
        advance(run, data, agreed, result)
        devices.synchronize(run.device)
        return time.perf_counter() - start


def saves_of(run: Context, repeat: int, batch: int) -> Saves:
    """Save `repeat` times in the background while the steps go on. All ranks stop looking at a save in the same step."""
    found, step = Saves(), Steps(run, batch)
    run.engine.model.train()
    for _ in range(WARM):
        step()
    with _Memory() as memory:
        for _ in range(repeat):
            found.quiet.append(statistics.median(step() for _ in range(QUIET)))
            ticket = run.store.save(run.state.step, run.engine.parameters_state(), {})
            found.stalls.append(_slowest(ticket.blocked_s, run.ranks))
            beside = []
            while not _done(ticket, run.ranks):
                beside.append(step())
            ticket.wait()
            found.behind.append(_slowest(ticket.written_s, run.ranks))
            whole = beside[:-1] if len(beside) > 1 else beside  # the save ended in the last one
            if whole:
                found.beside.append(statistics.median(whole))
    found.memory, found.bytes = memory.more, ticket.bytes
    return found


def _done(ticket: SaveTicket, ranks: Ranks) -> bool:
    return bool(max_scalars([float(not ticket.done)], ranks.control)[0] == 0)


def _slowest(seconds: float, ranks: Ranks) -> float:
    return float(max_scalars([seconds], ranks.control)[0])


class _Memory:
    """The most resident memory of this process in a `with` block, over that at its start."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    @property
    def more(self) -> float:
        return float(self._most - self._before)

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self._most = max(self._most, self._process.memory_info().rss)

    def __enter__(self) -> _Memory:
        self._before = self._most = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def restores(path: Path, engine: Engine, ranks: Ranks, repeat: int) -> list[float]:
    """Seconds to verify a checkpoint and fill the engine from it, each time by a store that knows nothing of it."""
    taken = []
    for _ in range(repeat):
        group = ranks.checkpoint if ranks.size > 1 else None
        with CheckpointStore(path.parent, group=group, rank=ranks.rank, world=ranks.size, write=False) as store:
            start = time.perf_counter()
            store.load(path, engine.parameters_state())
            devices.synchronize(ranks.device)
            taken.append(_slowest(time.perf_counter() - start, ranks))
    return taken


def disk_rates(folder: Path, size: int, repeat: int) -> tuple[float, float]:
    """Bytes a second of one file: written and on the disk, and read again from the page cache; medians."""
    block = os.urandom(1 << 20) * 16
    written, read = [], []
    path = folder / "rate.bin"
    for _ in range(repeat):
        start = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            os.fsync(file.fileno())
        written.append(path.stat().st_size / (time.perf_counter() - start))
        start = time.perf_counter()
        target = bytearray(len(block))
        with open(path, "rb", buffering=0) as file:
            while file.readinto(target):
                pass
        read.append(path.stat().st_size / (time.perf_counter() - start))
        path.unlink()
    return statistics.median(written), statistics.median(read)


def measure(ranks: Ranks, repeat: int, base: Path, shape: Shape) -> Iterator[Measure]:
    """Every rank calls it; the first has the measures."""
    layout = Layout(dp_shard=ranks.size, zero=1) if ranks.size > 1 else Layout()
    config = shape.config(ranks.size, 1 << 20, base / "run")
    with opened(config, plan_of(shape, layout, ranks.device.type), HeldRows(shape, 16), base / "run", ranks) as run:
        saves = saves_of(run, repeat, config.train.batch)
        path = run.store.newest()
        assert path is not None, "what was saved is whole"
        same = restores(path, run.engine, ranks, repeat)
    split = []
    if ranks.size > 1:
        plan = plan_of(shape, Layout(tp=ranks.size), ranks.device.type)
        other = make_engine(build(config.model, "lm"), config, plan, build_mesh(plan.layout, ranks.device.type), ranks.device)
        split = restores(path, other, ranks, repeat)
    if ranks.rank == 0:
        yield from _save_measures(saves, ranks, base, repeat)
        yield from _restore_measures(saves, same, split, ranks, base, repeat)
    broadcast_json(None, ranks.control)  # the folder lives until every rank is done with it


def _save_measures(saves: Saves, ranks: Ranks, base: Path, repeat: int) -> Iterator[Measure]:
    mine, size = saves.bytes / ranks.size, f"{saves.bytes / 2**20:,.0f} MiB in all"
    more: dict[str, Any] = {"ranks": ranks.size, "higher": False}
    copied, written = copy_rate(), disk_rates(base, saves.bytes, repeat)[0]
    stall: dict[str, Any] = {"limit": 2 * mine / copied, "limited_by": "copying a rank's part in host memory"}
    first = f"{size}; the memory that it is copied to is taken then"
    yield Measure("first save: the loop waits", saves.stalls[0], "s", note=first, **stall, **more)
    if saves.stalls[1:]:
        yield of_repeats("later saves: the loop waits", saves.stalls[1:], "s", note=size, **stall, **more)
    disk = f"writing as many bytes to the same disk, {written / 1e9:.2f} GB/s"
    yield of_repeats("save: written behind", saves.behind, "s", limit=saves.bytes / written, limited_by=disk, **more)
    target = SLOWER_ON_CPU if ranks.device.type == "cpu" else SLOWER_ON_DEVICE
    if saves.beside:
        ratios = [with_it / without for with_it, without in zip(saves.beside, saves.quiet, strict=False)]
        yield of_repeats("step without a save", saves.quiet, "s", **more)
        yield of_repeats("step beside a save / without", ratios, "", limit=1.0, target=target, **more)
    memory: dict[str, Any] = {"limit": mine / 2**20, "limited_by": "one copy of a rank's part of the checkpoint"}
    yield Measure("save: host memory of a rank", saves.memory / 2**20, "MiB", **memory, **more)


def _restore_measures(
    saves: Saves, same: Sequence[float], split: Sequence[float], ranks: Ranks, base: Path, repeat: int
) -> Iterator[Measure]:
    read = disk_rates(base, saves.bytes, repeat)[1]
    why = f"reading as many bytes from the page cache by one process, {read / 1e9:.2f} GB/s"
    more: dict[str, Any] = {"ranks": ranks.size, "higher": False, "limit": saves.bytes / read, "limited_by": why}
    yield of_repeats("restore", same, "s", note="digests verified", **more)
    if split:
        yield of_repeats(f"restore as tensor {ranks.size}", split, "s", note="saved under ZeRO-1", **more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with init_world(read_world(), devices.pick()) as ranks, contextlib.ExitStack() as stack:
        shape = CPU_SHAPE if ranks.device.type == "cpu" else DEVICE_SHAPE
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-bench-"))
        torch.manual_seed(0)
        for one in measure(ranks, args.repeat, Path(broadcast_json(temporary, ranks.control)), shape):
            say(one)


if __name__ == "__main__":
    main()
