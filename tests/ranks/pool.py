"""A warm pool of gloo ranks for tests: `ranks(4).run(function, *args)` runs `function` on every rank, in 10 ms or so.

In a test file (`ranks` is the fixture of tests/conftest.py):

    def add(value):                                   # at module level, so that a rank can import it
        tensor = torch.tensor(float(dist.get_rank() + value))
        dist.all_reduce(tensor)
        return tensor.item()

    def test_add(ranks):
        assert ranks(2).run(add, 10) == [21.0, 21.0]  # one result a rank; arguments and results are pickled
        ranks(2).run("tests.ranks.test_mine:add", 10, timeout=20)

Inside a rank the default process group (gloo, `n` ranks) exists already and lives as long as the pool, so use
`mesh(shape, names)` or `layout_mesh(layout)` of this module for meshes, and `joined()` for a `Ranks`: they are made once.
Axes of different meshes that put the same ranks together have one group: fewer threads, and code compiled for one mesh serves
another.
Destroying a mesh would leave DTensor's sharding cache with the names of dead groups. Every call starts with
`torch.manual_seed(0)`, float32 as the default type and one thread.

When a rank raises, dies or does not answer in time, `run` raises `RankError` with the rank, its traceback and the end of its
output, and the next `run` starts on fresh ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshwright.distributed.worker import tie_to_parent

__all__ = ["Pool", "Pools", "RankError", "joined", "layout_mesh", "mesh"]

PRELOAD = ["torch.distributed.tensor", "meshwright.verify.cases", "tests.ranks.warm", __name__]
"""What ranks find imported: read once by the server that they are forked from, instead of a second or so by each of them."""
FOLLOWING = ("closed by peer", "Connection reset", "Broken pipe", "Connection refused")
"""What a rank says when another one went away first: never the culprit while any other failure is known."""
THREADS = 120
"""Ranks with more threads are started anew: each group has some, gloo's wake a hundred times a second, and a few hundred take
the cores from everything else."""
SETTLE = 1.0
"""Seconds to wait for the culprit after a failure that only follows from another."""


_starting = threading.Lock()


class RankError(Exception):
    """A rank failed. `rank` is the first culprit, `exit_code` its own where the process died (128 + signal)."""

    def __init__(self, message: str, rank: int, exit_code: int | None = None):
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


# ---- in the test process ------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    life: Connection
    log: Path


class Pool:
    """`world` ranks that stay alive between calls."""

    def __init__(self, world: int, folder: Path):
        self.world = world
        self._folder = folder
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._generation = 0

    def run(self, function: str | Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(*args)` on every rank; results in rank order. Raises RankError within about a second of a failure."""
        job = pickle.dumps((function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}", args))
        if self._ranks and len(os.listdir(f"/proc/{self._ranks[0].process.pid}/task")) > THREADS:
            self.close()
        if not self._ranks:
            self._start()
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.pipe.send_bytes(pickle.dumps((sys.path, job)))
        try:
            results = self._collect(timeout)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: int) -> None:
        """Ranks stand still between calls: every group has a thread that wakes a hundred times a second, and a test run has
        a thousand of them in its idle pools."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, number)

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.pipe.close()
            rank.life.close()
        for rank in self._ranks:
            rank.process.join()
        self._ranks = []
        self._store = None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = _context()
        self._generation += 1
        # the store lives here, so that it outlives any rank; its port is whatever is free
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for rank in range(self.world):
            ours, theirs = multiprocessing.Pipe()
            their_life, our_life = multiprocessing.Pipe(duplex=False)
            log = self._folder / f"world{self.world}-{self._generation}-rank{rank}.log"
            args = (theirs, their_life, rank, self.world, self._store.port, str(log))
            process = context.Process(target=_serve, args=args, name=f"rank{rank}/{self.world}")
            process.start()
            theirs.close()
            their_life.close()
            self._ranks.append(_Rank(process, ours, our_life, log))

    def _collect(self, timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, int | None]] = {}
        pipes = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        while pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                assert isinstance(pipe, Connection)
                index = pipes.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._ranks[index].process.join(5)
                    code = self._ranks[index].process.exitcode
                    failures[index] = (f"the process ended ({_ended(code)})", 128 - code if code and code < 0 else code)
                    continue
                if good:
                    results[index] = value
                else:
                    failures[index] = (value, None)
            if failures:
                if any(not _follows(text) for text, _ in failures.values()):
                    break
                end = min(end, time.monotonic() + SETTLE)
        if not failures and not pipes:
            return [results[index] for index in range(self.world)]
        if not failures:
            self._stacks(list(pipes.values()))
            for index in pipes.values():
                failures[index] = (f"no answer within {timeout:g} s; ranks {sorted(pipes.values())} still run", None)
        culprit = min(failures, key=lambda index: (_follows(failures[index][0]), list(failures).index(index)))
        text, code = failures[culprit]
        raise RankError(f"rank {culprit} of {self.world}: {text}\n{self._tail(culprit)}".rstrip(), culprit, code)

    def _stacks(self, indices: list[int]) -> None:
        for index in indices:
            pid = self._ranks[index].process.pid
            if self._ranks[index].process.is_alive():
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes every thread's stack into the rank's log
        time.sleep(0.3)

    def _tail(self, index: int, lines: int = 40) -> str:
        log = self._ranks[index].log
        text = log.read_text(errors="replace").rstrip() if log.exists() else ""
        return "\n".join(["-- its output --", *text.splitlines()[-lines:]]) if text else ""


class Pools:
    """The pools of one test run, by number of ranks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._folder.name)
        """For files that ranks read; it goes when the pools are closed."""
        self._pools: dict[int, Pool] = {}
        atexit.register(self.close)  # multiprocessing would wait for live children at exit

    def __call__(self, world: int) -> Pool:
        if world not in self._pools:
            self._pools[world] = Pool(world, self.folder)
        return self._pools[world]

    def keep_only(self, world: int) -> None:
        """Ends the ranks of all other pools."""
        for size, pool in self._pools.items():
            if size != world:
                pool.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._folder.cleanup()
        atexit.unregister(self.close)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    with _starting:
        _serve_forks(context)
    return context


def _serve_forks(context: Any) -> None:
    context.set_forkserver_preload(PRELOAD)
    from multiprocessing import forkserver

    # the server keeps the environment of its first start, and OpenMP reads its variables when torch is loaded there; a rank
    # that saw a GPU would take memory on it
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _follows(text: str) -> bool:
    return any(words in text for words in FOLLOWING)


def _ended(code: int | None) -> str:
    if code is None:
        return "still closing"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ---- in a rank ----------------------------------------------------------------------------------------------------------

_meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], Any] = {}
_groups: dict[tuple[tuple[int, ...], ...], Any] = {}
_joined: list[Any] = []


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The DeviceMesh on CPU of this shape over the whole pool; made once."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    key = (tuple(shape), tuple(names))
    if key not in _meshes:
        places = torch.arange(math.prod(shape)).view(shape)
        groups = [_group(places.movedim(axis, -1).reshape(-1, size).tolist()) for axis, size in enumerate(shape)]
        _meshes[key] = DeviceMesh.from_group(groups, "cpu", places, mesh_dim_names=key[1])
    return _meshes[key]


def _group(rows: list[list[int]]) -> Any:
    """This rank's group of those; made once."""
    import torch.distributed as dist

    key = tuple(map(tuple, rows))
    if key not in _groups:
        _groups[key], _ = dist.new_subgroups_by_enumeration(rows)
    return _groups[key]


def layout_mesh(layout: Any) -> Any:
    """The DeviceMesh with the five named axes of a `meshwright.spec.layout.Layout`; made once."""
    return mesh(tuple(size for _, size in layout.axes), tuple(name for name, _ in layout.axes))


def joined() -> Any:
    """The pool as a `meshwright.distributed.world.Ranks`, with its control and checkpoint groups; made once."""
    import torch
    import torch.distributed as dist

    from meshwright.distributed.world import Ranks, World

    if not _joined:
        rank, size = dist.get_rank(), dist.get_world_size()
        world = World(rank, size, rank, size, master_port=1, source="test pool")
        _joined.append(Ranks.adopt(world, torch.device("cpu"), timeout=60.0))
    return _joined[0]


def _end_with(life: Connection) -> None:
    """The test process holds the other end of this pipe; however it ends, this rank ends too."""
    wait([life])
    os._exit(0)


def _serve(pipe: Connection, life: Connection, rank: int, world: int, port: int, log: str) -> None:
    """A rank's whole life: join the group, then run one job after another until the test process goes away."""
    tie_to_parent()  # the server of forks, which ends with the test process: a rank that stands still would not notice
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(os.dup(output), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(output), "w", buffering=1)
    faulthandler.enable(file=output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the test process ends us

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))
    while True:
        try:
            path, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        try:
            answer = pickle.dumps((True, _call(job)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)
            dist.destroy_process_group()  # at once: peers that wait for this rank raise within milliseconds
            os._exit(1)
        pipe.send_bytes(answer)


def _call(job: bytes) -> Any:
    import torch

    name, args = pickle.loads(job)
    module, _, attribute = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"(meshwright|tests)\.")
        return function(*args)
