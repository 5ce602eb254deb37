"""Joining the other ranks, and leaving them: process groups as values, made once, always destroyed.

    with init_world(read_world(), "cpu") as ranks:
        mesh = build_mesh(layout, ranks.device.type)

Meeting is in two steps, so that a wait can say for whom: every rank signs in at a store, and only when all have does torch
build the groups. A single process meets itself in a store of its own and takes no port.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.distributed import device as devices
from meshwright.distributed.environment import World
from meshwright.errors import DeviceError, Finding, MeshwrightError, RankFailure

__all__ = ["Ranks", "init_world"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. `group` is torch's default group over the device's own backend and carries the training; the other
    two are gloo groups over all ranks: `control` for small agreements, `checkpoint` for the thread that saves meanwhile.
    """

    world: World
    device: torch.device
    backend: str
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.world

    @classmethod
    def adopt(cls, world: World, device: torch.device, timeout: float = 1800.0) -> Ranks:
        """Ranks over a default process group that exists already; whoever made that group also destroys it. Collective."""
        wait = timedelta(seconds=timeout)
        control = dist.new_group(backend="gloo", timeout=wait)
        checkpoint = dist.new_group(backend="gloo", timeout=wait)
        whole = dist.group.WORLD
        if whole is None:
            raise MeshwrightError("there is no default process group to adopt")
        return cls(world, device, dist.get_backend(), whole, control, checkpoint)


@contextlib.contextmanager
def init_world(
    world: World, device_type: str = "cpu", *, timeout: float = 1800.0, join_timeout: float = 120.0
) -> Iterator[Ranks]:
    """Meet the other ranks, take this rank's device, and give the groups; destroys them at the end, whatever happens.

    timeout: seconds a collective may take. join_timeout: seconds to wait for all ranks to arrive, and to leave.
    Raises DeviceError that names the ranks that did not arrive, the address that did not answer, or the device that is missing.
    """
    if dist.is_initialized():
        raise MeshwrightError("torch.distributed is initialized already in this process; use Ranks.adopt")
    device = devices.rank_device(device_type, world.local_rank)
    devices.set_current(device)
    backend = devices.backend(device_type)
    store = _meet(world, join_timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend != "gloo" else None,
    )
    try:
        ranks = Ranks.adopt(world, device, timeout)
        yield ranks
        _leave(ranks, join_timeout)
    except BaseException:
        # a device backend may wait here for peers that are gone; this process is about to end, so it may be left behind
        closing = threading.Thread(target=_destroy, daemon=True)
        closing.start()
        closing.join(5.0)
        raise
    else:
        _destroy()


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(world: World, timeout: float) -> dist.Store:
    """A store that every rank of the world has signed in at."""
    if world.world == 1:
        return dist.HashStore()
    end = time.monotonic() + timeout
    address = f"{world.master_addr}:{world.master_port}"
    try:
        tcp = dist.TCPStore(
            world.master_addr,
            world.master_port,
            is_master=world.rank == 0 and not world.agent_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError family derives from RuntimeError
        what = f"rank {world.rank} of {world.world} could not meet the others within {timeout:g} s: {_first_line(error)}"
        hosting = world.rank == 0 and not world.agent_store
        fix = "Choose a free port" if hosting else "Check that rank 0 runs, and that this machine reaches its address"
        raise DeviceError(findings=[Finding(address, what, fix)]) from None
    store = dist.PrefixStore(f"meshwright/{world.run_id}/{world.restart}", tcp)
    store.set(f"here/{world.rank}", socket.gethostname())
    _await_all(store, "here", world, end, f"did not arrive at {address}")
    return store


def _await_all(store: dist.Store, key: str, world: World, end: float, failing: str) -> None:
    start = time.monotonic()
    try:
        store.wait([f"{key}/{rank}" for rank in range(world.world)], timedelta(seconds=max(end - start, 0.001)))
    except RuntimeError as error:
        missing = [rank for rank in range(world.world) if not store.check([f"{key}/{rank}"])]
        if not missing:
            raise
        what = (
            f"rank {world.rank} waited {time.monotonic() - start:.0f} s for {_names(missing)} of {world.world}, which {failing}"
        )
        raise DeviceError(findings=[Finding("ranks", what, "See the logs of those ranks")]) from error


def _leave(ranks: Ranks, timeout: float) -> None:
    """Nobody destroys its groups, or the store that rank 0 may hold, while another rank still uses them.

    torch's barrier keeps its time on rank 0 alone; where that one does not come, the others would wait as long as a collective
    may take. Raises RankFailure.
    """
    from meshwright.distributed.reduce import barrier

    devices.synchronize(ranks.device)
    if ranks.size == 1:
        return
    failed: list[RankFailure] = []

    def meet() -> None:
        try:
            barrier(ranks.control, timeout, "the end of the run")
        except RankFailure as error:
            failed.append(error)

    waiting = threading.Thread(target=meet, daemon=True)
    waiting.start()
    waiting.join(timeout + 5.0)
    if waiting.is_alive():
        failed.append(RankFailure(f"rank {ranks.rank} waited {timeout:g} s at the end of the run: rank 0 has not come there"))
    if failed:
        raise failed[0]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
