"""One-way links between neighbouring pipeline ranks, and the messages that are under way on them.

A link is a process group of two. Each way has its own: where a group keeps its messages in one queue, as NCCL does, a receive
that was posted early would hold up a send of the other way, and two ranks could wait for each other for ever. On a link both
ends post in one order (`spec.pipeline.with_messages`), so nothing is looked up by tag and nothing but tensors is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed import device as devices
from meshwright.distributed.mesh import subgroup
from meshwright.parallel.runner import Waiting
from meshwright.spec.pipeline import Action

__all__ = ["Links", "Mail", "pairs_of"]

TIMEOUT = timedelta(minutes=30)
"""What a message may take, the first one's compilation before it included: as long as other collectives of a run, and not what
a backend has for its default."""


def pairs_of(mesh: DeviceMesh, purpose: str, first: int, second: int, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup | None:
    """The group of the ranks at these two places of the pipeline, one for every place along the other axes; None on a rank that
    is in none of them. Collective over the world."""
    rows = mesh.mesh[[first, second]].reshape(2, -1).T.tolist()
    return subgroup(mesh, (purpose, first, second), rows, timeout)


class Links:
    """The links of this rank. Collective over the world; mesh: `pp` is its outermost axis.

    pairs: (from, to) of all links of the pipeline, in one order everywhere.
    """

    def __init__(self, mesh: DeviceMesh, pairs: Iterable[tuple[int, int]], timeout: timedelta = TIMEOUT):
        self.rank: int = mesh.get_local_rank("pp")
        self.device = devices.current(mesh.device_type)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for source, target in pairs:
            group = pairs_of(mesh, "link", source, target, timeout)
            if group is not None:
                self._groups[source, target] = group
        self._meet()

    def _meet(self) -> None:
        """The first message of a link makes its connection, and both ends wait for it: here, in one order everywhere."""
        token = torch.zeros(1, device=self.device)
        for source, target in self._groups:
            work = self.send(token, target) if source == self.rank else self.receive(token, source)
            work.wait()

    def send(self, tensor: torch.Tensor, target: int) -> dist.Work:
        """target: place in the pipeline. The tensor must stay as it is until the work is done."""
        group = self._groups[self.rank, target]
        work = dist.isend(tensor, group=group, group_dst=1 if self.rank < target else 0)
        assert work is not None  # this rank is in the group
        return work

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        group = self._groups[source, self.rank]
        work = dist.irecv(tensor, group=group, group_src=0 if source < self.rank else 1)
        assert work is not None
        return work


class Mail:
    """Messages of one step, by their actions. receipts: `spec.pipeline.receipts` of this rank.

    A tensor is kept until a receipt for it: a work does not say by itself that it is done while the host runs ahead of the
    device. Waiting for one that is done costs nothing, and on an accelerator it only orders streams.
    """

    def __init__(self, links: Links, wait: Waiting, receipts: Mapping[Action, Sequence[Action]]):
        self._links = links
        self._wait = wait
        self._receipts = receipts
        self._coming: dict[Action, tuple[dist.Work, torch.Tensor]] = {}
        self._going: dict[Action, tuple[dist.Work, torch.Tensor]] = {}

    def __len__(self) -> int:
        """Sent tensors that are kept."""
        return len(self._going)

    def post(self, receive: Action, buffer: torch.Tensor, source: int) -> None:
        """A receive into `buffer`."""
        self._coming[receive] = (self._links.receive(buffer, source), buffer)

    def take(self, receive: Action) -> torch.Tensor:
        """What was posted, once it is here."""
        work, buffer = self._coming.pop(receive)
        with self._wait():
            work.wait()
            self._drop(self._receipts.get(receive, ()))
        return buffer

    def send(self, message: Action, tensor: torch.Tensor, target: int) -> None:
        self._going[message] = (self._links.send(tensor, target), tensor)
        older = self._receipts.get(message, ())
        if older:
            with self._wait():
                self._drop(older)

    def finish(self) -> None:
        """Waits for everything that was sent."""
        with self._wait():
            self._drop(tuple(self._going))

    def _drop(self, messages: Iterable[Action]) -> None:
        for message in messages:
            self._going.pop(message)[0].wait()
